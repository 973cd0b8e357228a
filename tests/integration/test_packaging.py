"""The distribution as users get it: built, installed into empty environments, and used from there.

One environment has the client alone, the other has a broker. pip takes the packages from the index that it is
configured for, in the versions of constraints.txt.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from braid.cli.extras import SERVER_IMPORTS
from braid.testing.processes import BrokerProcess

ROOT = Path(__file__).parents[2]
INSTALL_S = 240
"""Far above what a build or an installation takes (10 to 25 s), for machines that do much else."""

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("packaging")]


def run(*command: object, folder: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    # Nothing of the checkout, or of a broker that a variable names, may show in the environments.
    hidden = ("PYTHONPATH", "PYTHONHOME", "BRAID_", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return subprocess.run(
        [str(each) for each in command],
        cwd=folder,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )


def succeed(*command: object, folder: Path | None = None, stdin: str = "") -> str:
    done = run(*command, folder=folder, stdin=stdin)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def checkout() -> set[str]:
    """The files of the checkout that git tracks, or would track."""
    listed = succeed("git", "ls-files", "--cached", "--others", "--exclude-standard", folder=ROOT).splitlines()
    return {name for name in listed if (ROOT / name).exists()}


class Built(NamedTuple):
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The source archive of this checkout, and the wheel that is built from that archive."""
    dist = tmp_path_factory.mktemp("dist")
    succeed(sys.executable, "-m", "build", "--outdir", dist, ROOT, folder=dist)
    (wheel,) = dist.glob("braidmq-*-py3-none-any.whl")
    (sdist,) = dist.glob("braidmq-*.tar.gz")
    return Built(wheel, sdist)


class Environment:
    """An empty virtual environment with one distribution and its dependencies. Those that `base` has are taken from
    there: unpacking Arrow and numpy takes pip some seconds."""

    def __init__(self, folder: Path, wheel: Path, extra: str = "", base: Environment | None = None) -> None:
        self.python = folder / "bin" / "python"
        self.braid = folder / "bin" / "braid"
        succeed(sys.executable, "-m", "venv", "--without-pip", folder)
        (self.site,) = folder.glob("lib/python*/site-packages")
        for package in base.site.iterdir() if base is not None else ():
            if not package.name.startswith(("braid", "pyspark_braid")):
                (self.site / package.name).symlink_to(package)
        wanted = f"braidmq{extra} @ {wheel.as_uri()}"
        constraints = ROOT / "constraints.txt"
        pip = (sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-compile")
        succeed(*pip, "--constraint", constraints, wanted, folder=folder)

    def packages(self) -> set[str]:
        code = "import importlib.metadata as m, json; print(json.dumps([d.name for d in m.distributions()]))"
        return {name.lower().replace("_", "-") for name in json.loads(succeed(self.python, "-c", code))}


@pytest.fixture(scope="module")
def client(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("client"), built.wheel)


@pytest.fixture(scope="module")
def server(built: Built, client: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("server"), built.wheel, "[server]", base=client)


def test_the_wheel_holds_the_package_its_files_and_its_licence(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = wheel.read(metadata).decode().partition("\n\n")[0].splitlines()
    sources = {name.removeprefix("src/") for name in checkout() if name.startswith("src/")}
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {"Name: braidmq", "License-Expression: Apache-2.0"} <= set(fields)
    assert {"Provides-Extra: server", "Provides-Extra: etcd", "Provides-Extra: spark"} <= set(fields)


def test_the_source_archive_holds_what_a_checkout_holds(built: Built) -> None:
    """Except what only the repository's host reads."""
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    hidden = {name for name in checkout() if name.startswith((".ci/", ".github/"))}
    assert names - {"PKG-INFO"} == checkout() - hidden


def test_the_client_alone_brings_nothing_of_the_server(client: Environment, server: Environment) -> None:
    without, more = client.packages(), server.packages()
    assert without < more
    assert {"apsw", "caio", "fastapi", "obstore", "prometheus-client", "pyjwt", "uvicorn"} <= more - without
    found = f"from importlib.util import find_spec; print([n for n in {SERVER_IMPORTS} if find_spec(n)])"
    assert succeed(client.python, "-c", found) == "[]\n"
    assert succeed(server.python, "-c", found) == f"{list(SERVER_IMPORTS)}\n"


READ_ONLY = """
set -e
if mount --make-rprivate / 2>/dev/null; then
    mount --bind "$DATA" "$DATA"
    mount --bind "$CODE" "$CODE"
    mount -o remount,bind,ro "$CODE"
    mount -t tmpfs -o ro tmpfs /tmp
    mount -o remount,bind,ro /
fi
if [ "$(id -u)" = 0 ]; then
    exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all -- "$@"
fi
exec "$@"
"""
"""Leaves nothing to write but the data folder. Where namespaces are not allowed, the user's missing rights do that."""


def test_a_broker_needs_no_rights_and_writes_only_its_data(server: Environment) -> None:
    """As in the image of deploy/docker: another user, a read-only root, no home, no temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="braid-image-", dir="/var/tmp"))
    try:
        folder.chmod(0o755)
        code, volume = folder / "code", folder / "volume"
        succeed(sys.executable, "-m", "venv", "--without-pip", code)
        (site,) = code.glob("lib/python*/site-packages")
        succeed("cp", "-rL", *sorted(server.site.iterdir()), site)
        volume.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(volume, 10001, 10001)
        isolated = run("unshare", "--mount", "true").returncode == 0
        shell = ["sh", "-c", READ_ONLY, "sh", str(code / "bin" / "python"), "-m", "braid.cli.main"]
        clean = [
            "env",
            "--ignore-environment",
            f"DATA={volume}",
            f"CODE={code}",
            "HOME=/nonexistent",
            "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        ]
        before = sorted(code.rglob("*"))
        broker = BrokerProcess(volume / "data", braid=[*clean, *(["unshare", "--mount"] if isolated else []), *shell])
        with broker:
            if os.geteuid() == 0:
                status = Path(f"/proc/{broker.pid}/status").read_text()
                assert "Uid:\t10001\t10001" in status
                assert "CapEff:\t0000000000000000" in status
            succeed(server.braid, "--url", broker.url, "topic", "create", "orders")
            succeed(server.braid, "--url", broker.url, "produce", "orders", stdin="one\ntwo\n")
            assert succeed(server.braid, "--url", broker.url, "consume", "orders") == "one\ntwo\n"
            with urllib.request.urlopen(f"{broker.ready['adminUrl']}/metrics", timeout=20) as answer:
                assert b"braid_disk_free_bytes" in answer.read()
            assert broker.stop() == 0
        assert sorted(code.rglob("*")) == before
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("command", ["serve", "up"])
def test_a_broker_without_the_server_says_what_to_install(client: Environment, command: str, tmp_path: Path) -> None:
    done = run(client.braid, command, folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"braid: braid {command} needs packages that are not installed")
    assert done.stderr.endswith("run `pip install 'braidmq[server]'`\n")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import asyncio, sys
import braid, braid.sync

async def main(url):
    async with braid.connect(url) as client:
        async with client.producer("orders") as producer:
            await producer.send(b"from asyncio")
        return await client.admin.list_topics()

print(asyncio.run(main(sys.argv[1])))
with braid.sync.connect(sys.argv[1]) as client:
    with client.producer("orders") as producer:
        producer.send(b"from threads")
    with client.stream_consumer("orders", subscription="program", start="earliest") as consumer:
        print([consumer.receive(timeout=10).value for _ in range(4)])
"""


def test_a_client_alone_publishes_and_reads_through_a_broker_from_the_wheel(
    client: Environment, server: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with BrokerProcess(tmp_path / "data", braid=[str(server.braid)]) as broker:
        braid = (client.braid, "--url", broker.url)
        said = succeed(*braid, "topic", "create", "orders", folder=tmp_path)
        assert said == "Created topic public/default/orders with 1 segment.\n"
        assert "public/default/orders" in succeed(*braid, "topic", "list", folder=tmp_path)
        succeed(*braid, "produce", "orders", folder=tmp_path, stdin="one\ntwo\n")
        assert succeed(*braid, "consume", "orders", "-s", "shell", "--count", "2", folder=tmp_path) == "one\ntwo\n"
        assert succeed(client.python, "-c", PROGRAM, broker.url, folder=tmp_path).splitlines() == [
            "['topic://public/default/orders']",
            "[b'one', b'two', b'from asyncio', b'from threads']",
        ]
        # The pages of the admin port are files of the wheel.
        for page in ("", "docs", "healthz"):
            with urllib.request.urlopen(f"{broker.ready['adminUrl']}/{page}", timeout=30) as answer:
                assert answer.status == 200
                assert answer.read()
        assert broker.stop() == 0
