"""Braid: a durable message broker whose topics split, merge, replicate and move, and whose history is a Spark table."""

from braid.model.errors import BraidError

__version__ = "0.1.0"

__all__ = ["BraidError", "__version__"]
