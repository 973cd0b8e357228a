"""Times and sizes, as people write them on a command line."""

from __future__ import annotations

import re
from typing import Any, Final

import click


class Quantity(click.ParamType[int]):
    """A whole number with a unit. The value is in the smallest unit. A number without a unit may be allowed, too."""

    def __init__(self, name: str, units: dict[str, int], examples: str, *, bare: bool) -> None:
        self.name = name
        self._units = units
        self._examples = examples
        self._bare = bare

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([1-9][0-9]{0,17})\s*([A-Za-z]*)", value.strip())
        unit = match[2] if match is not None else ""
        if match is None or (unit not in self._units if unit else not self._bare):
            self.fail(f"{value!r} is no {self.name}: write {self._examples}", param, ctx)
        return int(match[1]) * (self._units[unit] if unit else 1)

    def text(self, amount: int) -> str:
        """Return the amount in the largest unit that divides it."""
        for unit, size in sorted(self._units.items(), key=lambda item: -item[1]):
            if amount % size == 0:
                return f"{amount // size}{unit}"
        return str(amount)


class _Hash(click.ParamType[str]):
    """A key's hash in hexadecimal digits."""

    name = "hash"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if re.fullmatch(r"[0-9a-fA-F]{1,4}", value) is None:
            self.fail(f"{value[:200]!r} is no hash: write 1 to 4 hexadecimal digits, such as c000", param, ctx)
        return str(value)


HASH: Final = _Hash()

OFF: Final = "off"
FOREVER: Final = "forever"


class OrWord(click.ParamType[int | str]):
    """A quantity, or one of some words."""

    def __init__(self, quantity: Quantity, *words: str) -> None:
        self.name = quantity.name
        self._quantity = quantity
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return value if value in self._words else self._quantity.convert(value, param, ctx)


DURATION: Final = Quantity(
    "time",
    {"s": 1, "m": 60, "h": 3_600, "d": 86_400},
    "90s, 15m, 12h or 30d",
    bare=False,
)
"""In seconds."""

SIZE: Final = Quantity(
    "size",
    {
        "B": 1,
        **{name: 1 << 10 * power for power, unit in enumerate("KMGT", 1) for name in (unit, f"{unit}iB")},
        **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)},
    },
    "500MiB, 10GiB or a number of bytes",
    bare=True,
)
"""In bytes: K and KiB are 1,024, KB is 1,000."""
