"""Whether a file lies where SQLite's WAL mode and `flock` work: on a filesystem of this one machine.

Over a network filesystem the shared memory of the WAL is not shared and locks may not lock. Nothing fails immediately
there; the file is damaged some time later. So it is refused when the store is opened.
"""

from __future__ import annotations

import os
import re

from braid.model.errors import InvalidArgument

NETWORK_FILESYSTEMS = frozenset(
    (
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "davfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
    )
)
"""Filesystems that other machines may write to. Anything mounted through FUSE is refused as well: most of those are
remote, and the rest promise nothing about shared memory."""


def filesystem_of(path: str, mountinfo: str) -> str:
    """Return the type of the filesystem that holds `path`, absolute and without links, by the text of `mountinfo`."""
    found, found_length = "unknown", -1
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        point = _unescaped(mount.split(" ")[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later one hides the earlier.
        if inside and len(point) >= found_length:
            found, found_length = source.split(" ")[0], len(point)
    return found


def is_network(filesystem: str) -> bool:
    return filesystem in NETWORK_FILESYSTEMS or filesystem.startswith("fuse")


def refuse_network_filesystem(path: str) -> None:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        filesystem = filesystem_of(os.path.realpath(path), file.read())
    if is_network(filesystem):
        raise InvalidArgument(
            f"the metadata file {path} lies on a network filesystem ({filesystem}), where SQLite damages its file; "
            "put it on a local disk, or use etcd when brokers run on several machines"
        )


def _unescaped(text: str) -> str:
    """mountinfo writes space, tab, newline and backslash as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
