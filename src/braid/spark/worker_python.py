"""The Python that Spark's workers run: can it import Braid, and where does it import PySpark from?

Spark runs the program that PYSPARK_PYTHON names, or else `python3` of the PATH, which need not be the Python of this
process. If it lacks Braid, Spark reports that by a stack trace of Java around a traceback of Python. So the sessions
that Braid makes or joins ask that program first, in one sentence. Only workers on this machine can be asked.

Spark's home has a copy of PySpark, a zip file of sources. It comes first on the path of every worker, so each worker
would compile it anew: for a second, and a query needs up to seven kinds of workers. `installed_pyspark` lets workers
import the installed PySpark instead, whose compiled modules are on disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from braid.model.errors import NotAvailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEEDED: Final = ("braid", "pyarrow", "numpy", "msgspec", "mmh3", "crc32c")
"""What a worker imports to read a topic."""
ANSWER_S: Final = 60.0


def check_worker_python(python: str) -> None:
    """Raise `NotAvailable` if this program, a name or a path, is not a Python that can import Braid."""
    cure = f"set PYSPARK_PYTHON={sys.executable} before the session begins, or install 'braidmq[spark]' for that Python"
    program = shutil.which(python)
    if program is None:
        raise NotAvailable(f"Spark's workers are to run {python}, which is no program here; {cure}")
    if _is_this_python(program):
        return
    try:
        # S603: the program is the one that Spark would start.
        asked = [program, "-c", f"import {', '.join(NEEDED)}"]
        done = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=ANSWER_S)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise NotAvailable(f"Spark's workers are to run {program}, which cannot be run: {error}; {cure}") from error
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise NotAvailable(f"Spark's workers run {program}, which cannot import Braid ({why[:200]}); {cure}")


def check_workers(spark: SparkSession) -> None:
    """Check the workers of a session, if they run on this machine and get no packages from the driver."""
    context = getattr(spark, "sparkContext", None)
    if context is not None and context.master.partition("[")[0] == "local" and not context._python_includes:
        check_worker_python(context.pythonExec)


@contextlib.contextmanager
def installed_pyspark(python: str) -> Iterator[None]:
    """Let workers that run `python` import the installed PySpark, if their Java starts meanwhile and if they find the
    same one as this process.

    Java gets a home of links, without the zip file. It needs the home only to find its class path.
    """
    import pyspark

    home = os.path.dirname(os.path.abspath(pyspark.__file__))
    program = shutil.which(python)
    if "SPARK_HOME" in os.environ or program is None or not _is_this_python(program) or not _is_installed(home):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="braid-spark-home-") as folder:
        for name in ("bin", "jars"):
            os.symlink(os.path.join(home, name), os.path.join(folder, name))
        os.environ["SPARK_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["SPARK_HOME"]


def _is_installed(package: str) -> bool:
    return os.path.dirname(package) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def _is_this_python(program: str) -> bool:
    """Whether the program is the Python of this process, under this or another name of the same folder."""
    ours = os.path.abspath(sys.executable)
    theirs = os.path.abspath(program)
    same_folder = os.path.dirname(theirs) == os.path.dirname(ours)
    return same_folder and os.path.realpath(theirs) == os.path.realpath(ours)
