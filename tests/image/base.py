"""The image that the Dockerfile begins with, made of Debian's packages: no registry of images is needed.

It has the name, the Debian and the Python of the official image, and the same commands. Its files lie elsewhere: Debian
has Python in /usr, the official image in /usr/local.
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

PYTHON: Final = "3.11"
SUITE: Final = "bookworm"
BASE: Final = f"docker.io/library/python:{PYTHON}-slim-{SUITE}"
PACKAGES: Final = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates,netbase,tzdata"
_OF_PIP: Final = ("index-url", "extra-index-url", "proxy", "trusted-host", "default-timeout")
_AUTHORITIES: Final = "/run/authorities.pem"


def make_base(podman: Podman, cache: Path) -> bool:
    """Make the image. Returns whether its files were in the cache from an earlier run."""
    archive = cache / f"python-{PYTHON}-{SUITE}.tar"
    cached = archive.exists()
    if not cached:
        unfinished = archive.with_suffix(".unfinished.tar")
        succeed("mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", SUITE, unfinished)
        unfinished.rename(archive)
    podman("import", "--change", 'CMD ["python3"]', archive, BASE)
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
