"""`braid serve` and `braid up`: how brokers start, what they refuse, how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from braid.testing.processes import BRAID, BrokerProcess
from tests.kits.commands import ask, environment, lines, run, run_to_end, started
from tests.kits.tls_files import make_certificate
from tests.kits.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.processes


def test_serve_says_where_it_is_when_it_is_ready_and_stops_in_order(tmp_path: Path) -> None:
    command = [*BRAID, "serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        try:
            assert process.stdout is not None
            printed = [process.stdout.readline().decode().strip() for _ in range(4)]
            assert printed[0] == "Braid broker broker-1 is ready."
            address = re.fullmatch(r"clients +braid://127\.0\.0\.1:(\d+)", printed[1])
            assert address is not None
            socket.create_connection(("127.0.0.1", int(address[1]))).close()
            admin = re.fullmatch(r"admin +http://127\.0\.0\.1:(\d+)", printed[2])
            assert admin is not None
            socket.create_connection(("127.0.0.1", int(admin[1]))).close()
            assert printed[3].endswith(str(tmp_path / "data"))
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def test_serve_says_what_clients_connect_to_where_it_listens_on_every_address(tmp_path: Path) -> None:
    options = ("--listen", "0.0.0.0:0", "--admin", "127.0.0.1:0", "--advertise", "braid.example:7000")
    command = [*BRAID, "serve", "--data", str(tmp_path / "data"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            said = process.stdout.readline().decode().strip()
            assert re.fullmatch(r"clients +braid://braid\.example:7000 \(it listens on 0\.0\.0\.0:\d+\)", said), said
        finally:
            process.kill()


def test_serve_imports_nothing_that_opens_batches_draws_tables_or_answers_http(tmp_path: Path) -> None:
    python = (sys.executable, "-X", "importtime", "-m", "braid.cli.main")
    with BrokerProcess(tmp_path / "data", braid=python) as broker:
        assert broker.stop() == 0
    imported = set(re.findall(r"\| +([\w.]+)$", broker.log_path.read_text(), flags=re.MULTILINE))
    assert "braid.broker.broker" in imported
    unwanted = {"pyarrow", "numpy", "rich", "fastapi", "pydantic", "starlette", "uvicorn", "prometheus_client"}
    assert not {name.partition(".")[0] for name in imported} & unwanted


def test_everything_is_there_again_after_an_orderly_stop(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        run(broker.url, "topic", "create", "orders", "--segments", "2")
        run(broker.url, "produce", "orders", given=b"a\nb\nc\nd\n")
        assert sorted(lines(broker.url, "consume", "orders", "-s", "s", "--count", "3")) != []
        assert broker.stop() == 0
    with BrokerProcess(tmp_path / "data") as broker:
        assert len(lines(broker.url, "consume", "orders", "-s", "s")) == 1
        assert sorted(lines(broker.url, "consume", "orders", "-s", "again")) == [b"a", b"b", b"c", b"d"]
        assert broker.stop() == 0


def refused(*arguments: str) -> str:
    """The one line that `braid serve` ends with. Its log lines, which stand before it, have a time in front."""
    done = subprocess.run(
        [*BRAID, "serve", "--log-level", "error", *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith("braid: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


FREE = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")


def test_a_second_broker_on_one_data_folder_is_refused(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        assert "is used by another broker" in refused("--data", str(tmp_path / "data"), *FREE)
        assert ask(broker.url, "topic", "list") == []


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refused("--data", str(tmp_path / "data"), "--listen", address, "--admin", "127.0.0.1:0")
        assert f"cannot listen on {address}" in said
        said = refused("--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--admin", address)
        assert f"cannot listen on {address} for admin" in said


def test_an_admin_port_that_is_taken_is_noticed_before_anything_is_opened(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused("--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--admin", address)
    assert not (tmp_path / "data").exists()


def test_brokers_are_listed_with_the_ports_that_they_really_have(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        (listed,) = ask(broker.url, "broker", "list")
        assert f"braid://{listed['address']}" == broker.url
        assert f"http://{listed['admin']}" == broker.ready["adminUrl"]
        assert not listed["admin"].endswith(":0")


def test_a_folder_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        assert broker.stop() == 0
    mark = tmp_path / "data" / "braid.json"
    mark.write_text(mark.read_text().replace('"format":1', '"format":99'))
    assert "99" in refused("--data", str(tmp_path / "data"), *FREE)


def test_metadata_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    said = refused("--data", str(tmp_path / "data"), "--metadata", f"sqlite:{tmp_path}/none/metadata.db", *FREE)
    assert f"{tmp_path}/none/metadata.db" in said


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("no key")
    config = tmp_path / "broker.toml"
    config.write_text(f'[tls]\ncertificate = "{tmp_path}/key.pem"\nkey = "{tmp_path}/key.pem"\n')
    assert f"{tmp_path}/key.pem" in refused("--data", str(tmp_path / "data"), "--config", str(config), *FREE)
    config.write_text(f'[admin_tls]\ncertificate = "{tmp_path}/none.pem"\nkey = "{tmp_path}/key.pem"\n')
    said = refused("--data", str(tmp_path / "data"), "--config", str(config), *FREE)
    assert f"admin_tls.certificate: {tmp_path}/none.pem cannot be read" in said


# Security.


def test_tokens_and_tls_from_end_to_end(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    secret = tmp_path / "secret"
    run("", "token", "keygen", str(secret))
    config = tmp_path / "broker.toml"
    config.write_text(
        f"""
        [tls]
        certificate = "{certificate}"
        key = "{key}"
        [auth]
        secret_file = "{secret}"
        superusers = ["ops"]
        [[auth.grants]]
        role = "reader"
        on = "public/default/orders"
        allow = ["consume"]
        """
    )
    ops, reader = (
        run("", "token", "create", "--role", role, "--expires", "1h", "--secret-file", str(secret)).strip()
        for role in ("ops", "reader")
    )
    with BrokerProcess(tmp_path / "data", "--config", str(config)) as broker:
        ca = ("--tls-ca", str(certificate))
        assert "token" in run(broker.url, "topic", "list", *ca, code=1)
        assert "if it speaks TLS, name the authority" in run(broker.url, "topic", "list", code=1)
        (tmp_path / "other").mkdir()
        other, _ = make_certificate(tmp_path / "other")
        refused = run(broker.url, "topic", "list", "--tls-ca", str(other), code=1)
        assert "is not trusted" in refused
        assert "name the authority that signed it by --tls-ca" in refused
        for options, why in (
            (ca, "this broker requires a token"),
            ((), "broker"),
            (("--tls-ca", str(other)), "broker"),
        ):
            said = " ".join(run_to_end(broker.url, "doctor", *options).stdout.decode().split())
            assert f"{broker.url} answers, but cannot be used: {why}" in said
        run(broker.url, "topic", "create", "orders", *ca, "--token", ops)
        run(broker.url, "produce", "orders", *ca, "--token", ops, given=b"secret\n")
        assert "may not" in run(broker.url, "produce", "orders", *ca, "--token", reader, given=b"x\n", code=1)
        assert lines(broker.url, "consume", "orders", "-s", "s", *ca, "--token", reader) == [b"secret"]
        assert "may not" in run(broker.url, "topic", "delete", "orders", "--yes", *ca, "--token", reader, code=1)


# Several brokers.


@contextmanager
def cluster(data: Path, brokers: int, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], list[dict[str, Any]]]]:
    command = ["up", "--brokers", str(brokers), "--data", str(data), "--port", "0", "--admin-port", "0", *more]
    with started("", *command, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        text = b""
        while line := process.stdout.readline():
            text += line
            if line == b"]\n":
                break
        yield process, json.loads(text)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_up_runs_one_cluster_and_stops_all_of_it(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as (process, brokers):
        assert [each["id"] for each in brokers] == ["broker-0", "broker-1"]
        first, second = (each["url"] for each in brokers)
        run(first, "topic", "create", "orders", "--segments", "2")
        run(second, "produce", "orders", given=b"x\n")
        assert lines(first, "consume", "orders", "-s", "s") == [b"x"]
        owners = json.loads(run(second, "topic", "stats", "orders", "--json"))["segments"].values()
        assert {each["owner"] for each in owners} == {"broker-0", "broker-1"}
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert re.search(rb"^broker-0 \| ", errors, flags=re.MULTILINE)
        assert not any(alive(each["pid"]) for each in brokers)
    with cluster(tmp_path, 2) as (_, brokers):
        assert lines(brokers[0]["url"], "consume", "orders", "-s", "again") == [b"x"]


def test_up_runs_a_console_beside_its_brokers(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, "--console", "--console-port", "0") as (process, (broker, console)):

        def shows_the_broker() -> bool:
            with urllib.request.urlopen(console["console"], timeout=WAIT_S) as page:
                return b"broker-0" in page.read()

        wait_until(shows_the_broker, "the page shows the broker")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert not alive(broker["pid"])
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(console["console"], timeout=WAIT_S)


def test_up_refuses_the_folder_of_brokers_that_did_not_share_topics_and_serve_opens_it(tmp_path: Path) -> None:
    folder = tmp_path / "broker-0"
    with BrokerProcess(folder, "--id", "broker-0") as broker:
        run(broker.url, "topic", "create", "orders")
    said = run("", "up", "--data", str(tmp_path), "--port", "0", "--admin-port", "0", code=1)
    assert f"`braid serve --id broker-0 --data {folder}`" in said
    with BrokerProcess(folder, "--id", "broker-0") as broker:
        assert "orders" in run(broker.url, "topic", "list")


def test_up_and_serve_refuse_the_folder_of_each_other(tmp_path: Path) -> None:
    """Their brokers would find topics whose records belong to a broker that is not there."""
    with BrokerProcess(tmp_path / "one") as broker:
        run(broker.url, "topic", "create", "orders")
    said = run("", "up", "--data", str(tmp_path / "one"), "--port", "0", "--admin-port", "0", code=1)
    assert f"{tmp_path / 'one'} belongs to a single broker of `braid serve`" in said
    assert not (tmp_path / "one" / "broker-0").exists()
    with cluster(tmp_path / "several", 1) as (process, _):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
    free = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
    assert "belongs to the brokers of `braid up`" in refused("--data", str(tmp_path / "several"), *free)
    assert not (tmp_path / "several" / "braid.json").exists()
    with BrokerProcess(
        tmp_path / "several" / "broker-0", "--id", "broker-0", "--metadata", f"sqlite:{tmp_path}/several/metadata.db"
    ):
        pass


def test_up_starts_a_broker_again_that_dies_and_says_so(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as (process, brokers):
        assert process.stderr is not None
        run(brokers[1]["url"], "topic", "create", "orders", "--segments", "2")
        os.kill(brokers[1]["pid"], signal.SIGKILL)
        said = list(iter(process.stderr.readline, b"braid: broker-1 is ready again\n"))
        assert b"braid: broker-1 was ended by SIGKILL; it starts again in 0.5 s\n" in said
        assert alive(brokers[0]["pid"])
        run(brokers[1]["url"], "produce", "orders", given=b"x\n")
        assert lines(brokers[1]["url"], "consume", "orders") == [b"x"], "it listens where it did before"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0


def test_brokers_do_not_outlive_an_up_that_was_killed(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as (process, brokers):
        process.kill()
        process.wait(WAIT_S)
        wait_until(lambda: not alive(brokers[0]["pid"]), "the broker has ended")


def test_up_says_why_it_cannot_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = run("", "up", "--brokers", "1", "--data", str(tmp_path), "--port", port, "--admin-port", "0", code=1)
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert said.splitlines()[-1].startswith("braid: broker-0 did not start")
