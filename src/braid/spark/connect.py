"""Spark Connect: a session whose driver is elsewhere, `sc://HOST:PORT`.

The program then has no Java and no Spark context. Queries run on the server: its Python workers plan and read topics.
A job's own part (snapshots, reports) runs in the program, so the program reaches brokers and storage, too.

Braid goes along as an artifact of the session. So the server runs the Braid of the program, whether Braid is installed
there or not; the packages that Braid needs must be installed there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from braid.model.errors import NotAvailable
from braid.spark.package import zip_package

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEME: Final = "sc://"
NEEDED: Final = ("grpc", "grpc_status", "pandas", "zstandard")
"""The packages of `pyspark[connect]`, by their import names."""
_ENOUGH_ROWS: Final = 100_000
"""More than a cluster has cores."""


def is_remote(master: str) -> bool:
    """Whether this names a Spark Connect server."""
    return master.startswith(SCHEME)


def connect_session(remote: str, name: str, settings: Mapping[str, str], py_files: Sequence[str] = ()) -> SparkSession:
    """Connect to the server, and send Braid and `py_files` there. Of `settings`, only those of queries can be set."""
    check_connect()
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder.remote(remote).appName(name)
    for setting, value in settings.items():
        if setting.startswith("spark.sql.") and not setting.startswith("spark.sql.warehouse."):
            builder = builder.config(setting, value)
    spark: SparkSession = builder.getOrCreate()
    try:
        with tempfile.TemporaryDirectory(prefix="braid-package-") as folder:
            spark.addArtifacts(zip_package(folder), *py_files, pyfile=True)
    except BaseException:
        spark.stop()
        raise
    return spark


def check_connect() -> None:
    """Check for PySpark's own extra in one sentence."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise NotAvailable(
            f"Spark Connect needs packages that are not installed ({', '.join(missing)}): run `pip install "
            "'pyspark[connect]'`"
        )


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks the session runs at the same time."""
    context = getattr(spark, "sparkContext", None)
    if context is not None:
        return int(context.defaultParallelism)
    from pyspark.sql.functions import spark_partition_id

    # Spark Connect shows no context, but a range gets as many partitions as the context says.
    return spark.range(_ENOUGH_ROWS).select(spark_partition_id()).distinct().count()
