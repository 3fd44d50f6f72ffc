"""Numbers as people read them. Pure."""

from __future__ import annotations

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_BITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
_COUNTS = ("", " k", " M", " G", " T")


def _scaled(value: float, units: tuple[str, ...]) -> tuple[float, str]:
    step = 0
    while abs(value) >= 999.5 and step < len(units) - 1:
        value, step = value / 1000.0, step + 1
    return value, units[step]


def three_digits(value: float) -> str:
    """Return a number with about three significant digits."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 or value == int(value) else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def size(value: float | None) -> str:
    """Return bytes as `1.23 MB`."""
    if value is None:
        return "-"
    number, unit = _scaled(value, _BYTES)
    return f"{three_digits(number)} {unit}"


def bit_rate(gbits: float) -> str:
    """Return Gbit/s as `5.3 Gbit/s` or `12 kbit/s`."""
    number, unit = _scaled(gbits * 1e9, _BITS)
    return f"{three_digits(number)} {unit}"


def count(value: float | None) -> str:
    """Return a count as `1.23 M`."""
    if value is None:
        return "-"
    number, unit = _scaled(value, _COUNTS)
    return f"{three_digits(number)}{unit}"


def duration(seconds: float | None) -> str:
    """Return seconds as `12 s`, `3.4 min`, `2.1 h` or `5.0 d`."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def share(value: float | None) -> str:
    """Return a share as `87 %`."""
    return "-" if value is None else f"{100 * value:.0f} %"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with fixed digits after the point."""
    return "-" if value is None else f"{value:.{digits}f}"
