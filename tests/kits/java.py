"""Quick starts of Java, for tests.

The tests start some thirty Java processes, for seconds each. Two settings halve their cost. Java's second compiler and
its parallel collector stay off: they pay only after minutes. And Java maps Spark's classes from an archive, instead of
reading, checking and linking eleven thousand of them anew (class data sharing; `tests/spark/java_archive.py` makes the
archive). Java ignores an archive that is absent or was made by another Java or for other files: the tests then pass as
well, only later. An archive allows no folder with files on the class path, so these settings are in the environment
and not in a configuration folder of Spark's.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

ARCHIVE: Final = Path(__file__).parents[2] / ".venv" / "spark.jsa"
FLAGS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -Xlog:all=error:stderr"


def start_java_quickly(
    environment: MutableMapping[str, str], archive: str = f"-XX:SharedArchiveFile={ARCHIVE}"
) -> None:
    """Set what every Java reads that this process or a program of a test starts: a driver gives its executors their
    flags."""
    flags = f"{FLAGS} {archive}"
    environment["SPARK_LAUNCHER_OPTS"] = FLAGS
    environment["SPARK_DAEMON_JAVA_OPTS"] = flags
    environment["SPARK_SUBMIT_OPTS"] = f'{flags} "-Dspark.executor.extraJavaOptions={flags}"'
