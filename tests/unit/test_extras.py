"""What each kind of installation can import: the client alone, with a broker, with Spark."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from braid.cli.extras import CONSOLE_IMPORTS, SERVER_IMPORTS
from tests.unit.test_import_layers import MAY_IMPORT, NEEDS_SPARK, SOURCE, imports_of, layer_of, modules

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

CLIENT_LAYERS = {"", "model", "ports", "wire", "scaling", "client", "cli"}
"""The layers that work where only the client is installed."""
LAYERS_OF = {
    "server": set(MAY_IMPORT) - CLIENT_LAYERS - {"scan", "spark", "console"},
    "history": {"scan"},
    "spark": {"scan", "spark"},
    "console": {"console"},
}
"""The layers that an extra is for. The layer `testing` is the server's: it runs brokers."""
ONLY_WHEN_USED = {"ports": {"caio"}, "cli": {"jwt", "cryptography"}, "": {"opentelemetry"}}
"""Packages of extras that client layers import inside a function, or in `try`, and do without."""
DISTRIBUTIONS = {
    "cryptography": "pyjwt",  # pyjwt[crypto]
    "fastapi_offline": "fastapi-offline",
    "google": "protobuf",
    "grpc": "grpcio",
    "jwt": "pyjwt",
    "opentelemetry": "opentelemetry-api",
    "prometheus_client": "prometheus-client",
    "py4j": "pyspark",
    "pydantic": "fastapi",
    "starlette": "fastapi",
}
"""The declared distribution that brings an import, where the names differ."""


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;~! ]", requirement)[0].lower() for requirement in requirements} - {PROJECT["name"]}


in_one_process = pytest.mark.xdist_group("import-layers")  # Its worker has parsed all modules.

BASE = declared(PROJECT["dependencies"])
EXTRAS = {extra: declared(wanted) for extra, wanted in PROJECT["optional-dependencies"].items()}


def third_party(path: Path) -> set[str]:
    """The distributions that a module imports from, anywhere in it."""
    roots = {name.split(".")[0] for name in imports_of(path)}
    return {DISTRIBUTIONS.get(root, root) for root in roots - set(sys.stdlib_module_names) - {"braid"}}


def used_by(layers: set[str]) -> set[str]:
    return set().union(*(third_party(path) for path in modules() if layer_of(path) in layers))


@in_one_process
def test_the_client_declares_what_its_layers_import_and_nothing_else() -> None:
    lazily = {DISTRIBUTIONS.get(name, name) for names in ONLY_WHEN_USED.values() for name in names}
    assert used_by(CLIENT_LAYERS) - lazily == BASE


@in_one_process
def test_the_extras_declare_what_their_layers_import() -> None:
    # fastapi-offline brings files, which no module imports; only pytest itself loads testing/pytest_plugin.py.
    used = used_by(LAYERS_OF["server"]) - BASE - {"pytest"}
    assert used == (EXTRAS["server"] | EXTRAS["etcd"]) - {"caio", "fastapi-offline"}
    assert "caio" in EXTRAS["server"]
    reads_storage = {"obstore"}  # Through the layer storage.
    undeclared = {"protobuf"}  # PySpark needs it and does not declare it.
    assert (used_by(LAYERS_OF["history"]) - BASE) | reads_storage == EXTRAS["history"]
    assert (used_by(LAYERS_OF["spark"]) - BASE) | reads_storage | undeclared == EXTRAS["spark"]


@in_one_process
def test_the_console_declares_what_its_layer_imports() -> None:
    assert used_by(LAYERS_OF["console"]) - BASE == EXTRAS["console"]
    assert {DISTRIBUTIONS.get(name, name) for name in CONSOLE_IMPORTS} == EXTRAS["console"]


def test_the_etcd_extra_brings_a_broker() -> None:
    assert f"{PROJECT['name']}[server]" in PROJECT["optional-dependencies"]["etcd"]


def test_the_command_line_looks_for_every_package_that_a_broker_cannot_do_without() -> None:
    assert {DISTRIBUTIONS.get(name, name) for name in SERVER_IMPORTS} == EXTRAS["server"] - {"caio"}


@pytest.mark.parametrize("layer", sorted(ONLY_WHEN_USED))
def test_a_client_layer_imports_server_packages_only_inside_functions(layer: str) -> None:
    for path in modules():
        if layer_of(path) == layer:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            at_the_top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            for node in at_the_top:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
                assert not {name.split(".")[0] for name in names} & ONLY_WHEN_USED[layer], path


OF_EXTRAS = {*SERVER_IMPORTS, *CONSOLE_IMPORTS, "caio", "pydantic", "starlette", *NEEDS_SPARK}
WITHOUT = f"""
import sys
# From now on importing one of these is an error, as it is where they are not installed.
sys.modules.update(dict.fromkeys({sorted(OF_EXTRAS)}))
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_client_and_every_command_can_be_imported_without_the_extras() -> None:
    wanted = [path for path in modules() if layer_of(path) in CLIENT_LAYERS]
    names = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in wanted]
    code = "import importlib\nfor name in sys.argv[1:]: importlib.import_module(name.removesuffix('.__init__'))"
    done = python(code, *names)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        ("serve", "braid serve"),
        ("up", "braid up"),
        ("token create --role ops --secret-file secret", "braid token create"),
        ("backup file --data .", "braid backup"),
        ("restore file --data .", "braid restore"),
        ("doctor --no-cluster --metadata sqlite:x", "braid doctor --metadata and --storage"),
        ("bench publish", "braid bench without --url starts a broker, which"),
    ],
)
def test_without_the_server_one_sentence_says_what_to_install(arguments: str, subject: str, tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r})\nfrom braid.cli.main import main; main(sys.argv[1:])"
    done = python(code, *arguments.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"braid: {subject} needs packages that are not installed ({', '.join(SERVER_IMPORTS)}): "
        "run `pip install 'braidmq[server]'`\n"
    )
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_without_the_console_one_sentence_says_what_to_install() -> None:
    done = python("from braid.cli.main import main; main(sys.argv[1:])", "console")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"braid: braid console needs packages that are not installed ({', '.join(CONSOLE_IMPORTS)}): "
        "run `pip install 'braidmq[console]'`\n"
    )


@pytest.mark.parametrize(
    "command", ["serve", "up", "console", "token", "topic", "produce", "consume", "pipeline", "bench"]
)
def test_help_needs_no_extra(command: str) -> None:
    done = python("from braid.cli.main import main; main(sys.argv[1:])", command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: braid {command}")


def test_without_obstore_one_sentence_says_what_to_install() -> None:
    done = python("import braid.storage.objects.urls")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "needs obstore" in last
    for extra in ("history", "spark", "server"):
        assert f"pip install 'braidmq[{extra}]'" in last


@pytest.mark.parametrize(
    "module", ["braid.client.consuming.queue", "braid.client.producing.producer", "braid.scan.history"]
)
def test_a_client_starts_without_pandas(module: str) -> None:
    """Arrow imports pandas, if it is there, when an array is made of a list. That takes longer than all of Braid."""
    script = f"import sys, {module}; sys.exit('pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
