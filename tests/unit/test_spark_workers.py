"""The Python of Spark's workers: a sentence that names the cure, before Spark starts."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path

import pytest

from braid.cli.pipeline.errors import job_error
from braid.model.errors import JobFailed, NotAvailable
from braid.spark.session import build_session
from braid.spark.worker_python import check_worker_python, installed_pyspark


@pytest.fixture
def bare_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python without any package."""
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return str(tmp_path / "bare" / "bin" / "python")


def test_a_python_without_braid_is_named_with_the_cure(bare_python: str) -> None:
    with pytest.raises(NotAvailable) as raised:
        check_worker_python(bare_python)
    assert str(raised.value) == (
        f"Spark's workers run {bare_python}, which cannot import Braid (ModuleNotFoundError: No module named 'braid'); "
        f"set PYSPARK_PYTHON={sys.executable} before the session begins, or install 'braidmq[spark]' for that Python"
    )


def test_a_program_that_is_not_there_or_no_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotAvailable, match="nowhere/python, which is no program here; set PYSPARK_PYTHON="):
        check_worker_python("nowhere/python")
    (tmp_path / "python").write_text("#!/no/such/interpreter\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(NotAvailable, match=r"which cannot be run: .+; set PYSPARK_PYTHON="):
        check_worker_python(str(tmp_path / "python"))


def test_the_python_of_this_process_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", None)
    check_worker_python(sys.executable)
    for name in os.listdir(os.path.dirname(sys.executable)):
        if name in ("python", "python3"):
            check_worker_python(os.path.join(os.path.dirname(sys.executable), name))


def test_a_session_on_this_machine_does_not_start_with_such_workers(
    bare_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", bare_python)
    with pytest.raises(NotAvailable, match="which cannot import Braid"):
        build_session("local[1]")


def test_a_worker_on_another_machine_that_lacks_a_package_is_one_sentence() -> None:
    trace = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 1, in main
ModuleNotFoundError: No module named 'mmh3'

\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)"""
    error = job_error(RuntimeError(trace))
    assert isinstance(error, JobFailed)
    assert "cannot import what Braid needs (No module named 'mmh3'); install 'braidmq[spark]'" in str(error)
    assert "PYSPARK_PYTHON" in str(error)


def test_java_starts_from_a_home_without_the_zipped_sources_of_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    with installed_pyspark(sys.executable):
        home = Path(os.environ["SPARK_HOME"])
        assert (home / "bin" / "spark-submit").exists()
        assert any((home / "jars").glob("spark-core_*.jar"))
        assert sorted(path.name for path in home.iterdir()) == ["bin", "jars"]
    assert not home.exists()
    assert "SPARK_HOME" not in os.environ


def test_a_home_that_was_chosen_and_workers_of_another_python_keep_what_they_have(
    bare_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    with installed_pyspark(sys.executable):
        assert os.environ["SPARK_HOME"] == "/opt/spark"
    monkeypatch.delenv("SPARK_HOME")
    for python in (bare_python, "nowhere/python"):
        with installed_pyspark(python):
            assert "SPARK_HOME" not in os.environ
    monkeypatch.setattr("pyspark.__file__", "/somewhere/else/pyspark/__init__.py")
    with installed_pyspark(sys.executable):
        assert "SPARK_HOME" not in os.environ
