"""A topic lands in a table, each record exactly once."""

from braid.spark.jobs.lake.job import Lake, LakeReport, open_table

__all__ = ["Lake", "LakeReport", "open_table"]
