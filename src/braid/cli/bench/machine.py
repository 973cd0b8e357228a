"""Where and when a benchmark was run: every table says it."""

from __future__ import annotations

import datetime
import os
import platform


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
