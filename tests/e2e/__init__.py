"""Whole runs through the real command."""
