"""A backup of the metadata: every key of the store at one revision, in one file.

    {"format": "braid-metadata", "version": 1, "revision": 4711, …}    one line of JSON
    {"key": "/cluster/id", "value": "…base64…"}                        one line for each key, in order of keys
    {"keys": 12, "digest": "…"}                                        of all lines before

Keys under a lease are left out: they say which broker is alive, and no broker is when the file is used. The file holds
the secret by which brokers know each other, so only its owner may read it.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Final

import msgspec

import braid
from braid.metadata import paths
from braid.metadata.store import Store
from braid.model.errors import InvalidArgument, NotAvailable
from braid.model.ids import Revision

FORMAT: Final = "braid-metadata"
VERSION: Final = 1


class Header(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    revision: Revision
    """Of the store that the backup shows."""
    created_at: int
    """µs since 1970."""
    cluster_id: str
    """Empty: every broker keeps its history on its own disk."""
    brokers: tuple[str, ...] = ()
    """Those that were alive."""
    made_by: str = ""
    """The version of Braid."""
    format: str = FORMAT
    version: int = VERSION


class _Line(msgspec.Struct, frozen=True):
    key: str
    value: bytes


class _Trailer(msgspec.Struct, frozen=True):
    keys: int
    digest: str


class Snapshot(msgspec.Struct, frozen=True):
    header: Header
    values: dict[str, bytes]


async def take(store: Store, now_us: int) -> Snapshot:
    """Read all keys from one revision of the store."""
    listing = await store.list("")
    values = {entry.key: entry.value for entry in listing.entries if not entry.lease}
    if paths.CLUSTER_SECRET not in values:
        raise NotAvailable("the metadata store holds no cluster: no broker has ever used it")
    brokers = [paths.broker_of(each.key) for each in listing.entries if each.key.startswith(paths.BROKERS_PREFIX)]
    header = Header(
        revision=listing.revision,
        created_at=now_us,
        cluster_id=values.get(paths.CLUSTER_ID, b"").decode(),
        brokers=tuple(sorted(brokers)),
        made_by=braid.__version__,
    )
    return Snapshot(header, values)


def write(snapshot: Snapshot, path: str) -> None:
    """Write a new file, whole and synced or not at all."""
    lines = [msgspec.json.encode(snapshot.header)]
    lines += [msgspec.json.encode(_Line(key, value)) for key, value in sorted(snapshot.values.items())]
    body = b"".join(line + b"\n" for line in lines)
    trailer = msgspec.json.encode(_Trailer(len(snapshot.values), _digest(body)))
    draft = f"{path}.new-{os.getpid()}"
    try:
        file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with open(file, "wb", closefd=False) as stream:
                stream.write(body + trailer + b"\n")
            os.fsync(file)
            os.link(draft, path)  # Unlike a rename, this overwrites nothing.
        finally:
            os.close(file)
            os.unlink(draft)
        folder = os.open(os.path.dirname(path) or os.curdir, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError as error:
        raise InvalidArgument(f"{path} exists, and a backup overwrites nothing: choose another name") from error
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error.strerror}") from error


def read(path: str) -> Snapshot:
    """Read a file. Raises `InvalidArgument` for one that is damaged, cut off, or of a newer format."""
    try:
        with open(path, "rb") as stream:
            data = stream.read()
    except OSError as error:
        raise InvalidArgument(f"the backup {path} cannot be read: {error.strerror}") from error
    body, _, last = data.removesuffix(b"\n").rpartition(b"\n")
    body += b"\n"
    try:
        first, *lines = body.splitlines()
        header = msgspec.json.decode(first, type=Header)
        if header.format != FORMAT or header.version > VERSION:
            raise InvalidArgument(f"{path} has format {header.format} {header.version}; this build reads {VERSION}")
        trailer = msgspec.json.decode(last, type=_Trailer)
        if trailer.digest != _digest(body) or trailer.keys != len(lines):
            raise InvalidArgument(f"the backup {path} is damaged: its checksum does not fit")
        entries = [msgspec.json.decode(line, type=_Line) for line in lines]
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is no whole backup of Braid's metadata: {error}") from error
    return Snapshot(header, {entry.key: entry.value for entry in entries})


def _digest(body: bytes) -> str:
    return blake2b(body, digest_size=32).hexdigest()
