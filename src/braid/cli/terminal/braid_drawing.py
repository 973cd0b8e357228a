"""Draws a topic's layout as a braid: time goes down, the ring of key hashes across, and each segment is a strand.

    epoch   0000            4000            8000            c000        ffff
        0   │0                                                             │
            ├──────────────────────────────┬───────────────────────────────┤
        1   │1                             │2                              │
            ├──────────────┬───────────────┤                               │
        2   │3             │4              │                               │

A row is a layout; a line between two rows shows which ranges changed hands. Strands that are too narrow for their
number have none: the table below the drawing names all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

RING: Final = 0x10000
MARGIN: Final = 8
MIN_WIDTH: Final = 16

_CORNERS: Final = {
    # up, down, left, right
    (True, True, False, False): "│",
    (True, True, True, True): "┼",
    (True, True, False, True): "├",
    (True, True, True, False): "┤",
    (True, False, True, True): "┴",
    (False, True, True, True): "┬",
    (False, False, True, True): "─",
    (True, False, False, True): "└",
    (True, False, True, False): "┘",
    (False, True, False, True): "┌",
    (False, True, True, False): "┐",
    (False, False, True, False): "─",
    (False, False, False, True): "─",
}

Segment = Mapping[str, Any]
"""As the layout's JSON has it."""


def draw(segments: Sequence[Segment], *, width: int, rows: int, owners: Mapping[str, str | None]) -> list[str]:
    """Return the lines of the drawing, `width` columns wide, of the latest `rows` layouts. The last row names the
    owners, where there is room."""
    columns = max(width - MARGIN - 1, MIN_WIDTH)
    epochs = sorted({segment["createdAtEpoch"] for segment in segments})
    drawing = _Drawing(segments, columns)
    lines = [f"{'epoch':>{MARGIN - 3}}   {_scale(columns)}"]
    if len(epochs) > rows:
        lines.append(f"{'…':>{MARGIN - 3}}   ({len(epochs) - rows} earlier layouts)")
        epochs = epochs[-rows:]
    for number, epoch in enumerate(epochs):
        if number:
            lines.append(" " * MARGIN + drawing.change(epochs[number - 1], epoch))
        last = epoch == epochs[-1]
        lines.append(f"{epoch:>{MARGIN - 3}}   " + drawing.row(epoch, owners if last else None))
    return [line.rstrip() for line in lines]


class _Drawing:
    def __init__(self, segments: Sequence[Segment], columns: int) -> None:
        self._segments = sorted(segments, key=lambda segment: segment["hashRange"]["start"])
        self._columns = columns

    def row(self, epoch: int, owners: Mapping[str, str | None] | None) -> str:
        """The strands of one layout. A strand has its number where it begins; with `owners`, all have."""
        cells = [" "] * (self._columns + 1)
        for segment in self._of(epoch):
            start, end = self._place(segment)
            cells[start] = cells[end] = "│"
        for segment in self._of(epoch):
            start, end = self._place(segment)
            if owners is None and segment["createdAtEpoch"] != epoch:
                continue
            number = str(segment["segmentId"])
            owner = (owners or {}).get(number) or ""
            label = f"{number} {owner}".strip()
            if len(label) > end - start - 1:
                label = number
            if len(label) <= end - start - 1:
                cells[start + 1 : start + 1 + len(label)] = label
        return "".join(cells)

    def change(self, before: int, after: int) -> str:
        """The line between two layouts."""
        up, down = self._edges(before), self._edges(after)
        flat = [False] * (self._columns + 2)  # Whether the cell at the left of each column is drawn.
        for segment in self._of(after):
            if segment["createdAtEpoch"] > before:
                start, end = self._place(segment)
                flat[start + 1 : end + 1] = [True] * (end - start)
        return "".join(
            _CORNERS.get((column in up, column in down, flat[column], flat[column + 1]), "╷" if column in down else " ")
            if column in up or column in down or flat[column] or flat[column + 1]
            else " "
            for column in range(self._columns + 1)
        )

    def _of(self, epoch: int) -> list[Segment]:
        """The segments that took writes in the layout of this epoch, as far as they are known."""
        return [
            segment
            for segment in self._segments
            if segment["createdAtEpoch"] <= epoch and (segment["state"] == "ACTIVE" or segment["sealedAtEpoch"] > epoch)
        ]

    def _edges(self, epoch: int) -> set[int]:
        return {column for segment in self._of(epoch) for column in self._place(segment)}

    def _place(self, segment: Segment) -> tuple[int, int]:
        """The columns of a strand's two edges; neighbours share one."""
        hashes = segment["hashRange"]
        return round(hashes["start"] * self._columns / RING), round((hashes["end"] + 1) * self._columns / RING)


def _scale(columns: int) -> str:
    cells = [" "] * (columns + 1)
    for quarter in range(4):
        at = round(quarter * columns / 4)
        cells[at : at + 4] = f"{quarter * RING // 4:04x}"
    if columns >= 24:
        cells[columns - 3 :] = "ffff"
    return "".join(cells)
