"""The files of deploy/docker and deploy/systemd, really run: `make image`, or `python -m tests.image --help`.

Podman builds the image and runs it read-only, as its own user and without capabilities; then systemd boots in a
container and runs the unit. No Docker, no registry of images and no systemd of this machine is needed: the base image
is made of Debian's packages, and kept in build/image for the next run. Containers and images are deleted at the end.
It needs root.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.image.base import SUITES, base_name, make_base
from tests.image.image import ROOT, build_image, use_image
from tests.image.podman import Podman
from tests.image.service import use_service

CACHE: Final = ROOT / "build" / "image"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", choices=SUITES, default=next(iter(SUITES)), help="of the base image")
    python = parser.parse_args().python
    if os.geteuid() != 0:
        sys.exit("this makes file systems and boots a container: run it as root")
    CACHE.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="braid-image-") as name:
        folder = Path(name)
        podman = Podman(folder / "podman")
        try:
            cached = make_base(podman, python, CACHE)
            title("The base image")
            show([(base_name(python), "from an earlier run" if cached else "made of Debian's packages")])
            title("The image, by deploy/docker/Dockerfile")
            show(build_image(podman, python, folder))
            show(use_image(podman))
            title("The service, by deploy/systemd/braid.service")
            show(use_service(podman, python, folder))
        finally:
            podman.close()
    title(f"All of this works. It took {time.monotonic() - began:.0f} s.")


def title(text: str) -> None:
    print(f"\n{text}", flush=True)


def show(seen: Iterable[tuple[str, str]]) -> None:
    for what, value in seen:
        print(f"    {what:<46} {value}", flush=True)


if __name__ == "__main__":
    main()
