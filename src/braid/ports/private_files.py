"""Folders and files that only the broker's own user may use: they hold records, and the secret of the cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from typing import Final

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600

_log: Final = logging.getLogger(__name__)


def keep_folder_private(path: str) -> None:
    """Close the folder to other users; create it if it does not exist. Raises `OSError`."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, FOLDER_MODE)
    close_to_others(path)


def keep_file_private(path: str) -> None:
    """Close the file to other users; create it, empty, if it does not exist. Raises `OSError`."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    close_to_others(path)


def close_to_others(path: str) -> None:
    """Repair what an earlier version, or a copy, has left open, if it is there. A volume's own folder may belong to
    another user; then its operator has to do it."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return
    found, mode = stat.S_IMODE(status.st_mode), FOLDER_MODE if stat.S_ISDIR(status.st_mode) else FILE_MODE
    if not found & (stat.S_IRWXG | stat.S_IRWXO):
        return
    try:
        os.chmod(path, mode)
    except PermissionError as error:
        _log.warning(
            "other users may use %s (mode %03o), which holds records and secrets: %s; run chmod %03o",
            path,
            found,
            error.strerror,
            mode,
        )
    else:
        _log.warning(
            "other users could use %s (mode %03o), which holds records and secrets; its mode is %03o now",
            path,
            found,
            mode,
        )
