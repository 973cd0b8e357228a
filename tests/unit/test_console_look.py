"""The console's style sheet: what is written can be read, light and dark."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator

import pytest

SHEET = (importlib.resources.files("braid.console") / "static" / "console.css").read_text()
LEAST = 4.5
"""Of the contrast of text, by WCAG 2.2 (AA)."""
THEMES = {"light": ":root", "dark": "body.body--dark"}


def colours(theme: str) -> dict[str, str]:
    """Return the opaque colours of a theme, by name."""
    names = dict[str, str]()
    for selector in dict.fromkeys((":root", THEMES[theme])):
        block = re.search(rf"^{re.escape(selector)} \{{(.*?)^\}}", SHEET, re.MULTILINE | re.DOTALL)
        assert block is not None
        names.update(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block[1]))
    return names


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def written() -> Iterator[tuple[str, str]]:
    """Yield text and ground, as rules of the sheet bring them together."""
    for text in ("text", "muted", "faint", "accent"):
        for ground in ("bg", "surface", "raised"):
            yield text, ground
    yield "text", "line-soft"
    yield "muted", "line-soft"  # Pills without a meaning, and rows under the pointer.
    for kind in ("good", "warn", "bad", "accent"):
        yield kind, f"{kind}-soft"


def test_black_and_white_differ_most() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", THEMES)
def test_text_has_enough_contrast(theme: str) -> None:
    found = colours(theme)
    weak = {pair: round(ratio, 2) for pair in written() if (ratio := contrast(*(found[n] for n in pair))) < LEAST}
    assert weak == {}


def test_text_has_no_colour_but_these() -> None:
    """A rule that gives text another colour belongs into `written`."""
    given = set(re.findall(r"(?<![\w-])color: var\(--([\w-]+)\)", SHEET))
    assert given <= {text for text, _ in written()} | {"surface"}  # Hints are written on the colour of text.
    assert set(re.findall(r"text[^{}]*\{[^}]*fill: var\(--([\w-]+)\)", SHEET)) <= given
