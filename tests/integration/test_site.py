"""The documentation site builds, strictly and without a network, and has the pages that are made from the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from braid.admin.rest import ENDPOINTS
from braid.cli.main import braid

ROOT = Path(__file__).parents[2]
BUILD_S = 110

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("site")]


def build(folder: Path, to: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(to)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # Not --quiet: MkDocs would not count the warnings that it does not show.
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILD_S)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_of_docs_is_on_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        place = page.relative_to(ROOT / "docs")
        made = place.with_name("index.html") if page.name == "README.md" else place.with_suffix(".html")
        assert (site / made).exists(), place


def test_the_reference_has_every_command_and_every_call(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for name in braid.lazy:
        assert f'id="braid-{name}"' in commands, name
    rest = (site / "reference" / "rest.html").read_text(encoding="utf-8")
    for endpoint in ENDPOINTS:
        assert f'id="{endpoint.operation}"' in rest, endpoint.operation


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|img|iframe)[^>]+src=\"?https?://", text), page
        assert not re.search(r"<link[^>]+rel=\"?(?:stylesheet|preconnect|icon)[^>]+href=\"?https?://", text), page


def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    (folder / "docs").mkdir(parents=True)
    for name in ("mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "tools", folder / "tools")
    shutil.copytree(ROOT / "docs", folder / "docs", dirs_exist_ok=True)
    (folder / "docs" / "errors.md").write_text("# Errors\n\n[gone](nowhere.md), [too](glossary.md#nothing)\n")
    done = build(folder, tmp_path / "site")
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr
    assert "glossary.md#nothing" in done.stderr
