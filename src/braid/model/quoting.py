"""What errors repeat of the input that they refuse.

An error says what was asked. A caller may ask with megabytes, and its error is copied, logged and sent. So errors quote
the beginning only, and say how long the rest is.
"""

from __future__ import annotations

from typing import Final

MAX_QUOTED_CHARS: Final = 200


def cut(text: str, most: int = MAX_QUOTED_CHARS) -> str:
    """Return the text, or its beginning and its length."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def quote(given: object) -> str:
    """Return the `repr` of what was given, cut."""
    if isinstance(given, str | bytes) and len(given) > MAX_QUOTED_CHARS:
        return f"{given[:MAX_QUOTED_CHARS]!r}… ({len(given)} characters)"
    return cut(repr(given))
