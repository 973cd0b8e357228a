"""Kafka nodes that a benchmark starts: each is a broker and a controller (KRaft), on free ports of this machine, in a
folder that is deleted with them.

The folder KAFKA_HOME holds a Kafka 4: its `libs` have all the JARs. The nodes run by `java` without Kafka's scripts,
with the options of these scripts, but a smaller heap.
"""

from __future__ import annotations

import base64
import importlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.kafka_worker import client_settings
from benchmarks.peer_servers import free_port, package_absent

HEAP: Final = "512m"
JVM_OPTIONS: Final = (
    f"-Xms{HEAP}",
    f"-Xmx{HEAP}",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-Djava.awt.headless=true",
)
PATIENCE_S: Final = 120.0
LOOK_S: Final = 0.02
ANSWER_S: Final = 5.0
_SERVER_JAR: Final = re.compile(r"kafka_2\.\d+-(\d+\.\d+\.\d+)\.jar")


# Which Kafka is there.


def version_among(names: Iterable[str]) -> str:
    """Return the version of the Kafka server whose JAR is among these files; empty if there is none."""
    return next((found[1] for name in names if (found := _SERVER_JAR.fullmatch(name)) is not None), "")


def kafka_absent(environment: Mapping[str, str]) -> str:
    """Return why Kafka cannot be measured; empty if it can."""
    home = environment.get("KAFKA_HOME")
    if not home:
        return "KAFKA_HOME names no folder with a Kafka 4"
    version = version_among(path.name for path in Path(home, "libs").glob("*.jar"))
    if not version.startswith("4."):
        return f"KAFKA_HOME is {home}, whose folder libs has no JAR of a Kafka 4 server"
    if shutil.which("java", path=environment.get("PATH")) is None:
        return "there is no java in the path"
    return package_absent("confluent_kafka")


def home_version(home: Path) -> str:
    return version_among(path.name for path in (home / "libs").glob("*.jar"))


# How a node is started.


class Ports(NamedTuple):
    broker: int
    controller: int


def node_settings(node: int, ports: Mapping[int, Ports], folder: Path, session_timeout_s: float) -> dict[str, str]:
    """Return the settings of one node among these. Settings that are not here have Kafka's defaults."""
    own = ports[node]
    return {
        "process.roles": "broker,controller",
        "node.id": str(node),
        "controller.quorum.voters": ",".join(f"{each}@127.0.0.1:{ports[each].controller}" for each in ports),
        "listeners": f"PLAINTEXT://127.0.0.1:{own.broker},CONTROLLER://127.0.0.1:{own.controller}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": str(folder / "data"),
        "auto.create.topics.enable": "false",
        "broker.session.timeout.ms": str(round(session_timeout_s * 1_000)),
    }


def topic_settings(confirm: int, *, fsync: bool) -> dict[str, str]:
    """Return the settings of a topic that this many replicas must have. With `fsync` each of them syncs every batch
    (the topic's form of `log.flush.interval.messages`)."""
    return {"min.insync.replicas": str(confirm)} | ({"flush.messages": "1"} if fsync else {})


def properties_text(settings: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def java_command(home: Path, program: str, *arguments: str) -> list[str]:
    return ["java", *JVM_OPTIONS, "-cp", f"{home}/libs/*", program, *arguments]


class KafkaNode:
    """A Kafka process. `end` kills it if it runs."""

    def __init__(self, home: Path, folder: Path, settings: Mapping[str, str]) -> None:
        self._home = home
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        self._properties = folder / "server.properties"
        self._properties.write_text(properties_text(settings), encoding="utf-8")

    def format(self, cluster_id: str) -> None:
        """Prepare the node's data folder."""
        arguments = ("format", "--cluster-id", cluster_id, "--config", str(self._properties))
        command = java_command(self._home, "kafka.tools.StorageTool", *arguments)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S, text=True)
        if done.returncode:
            raise SystemExit(f"Kafka could not format its folder: {done.stdout.strip()[-500:]}")

    def start(self) -> None:
        command = java_command(self._home, "kafka.Kafka", str(self._properties))
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


class KafkaCluster:
    def __init__(self, home: Path, folder: Path, count: int, session_timeout_s: float) -> None:
        self.ports: Final = {node: Ports(free_port(), free_port()) for node in range(1, count + 1)}
        self.nodes: Final = {
            node: KafkaNode(
                home,
                folder / f"node-{node}",
                node_settings(node, self.ports, folder / f"node-{node}", session_timeout_s),
            )
            for node in self.ports
        }
        self._client: Any = importlib.import_module("confluent_kafka.admin")
        # A call ends when its client is collected, so the cluster keeps this client.
        self._admin = self._admin_of(self.servers())

    def servers(self, without: int | None = None) -> str:
        return ",".join(f"127.0.0.1:{ports.broker}" for node, ports in self.ports.items() if node != without)

    def start(self) -> None:
        cluster_id = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")
        # A leading "-" would look like an option.
        cluster_id = f"b{cluster_id[1:]}"
        for node in self.nodes.values():
            node.format(cluster_id)
        for node in self.nodes.values():
            node.start()
        until(lambda: len(self._admin.list_topics(timeout=ANSWER_S).brokers) == len(self.nodes), "all nodes run")

    def _admin_of(self, servers: str) -> Any:
        return self._client.AdminClient(client_settings(servers))

    def create_topic(self, name: str, confirm: int, *, fsync: bool) -> None:
        """Create a topic of one partition with a replica on each node, and wait for its replicas."""
        settings = topic_settings(confirm, fsync=fsync)
        new = self._client.NewTopic(name, 1, len(self.nodes), config=settings)
        self._admin.create_topics([new], operation_timeout=PATIENCE_S)[name].result(PATIENCE_S)
        self.wait_in_sync(name)

    def delete_topic(self, name: str) -> None:
        self._admin.delete_topics([name], operation_timeout=PATIENCE_S)[name].result(PATIENCE_S)

    def wait_in_sync(self, topic: str) -> None:
        """Return when all replicas of the topic are in sync."""
        until(
            lambda: len(partition(self._admin, topic).isrs) == len(self.nodes), f"{topic} has all its replicas in sync"
        )

    def lose_leader(self, topic: str, *, frozen: bool) -> tuple[int, int]:
        """Kill or freeze the leader of the topic's partition, and start it again. Return when it was lost, and when
        the cluster named another leader."""
        leader: int = partition(self._admin, topic).leader
        node = self.nodes[leader]
        # A frozen node accepts connections and never answers.
        others = self._admin_of(self.servers(without=leader))
        partition(others, topic)
        lost = time.monotonic_ns()
        if frozen:
            os.kill(node.pid, signal.SIGSTOP)
        else:
            node.kill()
        until(lambda: partition(others, topic).leader not in (leader, -1), f"{topic} has another leader")
        gone = time.monotonic_ns()
        node.end()
        node.start()
        return lost, gone


def partition(admin: Any, topic: str) -> Any:
    return admin.list_topics(topic, timeout=ANSWER_S).topics[topic].partitions[0]


def until(condition: Callable[[], bool], wanted: str) -> None:
    """Wait for a condition of Kafka, whose client raises errors while nodes start."""
    kafka: Any = importlib.import_module("confluent_kafka")
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            if condition():
                return
        except (kafka.KafkaException, KeyError):
            pass
        if time.monotonic() > give_up_at:
            raise SystemExit(f"Kafka did not reach this state in {PATIENCE_S:.0f} s: {wanted}")
        time.sleep(LOOK_S)


@contextmanager
def own_kafka(home: Path, count: int, session_timeout_s: float) -> Iterator[KafkaCluster]:
    """Run Kafka in a temporary folder."""
    folder = tempfile.mkdtemp(prefix="kafka-bench-")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        cluster = KafkaCluster(home, Path(folder), count, session_timeout_s)
        for node in cluster.nodes.values():
            stack.callback(node.end)
        cluster.start()
        yield cluster
