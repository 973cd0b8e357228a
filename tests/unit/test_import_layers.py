"""The folder tree is the architecture: imports go only the way that docs/architecture.md draws."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("import-layers")  # Each worker would parse all modules.

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
    "scan": {"model", "ports", "wire", "client", "storage"},
    "spark": {"model", "ports", "wire", "client", "storage", "scan"},
    "console": {"model", "wire", "client"},
    "cli": {
        "model",
        "ports",
        "metadata",
        "storage",
        "wire",
        "cluster",
        "broker",
        "admin",
        "client",
        "scan",
        "spark",
        "console",
    },
    "testing": {"model", "ports", "metadata", "storage", "wire", "broker", "client"},
}

ROOMS = {
    "model": {"batch": set[str](), "log": set[str](), "queue": set[str]()},
    "metadata": {"sqlite": set[str](), "etcd": set[str]()},
    "storage": {"objects": set[str](), "log": set[str](), "history": {"log", "objects"}},
    "cluster": {"balancing": set[str](), "ownership": {"balancing"}},
    "broker": {
        "peers": set[str](),
        "cursors": set[str](),
        "queues": set[str](),
        "replicas": {"peers", "queues"},
        "segments": {"peers", "cursors", "queues", "replicas"},
        "groups": {"segments"},
        "layouts": {"peers", "segments", "groups"},
        "admin": {"peers", "segments", "groups", "layouts"},
        "connections": {"peers", "queues", "segments", "groups", "admin"},
        "parts": {"peers", "cursors", "queues", "replicas", "segments", "groups", "layouts", "admin", "connections"},
    },
    "client": {"consuming": set[str](), "producing": {"consuming"}, "blocking": {"consuming", "producing"}},
    "spark": {
        "source": set[str](),
        "stream": {"source"},
        "sink": {"source"},
        "jobs": {"source", "stream", "sink"},
    },
    "console": {"drawing": set[str](), "watch": {"drawing"}, "pages": {"drawing", "watch"}},
    "cli": {
        "terminal": set[str](),
        "commands": {"terminal"},
        "bench": {"terminal"},
        "pipeline": {"terminal"},
        "doctor": {"terminal"},
        "backup": {"terminal"},
    },
    "testing": {"sim": set[str](), "checkers": {"sim"}, "scenarios": {"sim", "checkers"}},
}
"""The rooms of a layer, and which of them each may know. Modules beside the rooms are the whole layer's."""

BROKERS_PATH = ("storage", "metadata", "ports", "wire", "cluster", "broker", "admin")
NEVER_ON_A_BROKERS_PATH = {"pyarrow", "numpy"}
"""A broker moves batches and never opens them. These two cost a second of start-up and 60 MB."""


NEEDS_SPARK = {"pyspark", "py4j", "deltalake"}
"""What `pip install braidmq` alone does not bring: `braidmq[spark]` does, for the folder `spark`."""
ONLY_FOR_OWNERS = (
    "log",
    "queue_journal",
    "segment",
    "segment_recovery",
    "replica",
    "history.exporter",
    "history.housekeeper",
)
"""Of storage. Scans read what owners have written, and asks them for the rest."""
BUT_READERS_KNOW = ("braid.storage.log.producers",)
MOST_MODULES = 13
"""In one room. A room with more is two."""


def layer_of(path: Path) -> str:
    """The folder under `braid`, also of what lies deeper; empty for the package's own modules."""
    inside = path.relative_to(SOURCE).parts
    return inside[0] if len(inside) > 1 else ""


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Everywhere in the module, but not what only the type checker imports."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        # An import is a statement, so no expression can hold one.
        waiting.extend(each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr))


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def named(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_every_folder_has_its_place_in_the_layers() -> None:
    assert {layer_of(path) for path in modules()} - {""} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", [path for path in modules() if layer_of(path)], ids=named)
def test_imports_go_downwards(path: Path) -> None:
    layer = layer_of(path)
    allowed = MAY_IMPORT[layer] | {layer}
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "braid" and len(parts) > 1:
            assert parts[1] in allowed, f"{named(path)} must not know {name}"


def room_of(parts: tuple[str, ...]) -> str:
    """Of a path inside its layer, or of a module's name there: the room that it is in; empty beside the rooms."""
    return parts[0] if len(parts) > 1 else ""


def test_every_room_has_its_place() -> None:
    rooms: dict[str, set[str]] = {}
    for path in modules():
        layer, *inside = path.relative_to(SOURCE).parts
        if room := room_of(tuple(inside)):
            rooms.setdefault(layer, set()).add(room)
    assert rooms == {layer: set(known) for layer, known in ROOMS.items()}


@pytest.mark.parametrize(("layer", "room"), [(layer, room) for layer, rooms in ROOMS.items() for room in rooms])
def test_rooms_know_only_the_rooms_that_they_may(layer: str, room: str) -> None:
    allowed = ROOMS[layer][room] | {room}
    for path in (SOURCE / layer / room).rglob("*.py"):
        for name in imports_of(path):
            parts = name.split(".")
            if parts[:2] == ["braid", layer] and len(parts) > 2 and parts[2] in ROOMS[layer]:
                assert parts[2] in allowed, f"{named(path)} must not know {name}"


def test_no_room_has_more_doors_than_one_can_remember() -> None:
    for folder in {path.parent for path in modules()}:
        doors = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
        assert len(doors) <= MOST_MODULES, f"{named(folder)} has {len(doors)} modules: {', '.join(sorted(doors))}"


@pytest.mark.parametrize("path", [path for path in modules() if layer_of(path) in BROKERS_PATH], ids=named)
def test_storage_opens_no_batch_body(path: Path) -> None:
    for name in imports_of(path):
        assert name.split(".")[0] not in NEVER_ON_A_BROKERS_PATH
        assert name not in ("braid.model.batch.columns", "braid.model.batch.body", "braid.model.batch.encode")


@pytest.mark.parametrize("path", [path for path in modules() if layer_of(path) != "spark"], ids=named)
def test_only_the_spark_folder_needs_spark(path: Path) -> None:
    for name in imports_of(path):
        assert name.split(".")[0] not in NEEDS_SPARK, f"{named(path)} must not import {name}"


@pytest.mark.parametrize("path", [path for path in modules() if layer_of(path) in ("scan", "spark")], ids=named)
def test_a_scan_reads_storage_and_never_writes_a_log(path: Path) -> None:
    for name in imports_of(path):
        if not name.startswith(BUT_READERS_KNOW):
            assert not re.match(rf"braid\.storage\.({'|'.join(ONLY_FOR_OWNERS)})(\.|$)", name), f"{named(path)}: {name}"


def test_every_command_is_there_without_spark() -> None:
    """Everything but the folder `spark` can be imported where PySpark is not installed, and imports none of it."""
    wanted = [path for path in modules() if layer_of(path) != "spark"]
    names = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in wanted]
    done = subprocess.run([sys.executable, "-c", IMPORT_WITHOUT_SPARK, *names], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


IMPORT_WITHOUT_SPARK = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({sorted(NEEDS_SPARK)}))  # importing one of them is an error from now on
for name in sys.argv[1:]:
    importlib.import_module(name.removesuffix(".__init__"))
print([name for name in sys.modules if name.startswith("braid.spark")])
"""
