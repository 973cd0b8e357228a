"""The names of a simulated disk: folders, files, and the journal of changes that a crash may still undo.

Each folder is durable by itself: syncing one says nothing about the names in another. A crash keeps, of each folder,
some first part of the changes that are not durable yet. A rename between two folders is one change of both: it happened
in both or in neither, and when it is durable, so is all that came before it in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from posixpath import basename, dirname, normpath
from random import Random
from typing import NamedTuple

from braid.model.errors import DiskError, FileMissing, FileTaken, SyncFailed
from braid.ports.disk import FileStat
from braid.testing.sim.sectors import SectorFile

ROOTS = ("/", ".")


class _Change(NamedTuple):
    number: int
    folders: frozenset[str]
    """In whose names it is seen."""
    undo: Callable[[], object]


class Names:
    def __init__(self) -> None:
        self.files: dict[str, SectorFile] = {}
        self.last_change = 0
        self._folders: set[str] = set(ROOTS)
        self._journal: list[_Change] = []

    def make_durable(self, folder: str, change: int) -> None:
        """The changes of this folder up to this one, and what came before them, will survive every crash."""
        durable = {normpath(folder or ".")}
        left: list[_Change] = []
        for each in reversed(self._journal):
            if each.number > change or durable.isdisjoint(each.folders):
                left.append(each)
            else:
                durable |= each.folders
        self._journal = left[::-1]

    def crash(self, random: Random) -> None:
        changes = Counter(folder for change in self._journal for folder in sorted(change.folders))
        kept = {folder: random.randint(0, count) for folder, count in changes.items()}
        lost: list[_Change] = []
        for change in self._journal:
            if all(kept[folder] > 0 for folder in change.folders):
                kept.update({folder: kept[folder] - 1 for folder in change.folders})
            else:
                kept.update(dict.fromkeys(change.folders, 0))
                lost.append(change)
        for change in reversed(lost):
            change.undo()
        self._journal.clear()
        self._drop_what_lost_its_folder()

    def total_bytes(self) -> int:
        return sum(len(file.content) for file in {id(file): file for file in self.files.values()}.values())

    def file(self, path: str) -> SectorFile:
        path = normpath(path)
        if path in self._folders:
            raise DiskError(f"could not open {path}: it is a folder")
        self._check_parents_are_folders(path)
        if path not in self.files:
            raise FileMissing(f"could not find {path}: there is no such file")
        return self.files[path]

    def has(self, path: str, file: SectorFile) -> bool:
        """Tell whether the file has a name: the one under which it was opened, or another one since."""
        return self.files.get(normpath(path)) is file or any(each is file for each in self.files.values())

    def list_folders(self, folder: str) -> list[str]:
        folder = self._listed(folder)
        return sorted(basename(path) for path in self._folders if parent(path) == folder and path not in ROOTS)

    def list(self, folder: str) -> list[FileStat]:
        folder = self._listed(folder)
        return sorted(
            FileStat(basename(path), len(file.content), file.modified_us)
            for path, file in self.files.items()
            if parent(path) == folder
        )

    def add(self, path: str, file: SectorFile) -> None:
        path = normpath(path)
        self._check_parent(path)
        self._check_free(path)
        self.files[path] = file
        self._note(lambda: self.files.pop(path), path)

    def rename(self, source: str, target: str) -> None:
        source, target = normpath(source), normpath(target)
        file = self._file_to_rename(source, target)
        if target in self._folders:
            raise DiskError(f"could not rename {source} to {target}: that is a folder")
        replaced = self.files.get(target)
        del self.files[source]
        self.files[target] = file

        def undo() -> None:
            del self.files[target]
            self.files[source] = file
            if replaced is not None and source != target:
                self.files[target] = replaced

        self._note(undo, source, target)

    def publish(self, source: str, target: str) -> None:
        self._file_to_rename(normpath(source), normpath(target))
        self._check_free(normpath(target))
        self.rename(source, target)

    def link(self, source: str, target: str) -> None:
        target = normpath(target)
        self._check_free(target)
        self.files[target] = self._file_to_rename(normpath(source), target)
        self._note(lambda: self.files.pop(target), target)

    def remove(self, path: str) -> None:
        path = normpath(path)
        file = self.file(path)
        del self.files[path]
        self._note(lambda: self.files.update({path: file}), path)

    def missing_folders(self, folder: str) -> Sequence[str]:
        """The folder and its parents, as far as they do not exist; the outermost first."""
        folder = normpath(folder)
        missing: list[str] = []
        while folder not in self._folders:
            missing.append(folder)
            folder = parent(folder)
        return missing[::-1]

    def make_folder(self, folder: str) -> None:
        """Make one folder. That another was faster is fine."""
        folder = normpath(folder)
        if folder in self._folders:
            return
        self._check_parent(folder)
        self._check_free(folder)
        self._folders.add(folder)
        self._note(lambda: self._folders.discard(folder), folder)

    def remove_folder(self, folder: str) -> None:
        folder = self._listed(folder)
        if folder not in self._folders:
            return
        if any(parent(path) == folder for path in (*self.files, *self._folders)):
            raise DiskError(f"could not remove the folder {folder}: it is not empty")
        self._folders.discard(folder)
        # What is undone later never brings back a name in a folder that is gone.
        shrunk = [change._replace(folders=change.folders - {folder}) for change in self._journal]
        self._journal = [change for change in shrunk if change.folders]
        self._note(lambda: self._folders.add(folder), folder)

    def check_can_be_synced(self, folder: str) -> None:
        """An absent folder can be; what is not a folder cannot."""
        try:
            self._listed(folder)
        except DiskError as error:
            raise SyncFailed(f"could not sync the folder {folder}: {error}") from error

    def _file_to_rename(self, source: str, target: str) -> SectorFile:
        """The checks come in the kernel's order, so that the same error is found first: folders before the file."""
        if source in self._folders:
            raise DiskError(f"could not rename {source} to {target}: it is a folder, and only files are renamed")
        self._check_parent(source)
        self._check_parent(target)
        return self.file(source)

    def _note(self, undo: Callable[[], object], *changed: str) -> None:
        self.last_change += 1
        self._journal.append(_Change(self.last_change, frozenset(map(parent, changed)), undo))

    def _drop_what_lost_its_folder(self) -> None:
        """A file or folder whose own name was durable is gone all the same when the folder around it is."""
        for folder in sorted(self._folders):  # outer folders come before those in them
            if folder not in ROOTS and parent(folder) not in self._folders:
                self._folders.discard(folder)
        self.files = {path: file for path, file in self.files.items() if parent(path) in self._folders}

    def _listed(self, folder: str) -> str:
        folder = normpath(folder or ".")
        if folder in self.files:
            raise DiskError(f"could not list {folder}: it is a file")
        self._check_parents_are_folders(folder)
        return folder

    def _check_free(self, path: str) -> None:
        if path in self.files or path in self._folders:
            raise FileTaken(f"could not create {path}: the name exists")

    def _check_parent(self, path: str) -> None:
        self._check_parents_are_folders(path)
        if parent(path) not in self._folders:
            raise FileMissing(f"could not reach {path}: there is no folder {parent(path)}")

    def _check_parents_are_folders(self, path: str) -> None:
        while (path := parent(path)) not in ROOTS:
            if path in self.files:
                raise DiskError(f"{path} is a file, not a folder")


def parent(path: str) -> str:
    """The folder that a normal path stands in."""
    return dirname(path) or "."
