"""The audit of a topic's whole history."""

from braid.spark.jobs.audit.job import Report, audit_topic

__all__ = ["Report", "audit_topic"]
