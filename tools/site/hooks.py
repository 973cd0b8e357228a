"""What the documentation site has beyond the files in docs/. MkDocs calls these functions.

- The pages of the repository's root become pages of the site, and links to them lead there. README.md is the first
  page; the list of all pages, docs/README.md, moves aside.
- A pattern in the navigation becomes the pages that no other line names.
- The reference of commands and of REST is made from the code (reference.py).
- Links to files that the site does not have become plain text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.site.reference import commands_page, rest_page

ROOT: Final = Path(__file__).parents[2]
MOVED: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "docs/README.md": "project/pages.md",
}
"""Files of the repository, and where the site has them. Other files of docs/ keep their places."""
_CAME_FROM: Final = {place: source for source, place in MOVED.items()}
_CODE: Final = re.compile(r"^```.*?^```|^(?: {4}[^\n]*\n)+", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> None:
    docs = Path(config.docs_dir)
    pages = sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))
    named = {*_leaves(config.nav), "README.md"}
    config.nav = _expanded(config.nav, [page for page in pages if page not in named])


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for each in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _leaves(each)


def _expanded(nav: Any, others: list[str]) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(each, others) for title, each in nav.items()}
    if not isinstance(nav, list):
        return nav
    found: list[Any] = []
    for each in nav:
        if isinstance(each, str) and "*" in each:
            found += [page for page in others if PurePosixPath(page).match(each) and page.count("/") == each.count("/")]
        else:
            found.append(_expanded(each, others))
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    index = files.get_file_from_path("README.md")
    if index is not None:
        files.remove(index)
    for source, place in MOVED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if place == "index.md":
            text = f"---\nhide:\n  - navigation\n---\n\n{text}"
        files.append(File.generated(config, place, content=text))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    files.append(File.generated(config, "reference/rest.md", content=rest_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 (MkDocs's)
    """Point the links of a page at their places on the site."""
    here = page.file.src_uri
    source = _CAME_FROM.get(here, f"docs/{here}")

    def moved(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path) or here.startswith("reference/"):
            return found[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = MOVED.get(file, file.removeprefix("docs/"))
        if files.get_file_from_path(place) is None:
            return text if (ROOT / file).exists() else found[0]
        return f"[{text}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{mark}{anchor})"

    parts, at = [], 0
    for code in _CODE.finditer(markdown):
        parts += [_LINK.sub(moved, markdown[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, _LINK.sub(moved, markdown[at:])])
