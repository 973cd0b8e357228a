"""What a benchmark measured: an aligned table for people, JSON lines for comparing runs.

    report = Report("batches")
    report.add("encode 100 B", 21.4e6, "records/s", batch_bytes=262_144, codec="none")
    report.print()
    report.write_jsonl()          # appends to benchmarks/results/batches.jsonl

Every line carries the facts of the machine, because a number without them means nothing.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

Fact = str | int | float | bool | None


class Report:
    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []

    def add(self, case: str, value: float, unit: str, **facts: Fact) -> None:
        self.rows.append({"case": case, "value": value, "unit": unit, **facts})

    def table(self) -> str:
        """The rows as aligned plain text; facts that are the same in every row stand once, above the table."""
        names = list(dict.fromkeys(fact for row in self.rows for fact in row if fact not in ("case", "value", "unit")))
        shared = [name for name in names if len(self.rows) > 1 and len({str(row.get(name)) for row in self.rows}) == 1]
        varying = [name for name in names if name not in shared]
        head = ["case", "value", "unit", *varying]
        cells = [
            [row["case"], readable(row["value"]), row["unit"], *(readable(row.get(name)) for name in varying)]
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(head, *cells)]
        numeric = [all(isinstance(row.get(name, 0), int | float) for row in self.rows) for name in head]
        lines = [
            "  ".join(
                text.rjust(width) if right else text.ljust(width) for text, width, right in zip(line, widths, numeric)
            ).rstrip()
            for line in [head, ["─" * width for width in widths], *cells]
        ]
        title = "  ".join([self.name, *(f"{name}={readable(self.rows[0][name])}" for name in shared)])
        return "\n".join([title, "", *lines])

    def print(self) -> None:
        facts = machine()
        print(f"\n{self.table()}\n\n{facts['cores']} cores, Python {facts['python']}, {facts['system']}\n", flush=True)

    def write_jsonl(self, path: str | Path | None = None) -> Path:
        """Append one JSON line per row, by default to `benchmarks/results/{name}.jsonl`."""
        target = Path(path) if path is not None else RESULTS / f"{self.name}.jsonl"
        target.parent.mkdir(parents=True, exist_ok=True)
        facts = machine()
        with target.open("a", encoding="utf-8") as file:
            for row in self.rows:
                file.write(json.dumps({"benchmark": self.name, **row, "machine": facts}) + "\n")
        return target


def machine() -> dict[str, Fact]:
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def readable(value: Fact) -> str:
    """Three digits that count: `21_400_000.0` → `21.4 M`, `3.14159` → `3.14`. Integers below 10 M stay whole."""
    if value is None:
        return ""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int) and abs(value) < 10_000_000:
        return str(value)
    for factor, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{suffix}" if abs(value) < 999.5 * factor else f"{value / factor:.0f}{suffix}"
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
