"""The names of a simulated disk: folders, files, and the journal of changes that a crash may still undo."""

from __future__ import annotations

from collections.abc import Callable
from posixpath import basename, dirname, normpath
from random import Random

from braid.model.errors import DiskError, FileMissing, FileTaken
from braid.ports.disk import FileStat
from braid.testing.sectors import SectorFile

ROOTS = ("/", ".")


class Names:
    def __init__(self) -> None:
        self.files: dict[str, SectorFile] = {}
        self.last_change = 0
        self._folders: set[str] = set(ROOTS)
        self._journal: list[tuple[int, Callable[[], object]]] = []

    def make_durable(self, change: int) -> None:
        """A journal is stored in order: this change, and with it all before it, will survive every crash."""
        self._journal = [(number, undo) for number, undo in self._journal if number > change]

    def crash(self, random: Random) -> None:
        kept = random.randint(0, len(self._journal))
        for _, undo in reversed(self._journal[kept:]):
            undo()
        self._journal.clear()

    def total_bytes(self) -> int:
        return sum(len(file.content) for file in self.files.values())

    def file(self, path: str) -> SectorFile:
        path = normpath(path)
        if path in self._folders:
            raise DiskError(f"could not open {path}: it is a folder")
        self._check_parents_are_folders(path)
        if path not in self.files:
            raise FileMissing(f"could not find {path}: there is no such file")
        return self.files[path]

    def list_folders(self, folder: str) -> list[str]:
        folder = self._listed(folder)
        return sorted(basename(path) for path in self._folders if _parent(path) == folder and path not in ROOTS)

    def list(self, folder: str) -> list[FileStat]:
        folder = self._listed(folder)
        return sorted(
            FileStat(basename(path), len(file.content), file.modified_us)
            for path, file in self.files.items()
            if _parent(path) == folder
        )

    def add(self, path: str, file: SectorFile) -> None:
        path = normpath(path)
        self._check_parent(path)
        self._check_free(path)
        self.files[path] = file
        self._note(lambda: self.files.pop(path))

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

        self._note(undo)

    def publish(self, source: str, target: str) -> None:
        self._file_to_rename(normpath(source), normpath(target))
        self._check_free(normpath(target))
        self.rename(source, target)

    def remove(self, path: str) -> None:
        path = normpath(path)
        file = self.file(path)
        del self.files[path]
        self._note(lambda: self.files.update({path: file}))

    def make_folder(self, folder: str) -> None:
        folder = normpath(folder)
        if folder in self._folders:
            return
        self.make_folder(_parent(folder))
        self._check_free(folder)
        self._folders.add(folder)
        self._note(lambda: self._folders.discard(folder))

    def remove_folder(self, folder: str) -> None:
        folder = self._listed(folder)
        if folder not in self._folders:
            return
        if any(_parent(path) == folder for path in (*self.files, *self._folders)):
            raise DiskError(f"could not remove the folder {folder}: it is not empty")
        self._folders.discard(folder)
        self._note(lambda: self._folders.add(folder))

    def _file_to_rename(self, source: str, target: str) -> SectorFile:
        """The checks come in the kernel's order, so that the same error is found first: folders before the file."""
        if source in self._folders:
            raise DiskError(f"could not rename {source} to {target}: it is a folder, and only files are renamed")
        self._check_parent(source)
        self._check_parent(target)
        return self.file(source)

    def _note(self, undo: Callable[[], object]) -> None:
        self.last_change += 1
        self._journal.append((self.last_change, undo))

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
        if _parent(path) not in self._folders:
            raise FileMissing(f"could not reach {path}: there is no folder {_parent(path)}")

    def _check_parents_are_folders(self, path: str) -> None:
        while (path := _parent(path)) not in ROOTS:
            if path in self.files:
                raise DiskError(f"{path} is a file, not a folder")


def _parent(path: str) -> str:
    return dirname(path) or "."
