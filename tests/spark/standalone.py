"""Spark's own servers from the installed PySpark: a standalone cluster of one master and one worker, Spark Connect."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyspark

from tests.kits.waiting import wait_until

END_S: Final = 30.0


def spark_home(folder: Path) -> Path:
    """Spark, as it is installed, in a folder of the test's own: a `local-cluster` leaves what executors print in it.
    It lacks the copy of PySpark that each worker would compile anew (braid.spark.worker_python)."""
    home = folder / "spark"
    home.mkdir()
    for name in ("bin", "jars"):
        (home / name).symlink_to(Path(pyspark.__file__).parent / name)
    return home


@contextlib.contextmanager
def standalone_cluster(folder: Path) -> Iterator[str]:
    """Its `spark://` URL. The worker has one core; an executor may take 1 GiB."""
    home = spark_home(folder)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(daemon(home, "master.Master", folder))
        wait_until(lambda: found_url(log), f"a master that says where it listens, in {log}")
        url = found_url(log)
        worker = ["--cores", "1", "--memory", "1g", "--work-dir", str(folder / "work"), url]
        log = stack.enter_context(daemon(home, "worker.Worker", folder, *worker))
        wait_until(
            lambda: "Successfully registered with master" in log.read_text(), f"a worker that has registered, in {log}"
        )
        yield url


def found_url(log: Path) -> str:
    found = re.search(r"Starting Spark master at (spark://\S+)", log.read_text())
    return found[1] if found is not None else ""


@contextlib.contextmanager
def connect_server(folder: Path, python: str) -> Iterator[str]:
    """The `sc://` URL of a Spark Connect server with two cores, whose workers run this Python."""
    home = spark_home(folder)
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    server = "org.apache.spark.sql.connect.service.SparkConnectServer"
    command = [
        str(home / "bin" / "spark-submit"),
        "--master",
        "local[2]",
        *options,
        "--class",
        server,
        "spark-internal",
    ]
    more = {"PYSPARK_PYTHON": python, "SPARK_DAEMON_MEMORY": "1g"}  # Spark counts it among its servers.
    with run_until_end(home, command, folder, "connect", more) as log:
        wait_until(lambda: _connect_port(log), f"a Spark Connect server that says where it listens, in {log}")
        yield f"sc://127.0.0.1:{_connect_port(log)}"


def _connect_port(log: Path) -> str:
    found = re.search(r"Spark Connect server started at: \S+:(\d+)", log.read_text())
    return found[1] if found is not None else ""


@contextlib.contextmanager
def daemon(home: Path, kind: str, folder: Path, *options: str) -> Iterator[Path]:
    """One of the cluster's servers, until the end; the path of its log."""
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
    command += ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0", *options]
    with run_until_end(home, command, folder, kind) as log:
        yield log


@contextlib.contextmanager
def run_until_end(
    home: Path, command: list[str], folder: Path, name: str, more: dict[str, str] | None = None
) -> Iterator[Path]:
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",  # Its port is fixed.
        **(more or {}),
    }
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder)
    try:
        yield log
    finally:
        process.terminate()  # The script has become Java itself; a worker ends its executors.
        process.wait(END_S)
