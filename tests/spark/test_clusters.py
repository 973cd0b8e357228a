"""Braid on clusters: Spark's own two on this machine, with Braid installed there and with Braid sent there; and on a
Spark Connect server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import braid.sync
from tests.spark.spark_kit import ROOT, StoredBroker, numbered
from tests.spark.standalone import connect_server, spark_home, standalone_cluster

PROGRAM = Path(__file__).parent / "cluster_program.py"
RECORDS = 60_000
"""A task that writes all of them stores some long before it comes to the last."""
FEW = 4_000
"""Some chunks of 64 KiB in each of two segments."""
PROGRAM_S = 240.0


@pytest.fixture(scope="module")
def topic(broker: StoredBroker) -> str:
    """Partly in chunks, partly only with its owner; one record of it kills whoever wants to die."""
    broker.create("clusters", segments=2)
    sent = broker.fill("clusters", numbered(RECORDS - 1))
    broker.until_chunks("clusters", 8)
    assert sum(chunk["nextOffset"] - chunk["baseOffset"] for chunk in broker.chunks("clusters")) < len(sent)
    broker.fill("clusters", [(b"key-1", b"dies here")])
    return "clusters"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with everything that Braid needs, and no Braid: without `site`, no editable install is found."""
    script = tmp_path_factory.mktemp("bare") / "python"
    packages = sysconfig.get_paths()["platlib"]
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return spark_home(tmp_path)


def run(
    command: list[str], folder: Path, home: Path, python: str | Path, python_path: str = ""
) -> dict[str, dict[str, Any]]:
    """What each step of the program said."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PYSPARK_PYTHON": str(python),
        "PYSPARK_DRIVER_PYTHON": str(python),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_WORKER_DIR": str(folder / "work"),
        **({"PYTHONPATH": python_path} if python_path else {}),
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PROGRAM_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["step"]: each for each in said}


def test_local_cluster_with_braid_installed_reads_and_writes_once_though_executors_die(
    broker: StoredBroker, topic: str, home: Path, tmp_path: Path
) -> None:
    broker.create("copied", segments=2)
    steps = ["where", f"dying-read:{topic}", f"dying-copy:{topic}:copied", "read:copied"]
    command = [sys.executable, str(PROGRAM), "local-cluster[2,1,1024]", broker.url, *steps]
    said = run(command, tmp_path, home, sys.executable)
    assert said["where"]["braid"] == [str(ROOT / "src" / "braid" / "__init__.py")]
    assert len(said["where"]["executors"]) == 2
    each = {"records": RECORDS, "places": RECORDS, "values": RECORDS}
    assert said[f"dying-read:{topic}"].items() >= {**each, "died": 1}.items()
    assert said[f"dying-copy:{topic}:copied"]["died"] == 1
    assert said["read:copied"].items() >= each.items()
    with braid.sync.connect(broker.url) as client:
        assert client.admin.topic_stats("copied")["duplicateBatches"] > 0, "the second try had nothing to repeat"


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with standalone_cluster(tmp_path_factory.mktemp("standalone")) as url:
        yield url


def test_standalone_cluster_gets_braid_by_py_files(
    broker: StoredBroker, topic: str, master: str, home: Path, bare_python: Path, tmp_path: Path
) -> None:
    """Neither the driver's Python nor the executors' has Braid: all of it comes from the wheel. The driver also has
    it on its path, because Spark sends nothing to the process that plans a streaming read."""
    for name in ("submitted", "submitted-stream"):
        broker.create(name, segments=2)
    package = str(built_wheel(tmp_path).rename(tmp_path / "braid.zip"))  # Spark puts no .whl on the path of workers.
    settings = {
        "spark.executor.memory": "512m",
        "spark.log.level": "ERROR",
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.python.filterPushdown.enabled": "true",
    }
    command = [str(home / "bin" / "spark-submit"), "--master", master, "--py-files", package]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    steps = ["where", f"read:{topic}", f"copy:{topic}:submitted", "read:submitted"]
    steps += [f"stream:{topic}:submitted-stream", "read:submitted-stream"]
    said = run([*command, str(PROGRAM), "submitted", broker.url, *steps], tmp_path, home, bare_python, package)
    (where,) = said["where"]["braid"]
    assert where.endswith(f"{Path(package).name}/braid/__init__.py")
    assert said[f"read:{topic}"]["places"] == said["read:submitted"]["values"] == RECORDS
    assert said["read:submitted-stream"]["records"] == said["read:submitted-stream"]["values"] == RECORDS


def built_wheel(folder: Path) -> Path:
    """The wheel, from what is installed to build it: hatchling."""
    (folder / "dist").mkdir()
    code = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder / "dist")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROGRAM_S)
    assert done.returncode == 0, done.stderr
    return folder / "dist" / done.stdout.split()[-1]


def test_a_spark_connect_server_reads_writes_streams_and_runs_all_jobs_with_the_programs_braid(
    broker: StoredBroker, home: Path, tmp_path: Path
) -> None:
    """The server's Python has Braid, because streaming queries need it there; workers prefer what the program sent."""
    for name in ("few", "few-copied", "few-streamed", "few-replayed"):
        broker.create(name, segments=2)
    broker.fill("few", numbered(FEW))
    broker.until_chunks("few", 4)
    copies = ("few-copied", "few-streamed", "few-replayed")
    steps = ["where", "copy:few:few-copied", "stream:few:few-streamed", "replay:few:few-replayed"]
    steps += [f"read:{name}" for name in copies]
    steps += ["advise:few", "lake:few", "compact:few", "audit:few"]
    own_steps = ["where", "read:few", "lake:few-copied"]
    python = [sys.executable, str(PROGRAM)]
    (tmp_path / "server").mkdir()
    with connect_server(tmp_path / "server", sys.executable) as url:
        said = run([*python, url, broker.url, *steps], tmp_path, home, sys.executable)
        own = run([*python, f"own {url}", broker.url, *own_steps], tmp_path, home, sys.executable)
    each = {"records": FEW, "places": FEW, "values": FEW}
    for where in (said["where"]["braid"], own["where"]["braid"]):
        assert len(where) == 1
        assert re.search(r"braid-[\d.]+\.zip/braid/__init__\.py$", where[0]), where
    for name in copies:
        assert said[f"read:{name}"].items() >= each.items(), name
    assert said["replay:few:few-replayed"].items() >= {"ok": True, "lag": 0, "records": FEW}.items()
    assert (said["advise:few"]["records"], len(said["advise:few"]["commands"])) == (FEW, 2)
    assert said["compact:few"]["ok"]
    assert said["compact:few"]["after"] == len(broker.chunks("few")) < said["compact:few"]["before"]
    assert said["audit:few"].items() >= {"ok": True, "records": FEW}.items()
    assert own["read:few"].items() >= each.items(), "the chunks are others now"
    for landed in (said["lake:few"], own["lake:few-copied"]):
        assert landed.items() >= {"ok": True, "lag": 0, "landed": FEW, **each}.items()


def test_a_job_of_the_command_line_brings_braid_to_the_cluster_that_master_names(
    broker: StoredBroker, topic: str, master: str, home: Path, bare_python: Path, tmp_path: Path
) -> None:
    """The executors' Python has no Braid."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PYSPARK_PYTHON": str(bare_python),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_DIRS": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "braid.cli.main", "pipeline", "audit", topic, "--url", broker.url, "--json"]
    for setting in ("spark.executor.memory=512m", "spark.driver.host=127.0.0.1"):
        command += ["--conf", setting]
    done = subprocess.run(
        [*command, "--master", master], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PROGRAM_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["ok"], report["records"]) == (True, RECORDS)
