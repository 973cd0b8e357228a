from __future__ import annotations

from braid.ports.allocator import keep_freed_memory

__all__ = ["keep_freed_memory"]
