"""Reads the few series that the console needs out of a broker's `/metrics`."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

_LINE: Final = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Series = dict[tuple[str, ...], float]
"""By the values of the labels, in the order of the labels' names."""


def read_metrics(text: str, wanted: Collection[str]) -> dict[str, Series]:
    """Return the wanted families by name. A family without labels has the key ()."""
    found: dict[str, Series] = {name: {} for name in wanted}
    for name, labels, value in _LINE.findall(text):
        if name in found:
            key = tuple(each for _, each in sorted(_LABEL.findall(labels))) if labels else ()
            try:
                found[name][key] = float(value)
            except ValueError:
                continue
    return found
