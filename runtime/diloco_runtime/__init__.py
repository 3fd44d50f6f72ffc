"""The data plane of `diloco`: what runs on every island. Knows nothing of the command line or of SkyPilot."""

__version__ = "0.1.0"
