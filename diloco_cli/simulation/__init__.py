"""Runs in virtual time: the real agent, learner, syncer and supervisor over a simulated store, network and machines."""
