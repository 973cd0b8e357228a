"""Every program in docs/client.md runs, in order, against real brokers, and prints what the page says."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest

from braid.client import admin, client
from braid.client.consuming import channel, stream
from braid.client.producing import departure, producer
from braid.client.producing import open_batch as batcher
from braid.client.producing import segment_writer as writer
from braid.client.producing.options import ProducerOptions
from braid.model.batch.header import MAX_BODY_BYTES
from tests.kits.forked_broker import ForkedBroker
from tests.kits.page_programs import compiled, programs, run
from tests.kits.tls_files import make_certificate

pytestmark = pytest.mark.processes


PAGE = Path(__file__).parents[2] / "docs" / "client.md"
OPEN_URL, TLS_URL = "braid://127.0.0.1:6660", "braid://127.0.0.1:6663"
TIMEOUT_S = 120
"""For all programs together: far above the few seconds that they take."""


@pytest.fixture
def urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Two brokers, the second with TLS and tokens; the files that the page's programs read are in the folder."""
    certificate, key = make_certificate(tmp_path)
    secret = "not very secret, but 32 bytes long"
    (tmp_path / "secret").write_text(secret)
    (tmp_path / "authorities.pem").write_bytes(certificate.read_bytes())
    (tmp_path / "token").write_text(jwt.encode({"sub": "ops"}, secret, "HS256") + "\n")
    (tmp_path / "tls.toml").write_text(
        f'[tls]\ncertificate = "{certificate}"\nkey = "{key}"\n'
        f'[auth]\nsecret_file = "{tmp_path}/secret"\nsuperusers = ["ops"]\n'
    )
    monkeypatch.chdir(tmp_path)
    with (
        ForkedBroker(tmp_path / "open") as plain,
        ForkedBroker(tmp_path / "closed", "--config", str(tmp_path / "tls.toml")) as secured,
    ):
        yield {OPEN_URL: plain.url, TLS_URL: secured.url}


def test_every_program_runs_and_prints_what_the_page_says(urls: dict[str, str]) -> None:
    async def all_of_them() -> None:
        namespace: dict[str, Any] = {}
        async with asyncio.timeout(TIMEOUT_S):
            for program in programs(PAGE):
                said = await run(compiled(program, urls), namespace)
                assert said.splitlines() == program.promised, str(program)

    asyncio.run(all_of_them())


def test_defaults_in_the_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, flags=re.MULTILINE))
    options = ProducerOptions()
    assert rows["timeout"] == "the client's"
    assert f"| `timeout` | {client.DEFAULT_TIMEOUT_S:g} s |" in page
    assert rows["linger"] == f"{options.linger_s:g} s"
    assert rows["max_batch_bytes"] == f"{options.max_batch_bytes >> 20} MiB"
    assert rows["max_batch_records"] == f"{options.max_batch_records:,}"
    assert rows["compression"] == "none"
    assert options.compression is None
    assert rows["max_in_flight_bytes"] == f"{options.max_in_flight_bytes >> 20} MiB"
    taken = set(inspect.signature(client.Client.producer).parameters) - {"self", "topic"}
    assert taken <= set(rows)
    assert set(inspect.signature(client.connect).parameters) - {"network", "clock", "random"} <= set(rows)


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    words = {5: "five", 8: "eight"}
    assert f"while {words[writer.MAX_BATCHES_IN_FLIGHT]} batches of a segment are under way" in page
    assert f"{1_000 * departure.ANSWER_WAIT_S:g} ms at most" in page
    assert f"{words[producer.SUBMIT_ROOM]} times as much" in page
    assert f"have {words[int(stream.RELEASE_GRACE_S)]} seconds to ack" in page
    assert MAX_BODY_BYTES - 1_024 == (32 << 20) - 1_024
    assert "at most 32 MiB less 1 KiB" in page
    assert f"an offset of {batcher.UNKNOWN_OFFSET}:".replace("-", "−") in page.lower()
    window = f"({channel.DEFAULT_WINDOW_BYTES >> 20} MiB; {channel.MIN_WINDOW_BYTES >> 10} KiB to "
    assert f"{window}{channel.MAX_WINDOW_BYTES >> 30} GiB)" in page


def test_every_method_of_admin_is_named() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Administer")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    methods = {name for name in vars(admin.Admin) if not name.startswith("_")}
    assert methods <= named
