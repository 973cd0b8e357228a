"""PySpark's daemon, from which Spark forks its Python workers, with everything imported that a task needs.

A worker ends with each task that fails, and tests let many fail: each new one would import for half a second.
"""

from __future__ import annotations

import importlib
import os

from pyspark.daemon import manager

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy then starts no thread, which a fork would leave behind.
for module in (
    "pyspark.worker",
    "pyspark.sql.worker.plan_data_source_read",
    "braid.spark.data_source",
    "braid.spark.jobs.audit.tasks",
    "braid.spark.sink.task",
):
    importlib.import_module(module)

if __name__ == "__main__":
    manager()
