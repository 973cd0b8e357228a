"""Which splits and merges would even the load of a topic."""

from braid.spark.jobs.advise.job import AdviceReport, advise_topic

__all__ = ["AdviceReport", "advise_topic"]
