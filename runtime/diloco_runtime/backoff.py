"""How long to wait before trying again what failed."""

from __future__ import annotations

PAUSES = (0.2, 0.4, 0.8, 1.6, 3.2, 5.0)
"""Seconds between tries while the store does not answer; the last one repeats."""


def pause_after(failures: int) -> float:
    """Return the back-off after so many failures in a row (>= 1), in seconds."""
    return PAUSES[min(failures, len(PAUSES)) - 1]
