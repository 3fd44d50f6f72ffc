"""The control plane of `diloco`: what runs on a person's own machine. Imports neither torch nor SkyPilot at the top."""
