"""The audit of a topic's whole history."""

from braid.spark.jobs.audit.job import AuditReport, audit_topic

__all__ = ["AuditReport", "audit_topic"]
