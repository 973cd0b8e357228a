"""The command line of the Spark jobs, as far as it goes without Spark."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from braid.cli.main import run
from braid.cli.pipeline.advise import Since
from braid.cli.pipeline.commands import JOBS
from braid.cli.pipeline.errors import job_error
from braid.cli.pipeline.report import Fields, Lines, Part, Rows, bar_text, curve_text, percent_text, print_report
from braid.cli.pipeline.session import SparkRun, source_options, with_spark
from braid.cli.target import Target, with_target
from braid.cli.terminal.output import Column
from braid.model.errors import BraidError, InvalidArgument, JobFailed
from braid.spark.session import java_version, runs_in_this_process, session_settings, zip_package

NOBODY = "braid://127.0.0.1:1"
"""Nobody listens on port 1."""


def braid(*arguments: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, after `code`."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("BRAID_", "JAVA_HOME"))}
    program = f"import sys\n{textwrap.dedent(code)}\nfrom braid.cli.main import main\nmain(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**known, **environment},
        check=False,
    )


# Help.


def test_help_needs_neither_pyspark_nor_java() -> None:
    code = """
    class Nothing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("pyspark", "py4j", "pyarrow", "numpy", "rich"):
                raise ImportError(f"{name} was imported")
    sys.meta_path.insert(0, Nothing())
    """
    done = braid("pipeline", "--help", code=code, PATH="")
    assert (done.returncode, done.stderr) == (0, "")
    for job in JOBS:
        assert job in done.stdout
    done = braid("pipeline", "advise", "--help", code=code, PATH="")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--segments-target" in done.stdout


def test_a_job_that_is_mistyped_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pipeline", "advice"]) == 2
    assert "did you mean 'advise'?" in capsys.readouterr().err


# What is missing.


def test_without_pyspark_one_line_says_what_to_install() -> None:
    code = """
    class Nothing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "pyspark":
                raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")
    sys.meta_path.insert(0, Nothing())
    """
    done = braid("pipeline", "advise", "orders", "--manifest", "file:///nowhere", code=code)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("braid: Spark jobs need PySpark, which cannot be imported")
    assert "pip install 'braidmq[spark]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_java_one_line_says_what_to_install(tmp_path: Path) -> None:
    done = braid("pipeline", "advise", "orders", "--manifest", "file:///nowhere", PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "braid: Spark jobs need Java 17 or newer, and there is no java on the PATH; install one, as with "
        "`apt-get install openjdk-17-jre-headless`, or name its folder in JAVA_HOME\n"
    )


def test_a_java_home_without_java_is_named() -> None:
    done = braid("pipeline", "advise", "orders", "--manifest", "file:///nowhere", JAVA_HOME="/nowhere")
    assert done.returncode == 1
    assert "/nowhere/bin/java (JAVA_HOME is /nowhere) cannot be run" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_java_that_is_too_old_is_named(tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    done = braid(
        "pipeline", "advise", "orders", "--manifest", "file:///nowhere", PATH=f"{tmp_path}:{os.environ['PATH']}"
    )
    assert done.returncode == 1
    assert f"{java} is Java 11" in done.stderr


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_202"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21.0.1" 2023-10-17 LTS', 21),
        ("something else", None),
    ],
)
def test_javas_version_is_understood(said: str, version: int | None) -> None:
    assert java_version(said) == version


def test_brokers_that_cannot_be_reached_are_found_out_before_spark_starts() -> None:
    done = braid("pipeline", "advise", "orders", "--url", NOBODY, PATH="")
    assert (done.returncode, done.stdout) == (1, "")
    assert "127.0.0.1:1" in done.stderr
    assert done.stderr.count("\n") == 1


# Options.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("advise",), "missing argument 'TOPIC'"),
        (("advise", "orders", "--conf", "spark.executor.memory"), "write KEY=VALUE"),
        (("advise", "orders", "--conf", "=4g"), "write KEY=VALUE"),
        (("advise", "orders", "--since", "yesterday"), "write 12h, 7d or 2026-11-15T18:00:00Z"),
        (("advise", "orders", "--bucket", "3"), "write 90s, 15m, 12h or 30d"),
        (("advise", "orders", "--segments-target", "0"), "0 is not in the range"),
        (("advise", "or ders"), "or ders"),
        (("advise", "orders", "--apply", "--manifest", "file:///x"), "choose one"),
        (("advise", "orders", "--py-files", "/none.zip"), "'/none.zip' does not exist"),
        (("replay", "orders", "copy", "--from", "yesterday"), "--from is 'yesterday': it must be earliest, a time"),
        (("replay", "orders", "copy", "--from", "latest"), "--from is 'latest': it must be earliest"),
        (("replay", "orders", "copy", "--until", '{"0": "x"}'), """--until is '{"0": "x"}': it must be latest"""),
        (("replay", "orders", "copy", "--from", "2000", "--until", "1000"), "which is before"),
    ],
)
def test_wrong_usage_of_a_job_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pipeline", *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")


def test_the_shared_options_make_one_value() -> None:
    seen: list[tuple[Target, SparkRun, str]] = []

    @click.command()
    @click.argument("topic")
    @with_spark
    @with_target
    def job(target: Target, topic: str, run: SparkRun) -> None:
        seen.append((target, run, topic))

    given = [
        "orders",
        "--master",
        "spark://m:7077",
        "--conf",
        "a=1",
        "--conf",
        "b=x=y",
        "--json",
        "-v",
        "--url",
        NOBODY,
    ]
    assert CliRunner().invoke(job, given).exit_code == 0
    assert CliRunner().invoke(job, ["orders"]).exit_code == 0
    target, run_, topic = seen[0]
    assert (target.url, topic) == (NOBODY, "orders")
    assert run_ == SparkRun("spark://m:7077", {"a": "1", "b": "x=y"}, (), as_json=True, verbose=True)
    assert seen[1][1] == SparkRun("local[*]", {}, (), as_json=False, verbose=False)


def test_a_source_is_found_through_brokers_or_through_manifests() -> None:
    target = Target(url=NOBODY, token="secret", tls_ca="/ca.pem")
    assert source_options(target, "orders") == {"topic": "orders", "url": NOBODY, "token": "secret", "tls": "/ca.pem"}
    assert source_options(Target(url=NOBODY), "orders") == {"topic": "orders", "url": NOBODY}
    assert source_options(target, "orders", "file:///x") == {"topic": "orders", "manifest": "file:///x"}


def test_since_is_a_time_or_how_long_ago() -> None:
    since = Since()
    assert since.convert("2026-11-15T18:00:00Z", None, None) == "2026-11-15T18:00:00+00:00"
    assert since.convert("2026-11-15", None, None) == "2026-11-15T00:00:00+00:00"
    assert since.convert("1d", None, None) < since.convert("1h", None, None)
    with pytest.raises(click.BadParameter, match="before the calendar began"):
        since.convert("999999999d", None, None)


# The session.


def test_settings_of_the_user_win_and_one_machine_keeps_to_itself() -> None:
    local = session_settings("local[2]", {"spark.ui.enabled": "true"})
    assert (local["spark.ui.enabled"], local["spark.driver.host"]) == ("true", "127.0.0.1")
    cluster = session_settings("spark://master:7077", {})
    assert (cluster["spark.ui.enabled"], "spark.driver.host" in cluster) == ("false", False)


@pytest.mark.parametrize(
    ("master", "here"),
    [
        ("local", True),
        ("local[*]", True),
        ("local[2,3]", True),
        ("local-cluster[2,1,1024]", False),
        ("spark://m:1", False),
    ],
)
def test_only_a_local_master_needs_no_package(master: str, here: bool) -> None:
    assert runs_in_this_process(master) is here


def test_the_zipped_package_can_be_imported_from_the_zip_alone(tmp_path: Path) -> None:
    path = zip_package(str(tmp_path))
    code = f"""
import sys
sys.path.insert(0, {path!r})
import braid.scan.reading, pyspark_braid
assert braid.__file__.startswith({path!r}), braid.__file__
assert pyspark_braid.__file__.startswith({path!r}), pyspark_braid.__file__
assert pyspark_braid.DefaultSource.name() == "braid"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Errors of Spark's, in one sentence.

TASK_FAILED = """Job aborted due to stage failure: Task 0 in stage 1.0 failed 3 times, most recent failure: Lost task
0.2 in stage 1.0 (TID 5) (127.0.0.1 executor driver): org.apache.spark.api.python.PythonException: Traceback (most
recent call last):
  File "/x/braid/scan/reading.py", line 12, in read
    raise LogDamaged("no")
braid.model.errors.ChunkCorrupt: chunk 0-7 of segment 3 is corrupt: its checksum is wrong

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/braid/scan/reading.py", line 12, in read
braid.model.errors.LogDamaged: offsets 0 to 7 of segment 3 cannot be read; run `braid pipeline audit`

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:572)
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
"""


def test_the_last_sentence_of_braids_is_what_is_shown() -> None:
    found = job_error(Exception(TASK_FAILED))
    assert str(found) == "offsets 0 to 7 of segment 3 cannot be read; run `braid pipeline audit`"
    assert not isinstance(found, JobFailed | InvalidArgument)


def test_a_wrong_argument_that_spark_found_is_wrong_usage() -> None:
    text = "[PYTHON_DATA_SOURCE_ERROR] Failed to plan: Traceback (most recent call last):\n  File\n"
    found = job_error(Exception(f"{text}braid.model.errors.InvalidName: 'or ders' is no topic\n"))
    assert (type(found), str(found)) == (InvalidArgument, "'or ders' is no topic")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "An exception was thrown from the worker:\nTraceback\n  File x\nValueError: no such thing\n\tat org.x.Y",
            "the Spark job failed: ValueError: no such thing",
        ),
        (
            "[TABLE_NOT_FOUND] There is none.\nSearch path: x\n",
            "the Spark job failed: [TABLE_NOT_FOUND] There is none.",
        ),
        ("x" * 1_000, "the Spark job failed: " + "x" * 500 + "…"),
        ("", "the Spark job failed: Exception"),
    ],
)
def test_an_error_of_sparks_own_is_cut_to_its_first_line(text: str, sentence: str) -> None:
    found = job_error(Exception(text))
    assert (type(found), str(found)) == (JobFailed, sentence)


def test_a_java_that_died_is_called_that() -> None:
    assert "Java process has ended" in str(job_error(ConnectionRefusedError(111, "Connection refused")))
    assert isinstance(job_error(ConnectionResetError()), BraidError)


# Reports.


def test_a_bar_is_as_long_as_its_part_and_never_nothing_for_something() -> None:
    assert bar_text(100, 100, 4) == "████"
    assert bar_text(50, 100, 3) == "█▌"
    assert bar_text(0.001, 100, 4) == "▏"
    assert (bar_text(0, 100), bar_text(5, 0)) == ("", "")


def test_a_curve_shows_the_highest_and_gaps() -> None:
    assert curve_text([0, 1, 4, 8]) == " ▂▅█"
    assert curve_text([]) == ""
    assert curve_text([0, 0]) == "  "


def test_small_parts_have_a_decimal() -> None:
    assert [percent_text(part) for part in (0, 0.004, 0.25, 1)] == ["0%", "0.4%", "25%", "100%"]


def test_a_report_is_its_parts_or_exact_json(capsys: pytest.CaptureFixture[str]) -> None:
    parts: list[Part] = [
        Fields([("topic", "orders")]),
        Rows([Column("KEY"), Column("N", right=True)], [("a", "12")], title="Keys"),
        Rows([Column("KEY")], [], empty="No keys."),
        Lines(["Nothing to do."]),
    ]
    print_report({"n": 12}, parts, as_json=False)
    assert capsys.readouterr().out == "topic  orders\n\nKeys\nKEY   N\na    12\n\nNo keys.\n\nNothing to do.\n"
    print_report({"n": 12}, parts, as_json=True)
    assert capsys.readouterr().out == '{\n  "n": 12\n}\n'


@pytest.mark.parametrize(("failed", "code"), [(False, 0), (True, 1)])
def test_a_command_ends_with_its_report_its_errors_and_its_exit_code(failed: bool, code: int) -> None:
    @click.command()
    def job() -> None:
        SparkRun(as_json=True).finish({"n": 12}, [], target=Target(), failed=failed, errors=["split refused"])

    done = CliRunner().invoke(job)
    assert (done.exit_code, done.stdout) == (code, '{\n  "n": 12\n}\n')
    assert done.stderr == "braid: split refused\n"
