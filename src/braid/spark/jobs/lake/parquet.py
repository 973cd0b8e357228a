"""A lake table in plain Parquet: a folder of folders, one for each commit.

    orders/                        the table; what readers are given
      step=1/
        part-….parquet             rows, written by Spark
        _braid.parquet             no rows; its metadata `braid` is the Landed of this step
      step=2/ …
    .orders.staging/               beside the table
      2-9f86d081/                  where Spark writes step 2

**Commit** is one rename: `.orders.staging/2-9f86d081` becomes `orders/step=2`. A rename onto a folder that is not empty
fails, and every step has its `_braid.parquet`, so of two writers one wins. The last step has the positions of all
segments, so others may delete or rewrite older steps as long as the last one stays.

**Readers** need only the path. Spark, pandas, Polars and DuckDB take `step=…` for a partition column, so each row shows
its commit, and a reader that comes back asks for `step > 41`. (Spark does not look into a folder whose name is no
`name=value`.) Readers skip different files, so nothing may depend on skipping:

- Polars and DuckDB read every file below the path, also in folders that begin with `_` or `.`. They would count data
  that is being written. So a step is written beside the table, in the same file system, because of the rename.
- Polars refuses a folder with a file that is not Parquet, so the offsets are in a Parquet file without rows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from braid.model.errors import TableConflict, TableMismatch
from braid.spark.jobs.lake.table import (
    LEFTOVER_S,
    Landed,
    Landing,
    folder_path,
    old_folders,
    prepared,
    remove,
    sync,
)

COMMIT_FILE: Final = "_braid.parquet"
COMMIT_KEY: Final = b"braid"
ROWS_KEY: Final = b"braid.rows"
"""How many rows the step has, in its other files: an incomplete copy of the folder has fewer."""
_STEP: Final = re.compile(r"step=([1-9][0-9]*)")
_TAKEN: Final = (errno.ENOTEMPTY, errno.EEXIST)


class ParquetTable:
    kind: Final = "parquet"

    def __init__(self, where: str) -> None:
        self.path: Final = folder_path(where)
        above, name = os.path.split(self.path)
        self._staging: Final = os.path.join(above, f".{name}.staging")
        self._schema: pa.Schema | None = None
        """From `create`, or from the last step."""
        if os.path.ismount(self.path):
            raise TableMismatch(
                f"{self.path} is where a file system begins, and a table is committed by a rename from beside it: "
                "name a folder inside it"
            )

    def landed(self) -> Landed | None:
        last = self._last_step()
        if last == 0:
            if os.path.isdir(self.path) and os.listdir(self.path):
                raise TableMismatch(
                    f"{self.path} is not empty and has no step=1: it is not a table of `braid pipeline lake --format "
                    "parquet`; name a new folder"
                )
            return None
        where = os.path.join(self._step(last), COMMIT_FILE)
        try:
            schema = pq.read_schema(where)
        except FileNotFoundError:
            raise TableMismatch(
                f"{where} is missing: only with it the table says how far it has come. Put it back, or land the topic "
                "in a new folder"
            ) from None
        except pa.ArrowInvalid as error:
            raise TableMismatch(f"{where} cannot be read: {error}; restore it, or land in a new folder") from None
        said = schema.metadata or {}
        landed = Landed.from_bytes(said.get(COMMIT_KEY, b""), where)
        if landed.step != last:
            raise TableMismatch(f"{where} is of step {landed.step}: folders of the table were renamed")
        self._check_rows(last, said.get(ROWS_KEY))
        self._schema = schema
        return landed

    def create(self, first: Landed, schema: pa.Schema) -> None:  # noqa: ARG002 (the first step makes the table)
        self._schema = schema

    def stage(self, step: int) -> str:
        return os.path.join(self._staging, f"{step}-{secrets.token_hex(8)}")

    def prepare(self, folder: str, rows: int) -> Landing:
        os.makedirs(folder, exist_ok=True)  # Spark writes nothing for a step without records.
        return prepared(folder, rows)

    def commit(self, landing: Landing, landed: Landed) -> None:
        assert self._schema is not None, "a table is looked at or created before anything is committed"
        mark = os.path.join(landing.folder, COMMIT_FILE)
        said = {COMMIT_KEY: landed.to_bytes(), ROWS_KEY: str(landing.rows).encode()}
        pq.write_table(self._schema.with_metadata(said).empty_table(), mark)
        sync(mark)
        sync(landing.folder)
        os.makedirs(self.path, exist_ok=True)
        conflict = TableConflict(
            f"another writer has committed step {landed.step} of {self.path} first; nothing was landed twice"
        )
        # The rename alone decides between writers. This check finds a step that was committed and removed since.
        if self._last_step() != landed.step - 1:
            raise conflict
        try:
            os.rename(landing.folder, self._step(landed.step))
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            raise conflict from None
        sync(self.path)
        sync(os.path.dirname(self.path))
        with contextlib.suppress(OSError):
            os.rmdir(self._staging)

    def discard(self, folder: str) -> None:
        remove(folder)
        with contextlib.suppress(OSError):
            os.rmdir(self._staging)

    def remove_leftovers(self, older_than_s: float = LEFTOVER_S) -> int:
        staged = os.listdir(self._staging) if os.path.isdir(self._staging) else []
        leftovers = list(old_folders((os.path.join(self._staging, name) for name in staged), older_than_s))
        for folder in leftovers:
            self.discard(folder)
        return len(leftovers)

    def _check_rows(self, step: int, expected: bytes | None) -> None:
        """Check that the last step is complete: later steps would never land its missing rows."""
        folder = self._step(step)
        try:
            files = [name for name in os.listdir(folder) if name.endswith(".parquet")]
            rows = sum(pq.read_metadata(os.path.join(folder, name)).num_rows for name in files)
        except pa.ArrowInvalid as error:
            raise TableMismatch(f"a file of {folder} cannot be read: {error}; restore the folder") from None
        if expected is not None and rows != int(expected):
            raise TableMismatch(
                f"{folder} was committed with {int(expected):,} rows and has {rows:,}: some of its files are missing, "
                "as in an unfinished copy, or were changed. Restore it, or land the topic in a new folder"
            )

    def _last_step(self) -> int:
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        return max((int(found[1]) for found in map(_STEP.fullmatch, names) if found is not None), default=0)

    def _step(self, step: int) -> str:
        return os.path.join(self.path, f"step={step}")
