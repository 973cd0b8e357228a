"""How many examples Hypothesis tries: all of them in `make test`, a part in `make check`."""

from __future__ import annotations

import os
from typing import Final

DEFAULT: Final = 100
PERCENT: Final = int(os.environ.get("BRAID_EXAMPLES_PERCENT", "100"))


def share(examples: int) -> int:
    """Return the part of so many examples that this run tries."""
    return max(examples * PERCENT // 100, 5)
