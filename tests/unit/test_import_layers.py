"""The folder tree is the architecture: imports go only the way that docs/architecture.md draws."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "braid"

MAY_IMPORT = {
    "model": set[str](),
    "ports": {"model"},
    "metadata": {"model", "ports"},
    "storage": {"model", "ports", "metadata"},
    "wire": {"model", "ports"},
    "scaling": {"model"},
    "cluster": {"model", "ports", "metadata"},
    "client": {"model", "ports", "wire"},
    "broker": {"model", "ports", "metadata", "storage", "wire", "scaling", "cluster"},
    "admin": {"model", "ports", "metadata", "storage", "wire", "cluster", "broker"},
    "cli": {"model", "ports", "metadata", "storage", "wire", "cluster", "broker", "admin", "client"},
    "testing": {"model", "ports", "metadata", "storage", "wire", "broker", "client"},
}

BROKERS_PATH = ("storage", "metadata", "ports", "wire", "cluster", "broker", "admin")
NEVER_ON_A_BROKERS_PATH = {"pyarrow", "numpy"}
"""A broker moves batches and never opens them. These two cost a second of start-up and 60 MB."""


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_every_folder_has_its_place_in_the_layers() -> None:
    folders = {path.parent.name for path in modules()} - {"braid"}
    assert folders == set(MAY_IMPORT)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downwards(path: Path) -> None:
    layer = path.parent.name
    if layer == "braid":
        return
    allowed = MAY_IMPORT[layer] | {layer}
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "braid" and len(parts) > 1:
            assert parts[1] in allowed, f"{layer}/{path.name} must not know {name}"


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if path.parent.name in BROKERS_PATH],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_storage_opens_no_batch_body(path: Path) -> None:
    for name in imports_of(path):
        assert name.split(".")[0] not in NEVER_ON_A_BROKERS_PATH
        assert name not in ("braid.model.columns", "braid.model.body", "braid.model.encode")
