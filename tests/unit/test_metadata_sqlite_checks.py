"""Where and with what the SQLite store refuses to work."""

from __future__ import annotations

import pytest

from braid.metadata.sqlite.file import refuse_old_engine
from braid.metadata.sqlite.filesystem import filesystem_of, is_network
from braid.model.errors import MetadataError

MOUNTINFO = r"""
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw
30 27 0:40 / /data rw,relatime shared:7 master:2 - nfs4 server:/export rw,vers=4.2
31 30 0:41 / /data/local rw,relatime - xfs /dev/vdb rw
32 27 0:42 / /with\040space rw - fuse.sshfs host:/ rw
33 27 0:43 / /over rw - nfs server:/a rw
34 33 0:44 / /over rw - ext4 /dev/vdc rw
""".strip()


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/var/lib/braid/metadata.db", "ext4"),
        ("/dev/shm/metadata.db", "tmpfs"),
        ("/data/metadata.db", "nfs4"),
        ("/data/local/metadata.db", "xfs"),
        ("/database/metadata.db", "ext4"),
        ("/with space/metadata.db", "fuse.sshfs"),
        ("/over/metadata.db", "ext4"),
    ],
)
def test_a_path_lies_on_the_innermost_and_last_mount(path: str, filesystem: str) -> None:
    assert filesystem_of(path, MOUNTINFO) == filesystem


@pytest.mark.parametrize("filesystem", ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "fuseblk", "lustre"])
def test_network_filesystems_are_recognised(filesystem: str) -> None:
    assert is_network(filesystem)


@pytest.mark.parametrize("filesystem", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs"])
def test_local_filesystems_are_accepted(filesystem: str) -> None:
    assert not is_network(filesystem)


@pytest.mark.parametrize("version", ["3.40.1", "3.51.2", "3.7.0", "3.51"])
def test_an_engine_with_the_wal_reset_bug_is_refused(version: str) -> None:
    with pytest.raises(MetadataError, match=r"3\.51\.3 or later"):
        refuse_old_engine(version)


@pytest.mark.parametrize("version", ["3.51.3", "3.54.1", "4.0.0"])
def test_a_sound_engine_is_accepted(version: str) -> None:
    refuse_old_engine(version)
