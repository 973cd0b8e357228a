"""Whether this system lets a process have asynchronous files: some containers do not, and Braid does without."""

from __future__ import annotations

import functools

import pytest

from braid.ports.kernel_sync import load


@functools.cache
def is_forbidden() -> bool:
    try:
        load().Context(1)
    except SystemError:
        return True
    return False


needs_kernel_aio = pytest.mark.skipif(is_forbidden(), reason="this system forbids io_setup")
