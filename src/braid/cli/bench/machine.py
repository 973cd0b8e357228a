"""The machine of a benchmark, which every table names, and how much of it a process uses."""

from __future__ import annotations

import datetime
import os
import platform
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def machine_facts() -> dict[str, str | int]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine_text(where: str) -> str:
    facts = machine_facts()
    return (
        f"{facts['date']}, {where}, {facts['cores']} cores, Python {facts['python']}, {facts['system']}."
        " Other machines, other numbers."
    )


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def rss_bytes(pid: int, *, peak: bool = False) -> int:
    """The bytes that a process holds in memory, or the most that it ever held."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM" if peak else "VmRSS"].split()[0]) << 10
