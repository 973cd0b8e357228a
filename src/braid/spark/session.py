"""A Spark session as Braid's jobs want it, and the two things that it needs: PySpark and Java.

Where settings differ from Spark's own:

- Python: the executors run the Python that runs this, unless PYSPARK_PYTHON says otherwise; unix domain sockets between
  Java and Python, which take 15–40 % off a micro-batch.
- The source: filters are pushed down. (Spark refuses a Python source that offers it while the setting is off.)
- Time: UTC everywhere, and microseconds in Parquet, because other readers cannot take Spark's INT96.
- Services: no web page and no bar that Spark draws over the terminal. On one machine everything stays on the loopback.

**Executors** on other machines need the packages that Braid stands on (pyarrow, msgspec, mmh3, crc32c, obstore), which
hold machine code and must be installed there. Braid itself is plain Python: for every master that is not `local[…]` it
is zipped and sent along. So an executor runs the very Braid that planned its work, whether one is installed there or
not: Spark puts what is sent in front of what is installed. Where Python has another path there, PYSPARK_PYTHON says it.

**What Java prints** (a warning about incubator modules, one about the host's name, one about native code, stack traces
of tasks that failed and were repeated) goes to `log`, a file, if there is one: no setting silences all of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from braid.model.errors import NotAvailable

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession as SparkSession

MIN_JAVA: Final = 17
JAVA_ANSWER_S: Final = 20.0
"""A Java that takes longer to tell its version is no Java."""

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
"""Nobody else need reach the driver then, and a host whose name leads nowhere does no harm."""
SHUFFLE_PER_CORE: Final = 4
"""Spark's 200 parts of a shuffle are made for clusters: on two cores they cost seconds and gain nothing."""


def build_session(
    master: str = "local[*]",
    name: str = "braid",
    extra: Mapping[str, str] | None = None,
    *,
    py_files: Sequence[str] = (),
    log: BinaryIO | None = None,
) -> SparkSession:
    """A session that knows `format("braid")`. `extra` are settings of Spark's, which win over those above; `py_files`
    go to the executors; `log` takes what Java prints. `NotAvailable` if PySpark or Java is missing."""
    check_pyspark()
    check_java()
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    from braid.spark import register

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    settings = session_settings(master, extra or {})
    conf = SparkConf().setMaster(master).setAppName(name).setAll(list(settings.items()))
    if SparkContext._gateway is None:
        SparkContext(conf=conf, gateway=_launch_java(conf, log))
    spark = SparkSession.builder.config(conf=conf).getOrCreate()
    try:
        for path in py_files:
            spark.sparkContext.addPyFile(path)
        if not runs_in_this_process(master):
            send_package(spark)
        register(spark)
    except BaseException:
        end_session(spark)
        raise
    return spark


def _launch_java(conf: SparkConf, log: BinaryIO | None) -> Any:
    """PySpark forgets the Java process that it starts if it is interrupted (Ctrl-C) before it has heard of it; and that
    one, whose only purpose is gone, does not end by itself."""
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
    """Stop the session, and the Java process behind it, which would otherwise live as long as this process."""
    from pyspark import SparkContext

    spark.stop()
    gateway: Any = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    if gateway.proc is not None:
        gateway.proc.stdin.close()  # Java ends when nobody is at the other end.
        gateway.proc.wait()


def session_settings(master: str, extra: Mapping[str, str]) -> dict[str, str]:
    """What the session is made with."""
    if not master.startswith("local"):
        return {**SETTINGS, **extra}
    shuffle = {"spark.sql.shuffle.partitions": str(SHUFFLE_PER_CORE * (os.cpu_count() or 1))}
    return {**SETTINGS, **ON_ONE_MACHINE, **shuffle, **extra}


def runs_in_this_process(master: str) -> bool:
    """Whether the master is `local`, `local[2]`, `local[*, 3]`: the executors then find what the driver finds."""
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def send_package(spark: SparkSession) -> None:
    """Give the executors the Braid that runs here."""
    from pyspark import SparkFiles

    # Executors fetch it from where it lies, whenever they start; this folder goes when the session does.
    folder = tempfile.mkdtemp(prefix="braid-package-", dir=SparkFiles.getRootDirectory())
    spark.sparkContext.addPyFile(zip_package(folder))


def zip_package(folder: str) -> str:
    """Braid's modules as a zip file in `folder`, for `--py-files` or `addPyFile`. Returns its path."""
    import braid

    package = os.path.dirname(os.path.abspath(braid.__file__))
    above = os.path.dirname(package)
    path = os.path.join(folder, f"braid-{braid.__version__}.zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for root in (package, os.path.join(above, "pyspark_braid")):
            for here, _, names in sorted(os.walk(root)):
                for each in sorted(names):
                    if each.endswith(".py"):
                        file = os.path.join(here, each)
                        archive.write(file, os.path.relpath(file, above))
    return path


def spark_errors() -> tuple[type[Exception], ...]:
    """What PySpark and the bridge to Java raise; the last two when Java is no more."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return (PySparkException, Py4JError, ConnectionRefusedError, ConnectionResetError)


def check_pyspark() -> None:
    try:
        import pyspark  # noqa: F401 (whether it is there is the question)
    except ImportError as error:
        raise NotAvailable(
            f"Spark jobs need PySpark, which cannot be imported ({error}); install it with "
            "`pip install 'braidmq[spark]'`"
        ) from error


def check_java() -> None:
    """Spark would say it in twenty lines."""
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
    """The version in what `java -version` prints; None if it says it in some new way. Java 8 called itself 1.8."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found[1]) if found is not None else None
