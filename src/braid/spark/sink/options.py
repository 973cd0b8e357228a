"""The options of a write, `.option(…)`, checked once, on the driver."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, Self

import msgspec

from braid.client.client import DEFAULT_TIMEOUT_S
from braid.model.batch.identity import MAX_ERA
from braid.model.errors import InvalidArgument
from braid.spark.source.options import broker_url, named_options, timeout_seconds, topic_path, trust, wrong_value

NAMES: Final = (
    "url",
    "token",
    "tls",
    "timeout",
    "topic",
    "compression",
    "txnAppId",
    "txnVersion",
    "ordering",
    "verifyInput",
)
SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of the query that Spark passes on to the sink."""
ARRIVAL: Final = "arrival"
CONTENT: Final = "content"
_MAX_APP: Final = 256


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    token: str = ""
    tls: bool | str = False
    """Whether to use TLS with the system's authorities, or the path of a file of authorities to trust."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long the client retries while segments move and brokers restart or cannot be reached."""
    topic: str = ""
    """Its path, for rows without a topic; empty: each row names its topic."""
    compression: str | None = None
    txn_app: str = ""
    """The identity of the writer; with `txn_version`, of this write, which is made only once. Empty: a new identity."""
    txn_version: int = 0
    ordering: str = ARRIVAL
    """The order in which a task writes its rows: by arrival or by content."""
    verify_input: bool = True
    """Whether a task asks Spark's worker at the end if it got all of its rows (input.py)."""

    @classmethod
    def parse(cls, given: Mapping[str, str], *, streaming: bool) -> Self:
        values = named_options({name: given[name] for name in given if name.lower() not in SPARKS_OWN}, NAMES)
        txn = [name for name in ("txnAppId", "txnVersion") if name in values]
        if txn and streaming:
            raise InvalidArgument(
                f"option {txn[0]} was given: a streaming query writes under its own id and batch id; use it in batch "
                f"writes, as those of foreachBatch"
            )
        if len(txn) == 1:
            raise InvalidArgument(f"option {txn[0]} was given alone: txnAppId and txnVersion belong together")
        return cls(
            url=broker_url(values.get("url")),
            token=values.get("token", os.environ.get("BRAID_TOKEN", "")),
            tls=trust(values.get("tls")),
            timeout_s=timeout_seconds(values.get("timeout")),
            topic=topic_path(values["topic"]) if "topic" in values else "",
            compression=_one_of("compression", values.get("compression"), ("none", "lz4", "zstd")),
            txn_app=_app(values.get("txnAppId")),
            txn_version=_version(values.get("txnVersion")),
            ordering=_one_of("ordering", values.get("ordering"), (ARRIVAL, CONTENT)) or ARRIVAL,
            verify_input=_one_of("verifyInput", values.get("verifyInput"), ("true", "false")) != "false",
        )


def _one_of(name: str, value: str | None, known: tuple[str, ...]) -> str | None:
    if value is None:
        return None
    if value.lower() not in known:
        wrong_value(name, value, f"{', '.join(known[:-1])} or {known[-1]}")
    return value.lower()


def _app(value: str | None) -> str:
    if value is None:
        return ""
    if not 0 < len(value) <= _MAX_APP:
        wrong_value("txnAppId", value, f"a name of 1 to {_MAX_APP} characters")
    return value


def _version(value: str | None) -> int:
    if value is None:
        return 0
    if not value.isascii() or not value.isdigit() or int(value) > MAX_ERA:
        wrong_value("txnVersion", value, f"a whole number from 0 to {MAX_ERA}")
    return int(value)
