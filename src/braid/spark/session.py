"""The Spark session of Braid's jobs, and the two things that it needs: PySpark and Java.

These settings differ from Spark's own:

- Python: executors run the driver's Python, unless PYSPARK_PYTHON names another; on one machine they import the
  PySpark that is installed, compiled (worker_python.py); unix domain sockets between Java and Python take 15–40 % off a
  micro-batch.
- The source: filters are pushed down. (While the setting is off, Spark refuses a Python source that takes filters.)
- Time: UTC everywhere, and microseconds in Parquet, because other readers cannot read Spark's INT96.
- Services: no web page, and no progress bar over the terminal. On one machine everything stays on the loopback.

**Executors** on other machines need the packages that Braid needs (pyarrow, msgspec, mmh3, crc32c, obstore), which
contain machine code and must be installed there. Braid itself is plain Python: for every master other than `local[…]`
the session zips it and sends it along. So an executor runs the same Braid that planned its work, whether Braid is
installed there or not: Spark prefers files that were sent. PYSPARK_PYTHON names the executors' Python if its path is
another one.

**Java's output** (warnings about incubator modules, the host's name and native code, stack traces of tasks that failed
and were repeated) goes to the file `log`, if there is one: no setting silences all of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from braid.model.errors import NotAvailable
from braid.spark.connect import connect_session, is_remote
from braid.spark.package import zip_package as zip_package
from braid.spark.worker_python import check_worker_python, installed_pyspark

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession as SparkSession

MIN_JAVA: Final = 17
JAVA_ANSWER_S: Final = 20.0
"""A program that takes longer to print its version is not Java."""

SETTINGS: Final[Mapping[str, str]] = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.adaptive.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}
ON_ONE_MACHINE: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
"""No other machine needs to reach the driver, and a host name that does not resolve does no harm."""
SHUFFLE_PER_CORE: Final = 4
"""Spark's default of 200 suits clusters: on two cores it costs seconds and gains nothing."""


def build_session(
    master: str = "local[*]",
    name: str = "braid",
    extra: Mapping[str, str] | None = None,
    *,
    py_files: Sequence[str] = (),
    log: BinaryIO | None = None,
) -> SparkSession:
    """Make a session that knows `format("braid")`, also at a Spark Connect server (`sc://HOST:PORT`). `extra` are
    settings of Spark, with precedence over those above; `py_files` go to the executors; `log` takes Java's output.
    Raises `NotAvailable` if PySpark or Java is missing, or if the workers on this machine run a Python without
    Braid."""
    check_pyspark()
    if is_remote(master):
        return _registered(connect_session(master, name, session_settings(master, extra or {}), py_files))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if runs_in_this_process(master) and not py_files:
        check_worker_python(os.environ["PYSPARK_PYTHON"])
    check_java()
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    settings = session_settings(master, extra or {})
    conf = SparkConf().setMaster(master).setAppName(name).setAll(list(settings.items()))
    if SparkContext._gateway is None:
        home = installed_pyspark(os.environ["PYSPARK_PYTHON"]) if runs_in_this_process(master) else nullcontext()
        with home:
            gateway = _launch_java(conf, log)
        SparkContext(conf=conf, gateway=gateway)
    spark = SparkSession.builder.config(conf=conf).getOrCreate()
    try:
        for path in py_files:
            spark.sparkContext.addPyFile(path)
        if not runs_in_this_process(master):
            send_package(spark)
    except BaseException:
        end_session(spark)
        raise
    return _registered(spark)


def _registered(spark: SparkSession) -> SparkSession:
    from braid.spark import register

    try:
        register(spark)
    except BaseException:
        end_session(spark)
        raise
    return spark


def _launch_java(conf: SparkConf, log: BinaryIO | None) -> Any:
    """Start Java, and end it if the start fails. If PySpark is interrupted (Ctrl-C) before Java has answered, it
    forgets the Java process, which does not end by itself."""
    from pyspark import java_gateway

    gateway_module: Any = java_gateway  # which has no types
    started: list[subprocess.Popen[bytes]] = []
    popen = gateway_module.Popen

    def remembered(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    gateway_module.Popen = remembered
    try:
        return gateway_module.launch_gateway(conf, {"stdout": log, "stderr": log} if log is not None else {})
    except BaseException:
        for process in started:
            process.kill()
            process.wait()
        raise
    finally:
        gateway_module.Popen = popen


def end_session(spark: SparkSession) -> None:
    """Stop the session and its Java process, which would otherwise live as long as this process."""
    from pyspark import SparkContext

    spark.stop()
    gateway: Any = SparkContext._gateway
    if gateway is None:
        return  # Spark Connect: Java is the server's.
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    if gateway.proc is not None:
        gateway.proc.stdin.close()  # Java ends when its input is closed.
        gateway.proc.wait()


def session_settings(master: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the session."""
    if not master.startswith("local"):
        return {**SETTINGS, **extra}
    shuffle = {"spark.sql.shuffle.partitions": str(SHUFFLE_PER_CORE * (os.cpu_count() or 1))}
    return {**SETTINGS, **ON_ONE_MACHINE, **shuffle, **extra}


def runs_in_this_process(master: str) -> bool:
    """Whether the master is `local`, `local[2]` or `local[*, 3]`: executors then import what the driver imports."""
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def send_package(spark: SparkSession) -> None:
    """Send this process's Braid to the executors."""
    from pyspark import SparkFiles

    # Executors fetch the file whenever they start; Spark deletes this folder with the session.
    folder = tempfile.mkdtemp(prefix="braid-package-", dir=SparkFiles.getRootDirectory())
    spark.sparkContext.addPyFile(zip_package(folder))


def spark_errors() -> tuple[type[Exception], ...]:
    """Return the errors of PySpark and of its bridge to Java; the last two mean that Java has ended."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return (PySparkException, Py4JError, ConnectionRefusedError, ConnectionResetError)


def check_pyspark() -> None:
    try:
        import pyspark  # noqa: F401 (the import is the check)
    except ImportError as error:
        raise NotAvailable(
            f"Spark jobs need PySpark, which cannot be imported ({error}); install it with "
            "`pip install 'braidmq[spark]'`"
        ) from error


def check_java() -> None:
    """Check for Java in one sentence: Spark's own error takes twenty lines."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    cure = "install one, as with `apt-get install openjdk-17-jre-headless`, or name its folder in JAVA_HOME"
    if java is None:
        raise NotAvailable(f"Spark jobs need Java {MIN_JAVA} or newer, and there is no java on the PATH; {cure}")
    try:
        # S603: the program is the Java that Spark would start.
        said = subprocess.run([java, "-version"], capture_output=True, timeout=JAVA_ANSWER_S, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        at = f" (JAVA_HOME is {home})" if home else ""
        raise NotAvailable(f"Spark jobs need Java, and {java}{at} cannot be run: {error}; {cure}") from error
    version = java_version(said.stderr.decode(errors="replace"))
    if version is not None and version < MIN_JAVA:
        raise NotAvailable(f"Spark jobs need Java {MIN_JAVA} or newer, and {java} is Java {version}; {cure}")


def java_version(text: str) -> int | None:
    """Find the version in the output of `java -version`; None if it has an unknown form. Java 8 calls itself 1.8."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found[1]) if found is not None else None
