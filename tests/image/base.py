"""The image that the Dockerfile begins with, made of Debian's packages: no registry of images is needed.

It has the name, the Python and the commands of the official image. Its files lie elsewhere: Debian has Python in /usr,
the official image in /usr/local. Python 3.13 comes from Debian 13, although the name says bookworm, which is Debian 12.
"""

from __future__ import annotations

import configparser
import io
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.image.podman import Podman, succeed

SUITES: Final = {"3.11": "bookworm", "3.13": "trixie"}
"""The Debian that has each version of Python."""
PACKAGES: Final = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates,netbase,tzdata"
_OF_PIP: Final = ("index-url", "extra-index-url", "proxy", "trusted-host", "default-timeout")
_AUTHORITIES: Final = "/run/authorities.pem"


def base_name(python: str) -> str:
    return f"docker.io/library/python:{python}-slim-bookworm"


def make_base(podman: Podman, python: str, cache: Path) -> bool:
    """Make the image. Returns whether its files were in the cache from an earlier run."""
    suite = SUITES[python]
    archive = cache / f"python-{python}-{suite}.tar"
    cached = archive.exists()
    if not cached:
        unfinished = archive.with_suffix(".unfinished.tar")
        succeed("mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", suite, unfinished)
        unfinished.rename(archive)
    podman("import", "--change", 'CMD ["python3"]', archive, base_name(python))
    return cached


def network_options(folder: Path) -> list[str]:
    """Return what a build needs to reach the index of packages as pip does on this machine."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(line.split("=", 1) for line in listed.stdout.splitlines() if "=" in line)
    values = {name.rpartition(".")[2]: shlex.split(value)[0] for name, value in settings.items()}
    pip = configparser.RawConfigParser()
    pip["global"] = {name: values[name] for name in _OF_PIP if values.get(name)}
    options = ["--network=host"]
    if authorities := values.get("cert"):
        pip["global"]["cert"] = _AUTHORITIES
        options.append(f"--volume={authorities}:{_AUTHORITIES}:ro")
    text = io.StringIO()
    pip.write(text)
    file = folder / "pip.conf"
    file.write_text(text.getvalue())
    return [*options, f"--volume={file}:/etc/pip.conf:ro"]
