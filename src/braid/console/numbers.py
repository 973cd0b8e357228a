"""How numbers look: with units, and with as many digits as one can compare."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_THOUSANDS: Final = ("", "k", "M", "G", "T")
UNKNOWN: Final = "–"


def bytes_text(count: float | None) -> str:
    if count is None:
        return UNKNOWN
    if count < 1024:
        return f"{count:.0f} B"
    size = float(count)
    for unit in _UNITS:
        size /= 1024
        if size < 1000 or unit == _UNITS[-1]:
            return f"{size:.1f} {unit}" if size < 99.95 else f"{size:.0f} {unit}"
    raise AssertionError("unreachable")


def count_text(count: float | None) -> str:
    """Return the exact number, with commas; `–` if it is not known."""
    return UNKNOWN if count is None else f"{count:,.0f}"


def plural(count: float | None, noun: str) -> str:
    """Return the noun as it stands after this number."""
    if count == 1:
        return noun
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def counted(count: float | None, noun: str) -> str:
    """Return `1 record`, `1,234 records`."""
    return f"{count_text(count)} {plural(count, noun)}"


def short_text(count: float | None) -> str:
    """Return `950`, `1.2 k`, `35 M`."""
    if count is None:
        return UNKNOWN
    size = float(count)
    for unit in _THOUSANDS:
        if abs(size) < 999.5 or unit == _THOUSANDS[-1]:
            digits = 1 if unit and abs(size) < 99.95 else 0
            return f"{size:.{digits}f} {unit}".rstrip()
        size /= 1000
    raise AssertionError("unreachable")


def rate_text(per_s: float | None, what: str = "") -> str:
    """Return `1.2 k records/s`; small rates keep a digit after the point, and the smallest are not 0."""
    if per_s is None:
        return UNKNOWN
    small = "<0.1" if 0 < per_s < 0.05 else f"{per_s:.1f}"
    number = small if 0 < per_s < 10 else short_text(per_s)
    return f"{number} {what}/s" if what else f"{number}/s"


def bytes_rate_text(per_s: float | None) -> str:
    return UNKNOWN if per_s is None else f"{bytes_text(per_s)}/s"


def age_text(seconds: float | None) -> str:
    """Return `3 s`, `5 min`, `2 h`, `9 days`."""
    if seconds is None:
        return UNKNOWN
    seconds = max(0.0, seconds)
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def percent_text(part: float | None) -> str:
    return UNKNOWN if part is None else f"{part * 100:.0f} %"
