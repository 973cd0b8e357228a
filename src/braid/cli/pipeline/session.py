"""Everything that the Spark jobs of the command line share: options, session, progress, the end of a command.

    @click.command()
    @click.argument("topic")
    @with_spark
    @with_target
    def audit(target: Target, run: SparkRun, topic: str) -> None:
        from braid.spark.jobs.audit.job import audit_topic

        with run.session(f"audit {topic}") as spark, run.progress(spark, f"Auditing {topic}"):
            report = audit_topic(spark, …)
        run.finish(report, render(report), target=target, failed=not report.ok)

This module imports PySpark only when a job asks for a session. The session and its Java process end whatever happens,
Ctrl-C included. Java's output goes to a file, which is deleted when the job is done. If Spark itself failed, the file
stays, and the error names it. With `-v` all output goes to the terminal instead.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from braid.cli.pipeline.errors import job_error
from braid.cli.pipeline.report import Part, print_report, publish_report
from braid.cli.target import Target, ask
from braid.cli.terminal.output import duration_text, print_error
from braid.cli.terminal.spinner import status_line
from braid.model.errors import JobFailed

if TYPE_CHECKING:
    from braid.spark.jobs.report import JobReport
    from braid.spark.session import SparkSession

T = TypeVar("T")

DEFAULT_MASTER: Final = "local[*]"
POLL_S: Final = 0.2
"""Between two looks at Spark's progress."""
_COMPLAINT: Final = re.compile(r"(?:Exception|Error): (\S.*)|^(Invalid .*)")


class SparkRun(msgspec.Struct, frozen=True):
    """The options of a job that say how to run it."""

    master: str = DEFAULT_MASTER
    conf: Mapping[str, str] = {}
    py_files: tuple[str, ...] = ()
    as_json: bool = False
    verbose: bool = False
    report_topic: str = ""

    def session(self, name: str) -> AbstractContextManager[SparkSession]:
        return spark_session(
            self.master, name, conf=self.conf, py_files=self.py_files, quiet=self.as_json, verbose=self.verbose
        )

    def finish(
        self,
        report: JobReport | Mapping[str, Any],
        parts: Iterable[Part],
        *,
        target: Target,
        failed: bool = False,
        errors: Iterable[str] = (),
    ) -> None:
        """Print the report, then the errors, and publish the report if a topic is named for it. Exit with code 1 if the
        job has `failed`."""
        print_report(report, parts, as_json=self.as_json)
        for error in errors:
            print_error(error)
        if self.report_topic:
            job = click.get_current_context().info_name or ""
            ask(target, lambda client: publish_report(client, self.report_topic, job, report, ok=not failed))
        if failed:
            click.get_current_context().exit(1)

    def progress(self, spark: SparkSession, text: str) -> AbstractContextManager[Callable[[str], None]]:
        return progress(spark, text, quiet=self.as_json or self.verbose)


@contextmanager
def spark_session(
    master: str,
    name: str,
    *,
    conf: Mapping[str, str] | None = None,
    py_files: Sequence[str] = (),
    quiet: bool = False,
    verbose: bool = False,
) -> Iterator[SparkSession]:
    """Open a session for a person who waits. Spark's errors become Braid's errors: one sentence."""
    from braid.spark.connect import is_remote
    from braid.spark.session import build_session, check_java, check_pyspark, end_session, spark_errors

    check_pyspark()
    if not is_remote(master):
        check_java()
    folder = tempfile.mkdtemp(prefix="braid-spark-")
    path = os.path.join(folder, "spark.log")
    settings = {"spark.sql.warehouse.dir": os.path.join(folder, "warehouse"), **(conf or {})}
    keep = False
    with open(path, "wb") as log, _hushed(unless=verbose):
        try:
            with _starting(quiet or verbose):
                spark = build_session(master, name, settings, py_files=py_files, log=None if verbose else log)
            try:
                yield spark
            except spark_errors() as error:
                # Made here, because Java has the text and is about to end.
                raise job_error(error) from None if not verbose else error
            finally:
                # A Java that has died cannot be stopped; the error to show is why it died.
                with suppress(*spark_errors()):
                    end_session(spark)
        except JobFailed as error:
            keep = not verbose
            raise (JobFailed(f"{error}; what Spark printed is in {path}") if keep else error) from error
        except spark_errors() as error:
            raise JobFailed(f"Spark cannot be started: {_first_complaint(path) or error}") from error
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _hushed(*, unless: bool) -> Iterator[None]:
    """Silence PySpark: besides raising errors, it logs them as JSON with stack traces, and it warns."""
    if unless:
        yield
        return
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _first_complaint(path: str) -> str:
    """Find Java's own reason for not starting."""
    with open(path, encoding="utf-8", errors="replace") as log:
        complaints = (_COMPLAINT.search(line) for line in log)
        return next(((found[1] or found[2]).strip() for found in complaints if found is not None), "")


@contextmanager
def _starting(quiet: bool) -> Iterator[None]:
    """Show that something happens while Java starts, which takes some seconds."""
    if quiet:
        yield
        return
    with status_line("Starting Spark") as show, _thread(lambda began: show(f"Starting Spark ({_since(began)})")):
        yield


@contextmanager
def progress(spark: SparkSession, text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a line with Spark's progress while the block runs; none in a pipe or if `quiet`. Yields a function that
    changes `text`."""
    context = getattr(spark, "sparkContext", None)
    if quiet or not sys.stderr.isatty() or context is None:  # Spark Connect shows no context.
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"))
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as line:
        task = line.add_task(text, total=None, done="")
        tracker = context.statusTracker()
        running: dict[int, tuple[int, int]] = {}
        """By stage: how many tasks are done, and how many there are."""
        finished = 0

        def look(_: float) -> None:
            nonlocal finished
            active = set(tracker.getActiveStageIds())
            finished += sum(running.pop(stage)[1] for stage in running.keys() - active)
            for stage in active:
                info = tracker.getStageInfo(stage)
                if info is not None:
                    running[stage] = (info.numCompletedTasks, info.numTasks)
            done = finished + sum(each[0] for each in running.values())
            total = finished + sum(each[1] for each in running.values())
            line.update(task, completed=done, total=total or None, done=f"{done} of {total} tasks" if total else "")

        with _thread(look):
            yield lambda changed: line.update(task, description=changed)


@contextmanager
def _thread(look: Callable[[float], None]) -> Iterator[None]:
    """Call `look` now and then, with the time at which the block began, until the block ends."""
    ended = threading.Event()
    began = time.monotonic()

    def watch() -> None:
        # The display must never break the work: it ends quietly if the session ends first.
        with suppress(Exception):
            while not ended.wait(POLL_S):
                look(began)

    thread = threading.Thread(target=watch, name="braid-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _since(began: float) -> str:
    return duration_text(time.monotonic() - began)


# Options.


def _settings(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    for each in given:
        if "=" not in each[1:]:
            raise click.BadParameter(f"{each!r} is no setting: write KEY=VALUE, as in spark.executor.memory=4g")
    return {key.strip(): value.strip() for key, _, value in (each.partition("=") for each in given)}


_OPTIONS: Final = (
    click.option(
        "--master",
        default=DEFAULT_MASTER,
        show_default=True,
        metavar="URL",
        help="Where Spark runs: local[*], local[2], spark://HOST:PORT.",
    ),
    click.option(
        "--conf", multiple=True, metavar="KEY=VALUE", callback=_settings, help="A setting of Spark; may be repeated."
    ),
    click.option(
        "--py-files",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="Python code that executors on other machines need besides Braid; may be repeated.",
    ),
    click.option(
        "--report-topic",
        default="",
        envvar="BRAID_REPORT_TOPIC",
        metavar="TOPIC",
        help="Publish the report to this topic, where `braid console` finds it. [env: BRAID_REPORT_TOPIC]",
    ),
    click.option("-v", "--verbose", is_flag=True, help="Show what Spark itself prints, instead of progress."),
    click.option("--json", "as_json", is_flag=True, help="Answer in JSON."),
)

manifest_option = click.option(
    "--manifest",
    metavar="URL",
    help="Read from storage alone, without brokers: the --storage of the brokers, file:///PATH or s3://BUCKET/PREFIX.",
)

bad_records_option = click.option(
    "--bad-records",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What to do about records that cannot be decoded: end with an error, or leave them out and count them.",
)


def with_spark(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command the options above; it gets them as a `SparkRun` in its argument `run`."""

    @functools.wraps(command)
    def invoked(*args: Any, **options: Any) -> T:
        own = {name: options.pop(name) for name in SparkRun.__struct_fields__}
        return command(*args, run=SparkRun(**own), **options)

    decorated: Callable[..., T] = invoked
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def source_options(target: Target, topic: str, manifest: str | None = None) -> dict[str, str]:
    """Return the options by which `format("braid")` finds the topic: brokers, or manifests alone."""
    if manifest is not None:
        return {"topic": topic, "manifest": manifest}
    given = {"topic": topic, "url": target.url, "token": target.token, "tls": target.tls_ca}
    return {name: value for name, value in given.items() if value}


def check_topic(target: Target, topic: str) -> None:
    """Ask the brokers for the topic before Spark starts: a missing broker or topic shows in a moment, and a session
    takes ten seconds to start."""
    ask(target, lambda client: client.admin.topic(topic))
