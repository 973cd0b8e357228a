"""Braid as a file to send along: for `--py-files`, `addPyFile` and `addArtifacts`."""

from __future__ import annotations

import os
import zipfile


def zip_package(folder: str) -> str:
    """Zip Braid's modules into a file in `folder`, for `--py-files` or `addPyFile`. Returns its path."""
    import braid

    package = os.path.dirname(os.path.abspath(braid.__file__))
    above = os.path.dirname(package)
    path = os.path.join(folder, f"braid-{braid.__version__}.zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for root in (package, os.path.join(above, "pyspark_braid")):
            for here, _, names in sorted(os.walk(root)):
                for each in sorted(names):
                    if each.endswith(".py"):
                        file = os.path.join(here, each)
                        archive.write(file, os.path.relpath(file, above))
    return path
