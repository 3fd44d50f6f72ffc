"""Every interleaving of two syncers and a learner: `python -m tests.sim.interleave`."""
