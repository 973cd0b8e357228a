"""A lake table in Delta's format, written through deltalake (delta-rs): every engine that reads Delta reads it.

    orders/
      _delta_log/…                 the table: which files it has, by commits
      step-2-9f86d081…/            what Spark wrote for step 2; no reader counts it before a commit names its files
        part-….parquet

**The offsets are state of the table**, not only a note in a commit. Delta keeps one number for each application
(`txn`), and its checkpoints keep the number when old commits are deleted from the log. Braid's applications are

    braid/lake               the step
    braid/lake/segments      above the highest segment that has a number
    braid/lake/segment/3     the next offset of segment 3; the largest number for END
    braid/lake/topic         the topic's id, if it became known only after the table was made

and the table's properties name its topic (`braid.topic`, `braid.topicId`). A commit writes the numbers that change. The
same positions are in the commit's own metadata as `braid`, for people who look at the history. So everyone may compact,
vacuum, checkpoint or delete from the table between two steps.

**Two writers.** A commit builds on the version from which its positions were read. Delta puts it after commits of other
writers that came meanwhile. It fails if one of them wrote the number of the same application. Each step writes
`braid/lake`, so of two writers of one step one fails; a compaction at the same time does no harm.

**Statistics** come from the footers of the files, which are read to count rows: engines use them to skip files by
segment, offset, time, key hash and epoch.
"""

from __future__ import annotations

import datetime
import os
import re
import secrets
from typing import Any, Final

import msgspec
import pyarrow as pa

from braid.client.consuming.checkpoint import END, Position
from braid.model.errors import NotAvailable, TableConflict, TableMismatch
from braid.spark.jobs.lake.table import (
    LEFTOVER_S,
    DataFile,
    Landed,
    Landing,
    folder_path,
    old_folders,
    prepared,
    remove,
    sync,
)

try:
    import deltalake
    from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
    from deltalake.transaction import AddAction
except ImportError as missing:
    raise NotAvailable(
        f"tables in Delta's format need deltalake, which cannot be imported ({missing}); install it with "
        "`pip install 'braidmq[spark]'`"
    ) from missing

APP: Final = "braid/lake"
_SEGMENTS: Final = f"{APP}/segments"
_LATER_TOPIC_ID: Final = f"{APP}/topic"
_END: Final = 2**63 - 1
_LOG: Final = "_delta_log"
_TOPIC: Final = "braid.topic"
_TOPIC_ID: Final = "braid.topicId"
_HISTORY: Final = 10_000
"""How many commits are searched for the folder of a step: those of weeks."""
_FOLDER: Final = re.compile(r"step-([1-9][0-9]*)-[0-9a-f]+")
_COUNTED: Final = (int, datetime.datetime)
"""Delta stores the lowest and highest values of columns of these types."""


class DeltaTable:
    kind: Final = "delta"

    def __init__(self, where: str) -> None:
        self.path: Final = folder_path(where)
        self._table: deltalake.DeltaTable | None = None
        """The version that `landed` has read: a commit builds on it."""
        self._landed: Landed | None = None

    def landed(self) -> Landed | None:
        try:
            table = deltalake.DeltaTable(self.path)
        except TableNotFoundError:
            found = set(os.listdir(self.path)) if os.path.isdir(self.path) else set()
            if deltalake.DeltaTable.is_deltatable(self.path):  # Another process has just made it.
                return self.landed()
            if found - {_LOG}:  # A log without a commit is a table that another process is making.
                raise TableMismatch(
                    f"{self.path} is not empty and is no Delta table; name a new folder, or --format parquet if it is "
                    "a table of that format"
                ) from None
            return None
        properties = table.metadata().configuration
        if _TOPIC not in properties or _TOPIC_ID not in properties:
            raise TableMismatch(
                f"{self.path} is a Delta table that was not made by `braid pipeline lake`: it does not say which topic "
                "it holds; name a new folder"
            )
        segments = range(table.transaction_version(_SEGMENTS) or 0)
        numbers = {segment: table.transaction_version(_segment(segment)) for segment in segments}
        self._table = table
        self._landed = Landed(
            topic=properties[_TOPIC],
            topic_id=int(properties[_TOPIC_ID]) or table.transaction_version(_LATER_TOPIC_ID) or 0,
            step=table.transaction_version(APP) or 0,
            positions={segment: _position(number) for segment, number in numbers.items() if number is not None},
            columns=tuple(field.name for field in table.schema().fields),
        )
        return self._landed

    def create(self, first: Landed, schema: pa.Schema) -> None:
        try:
            deltalake.DeltaTable.create(
                self.path,
                schema,
                mode="error",
                description=f"Topic {first.topic}, landed by braid pipeline lake",
                configuration={_TOPIC: first.topic, _TOPIC_ID: str(first.topic_id)},
                raise_if_key_not_exists=False,
            )
        except DeltaError as error:
            if not deltalake.DeltaTable.is_deltatable(self.path):
                raise TableMismatch(f"no Delta table can be made in {self.path}: {error}") from error
        found = self.landed()
        assert found is not None
        if (found.topic, found.topic_id, found.columns) != (first.topic, first.topic_id, first.columns):
            raise TableConflict(f"another writer has just made {self.path} a table of topic {found.topic}; look at it")

    def stage(self, step: int) -> str:
        return os.path.join(self.path, f"step-{step}-{secrets.token_hex(8)}")

    def prepare(self, folder: str, rows: int) -> Landing:
        return prepared(folder, rows)

    def commit(self, landing: Landing, landed: Landed) -> None:
        table, before = self._table, self._landed
        assert table is not None, "a table is looked at before anything is committed"
        assert before is not None
        version = table.version()
        conflict = TableConflict(
            f"another writer has committed step {landed.step} of {self.path} first; nothing was landed twice"
        )
        if before.step != landed.step - 1:
            raise conflict
        if landing.files:
            sync(landing.folder)
            sync(self.path)
        numbers = {_segment(segment): _number(position) for segment, position in landed.positions.items()}
        known = {_segment(segment): _number(position) for segment, position in before.positions.items()}
        changed = {app: number for app, number in numbers.items() if known.get(app) != number}
        changed |= {APP: landed.step, _SEGMENTS: max(landed.positions, default=-1) + 1}
        if landed.topic_id != before.topic_id:
            changed[_LATER_TOPIC_ID] = landed.topic_id
        note = {"landed": msgspec.to_builtins(landed, str_keys=True), "folder": os.path.basename(landing.folder)}
        try:
            table.create_write_transaction(
                [add_action(self.path, file) for file in landing.files],
                "append",
                table.schema(),
                commit_properties=deltalake.CommitProperties(
                    custom_metadata={"braid": note},
                    app_transactions=[deltalake.Transaction(app, number) for app, number in changed.items()],
                ),
            )
        except DeltaError as error:
            # Work after a commit, such as a checkpoint, may fail: the step has landed nevertheless.
            if self._committed_folders().get(landed.step) != note["folder"]:
                if isinstance(error, CommitFailedError) and self._step_now() < landed.step:
                    raise TableConflict(f"another writer has changed {self.path} meanwhile: {error}") from error
                raise conflict from error
        self._sync_log(since=version)

    def discard(self, folder: str) -> None:
        remove(folder)

    def remove_leftovers(self, older_than_s: float = LEFTOVER_S) -> int:
        """Remove folders whose step was committed with another folder, or not yet. If the log is too short to tell, the
        folder stays until Delta vacuums it."""
        landed = self.landed()
        if landed is None:
            return 0
        steps = {name: int(found[1]) for name in os.listdir(self.path) if (found := _FOLDER.fullmatch(name))}
        old = list(old_folders((os.path.join(self.path, name) for name in steps), older_than_s))
        committed = self._committed_folders() if old else {}
        leftovers = 0
        for folder in old:
            name = os.path.basename(folder)
            if steps[name] > landed.step or committed.get(steps[name], name) != name:
                remove(folder)
                leftovers += 1
        return leftovers

    def _step_now(self) -> int:
        return deltalake.DeltaTable(self.path).transaction_version(APP) or 0

    def _committed_folders(self) -> dict[int, str]:
        """Return the committed folder of each step, as far back as the log reaches."""
        history = deltalake.DeltaTable(self.path).history(_HISTORY)
        notes = [commit["braid"] for commit in history if isinstance(commit.get("braid"), dict)]
        return {note["landed"]["step"]: note["folder"] for note in notes if "folder" in note}

    def _sync_log(self, since: int) -> None:
        """Sync the commits after this version: delta-rs does not."""
        log = os.path.join(self.path, _LOG)
        for name in os.listdir(log):
            if re.fullmatch(r"[0-9]{20}\.json", name) and int(name[:20]) > since:
                sync(os.path.join(log, name))
        sync(log)


def add_action(table: str, file: DataFile) -> AddAction:
    """Describe a file for a commit."""
    return AddAction(
        path=os.path.relpath(file.path, table),
        size=file.bytes,
        partition_values={},
        modification_time=int(os.path.getmtime(file.path) * 1000),
        data_change=True,
        stats=msgspec.json.encode(statistics(file.footer)).decode(),
    )


def statistics(footer: Any) -> dict[str, Any]:
    """Count a file's rows and nulls, and find its lowest and highest values, from its row groups."""
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for number in range(footer.num_columns):
        name = footer.schema.column(number).path
        if "." in name:  # Part of a map: Delta has no statistics for those.
            continue
        groups = [footer.row_group(group).column(number).statistics for group in range(footer.num_row_groups)]
        if all(group is not None and group.has_null_count for group in groups):
            nulls[name] = sum(group.null_count for group in groups)
        bounded = [group for group in groups if group is not None and group.has_min_max]
        if len(bounded) == len(groups) and all(isinstance(group.min, _COUNTED) for group in bounded):
            lowest[name] = _text(min(group.min for group in bounded))
            highest[name] = _text(max(group.max for group in bounded))
    return {"numRecords": footer.num_rows, "minValues": lowest, "maxValues": highest, "nullCount": nulls}


def _text(value: int | datetime.datetime) -> int | str:
    return value if isinstance(value, int) else value.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _segment(segment: int) -> str:
    return f"{APP}/segment/{segment}"


def _position(number: int) -> Position:
    return END if number == _END else number


def _number(position: Position) -> int:
    return _END if position == END else position
