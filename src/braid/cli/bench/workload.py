"""The orders to a benchmark's worker process and its reports: one line of JSON in, lines of JSON out."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

import msgspec

from braid.cli.target import Target

SLOT_NS: Final = 10_000_000
SHARES: Final = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "worst": 1.0}


class Mode(Enum):
    """How a producer is used."""

    SEND_MANY = "send_many"
    """Several tasks on one producer; each call sends a list of values."""
    SEND_TABLE = "send_table"
    """The same with Arrow tables."""
    SEND = "send"
    """Several tasks on one producer; each sends one record and waits for its confirm."""
    SUBMIT = "submit"
    """One task that does not wait for each record."""
    SINGLE = "single"
    """As `send`, but every task has its own producer, so that no two records share a batch."""


DEFAULT_TASKS: Final = {Mode.SEND_MANY: 2, Mode.SEND_TABLE: 2, Mode.SEND: 2_000, Mode.SUBMIT: 1, Mode.SINGLE: 64}


class Form(Enum):
    """The form in which a consumer takes records."""

    ARROW = "arrow"
    """Tables of all columns."""
    VALUES = "values"
    """Lists of the values' bytes."""
    MESSAGES = "messages"
    """Lists of message objects."""
    EACH = "each"
    """`async for message in consumer`."""


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    target: Target
    topic: str
    mode: Mode
    records: int
    size: int
    batch_bytes: int
    tasks: int
    warm_up: bool = True
    """Whether additional records are sent before the clock starts."""


class Consume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    target: Target
    topic: str
    subscription: str
    records: int
    form: Form


class LatencySend(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send single records on schedule, even when earlier records are late. Each record holds its due time."""

    target: Target
    topic: str
    rate: float
    duration_s: float
    size: int


class LatencyReceive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    target: Target
    topic: str
    subscription: str
    records: int
    warm_up_records: int
    """The first records, which do not count."""


class SteadySend(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send numbered records at a steady rate until SIGTERM."""

    target: Target
    topic: str
    rate: float
    size: int
    keys: int = 1
    """With more than one, record n has the key of number n modulo `keys`; with one, records have no key."""


class SteadyReceive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Receive these records until the last one has arrived."""

    target: Target
    topic: str
    subscription: str
    keys: int = 1


class QueueConsume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Receive messages of a queue and ack each of them."""

    target: Target
    topic: str
    subscription: str
    messages: int
    prefetch: int
    waits: bool
    """Whether `prefetch` tasks wait for each ack; otherwise one task submits its acks."""


class QueueReturn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Return messages of a queue on schedule, and ack them when they come again."""

    target: Target
    topic: str
    subscription: str
    rate: float
    duration_s: float


class QueueHold(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Receive messages of a queue, keep some of them, ack the others, and hold on until the process is ended."""

    target: Target
    topic: str
    subscription: str
    messages: int
    stride: int
    """One message in so many is kept, so the acked ones are ranges; 1: all are kept."""
    last: int
    """So many messages at the end are kept, too."""

    def keeps(self, number: int) -> bool:
        return number % self.stride == 0 or number >= self.messages - self.last

    @property
    def kept(self) -> int:
        return sum(map(self.keeps, range(self.messages)))


Work = (
    Publish
    | Consume
    | LatencySend
    | LatencyReceive
    | SteadySend
    | SteadyReceive
    | QueueConsume
    | QueueReturn
    | QueueHold
)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker is connected, and the measurement begins."""


class ProgressReport(msgspec.Struct, frozen=True, tag=True):
    records: int


class Steady(msgspec.Struct, frozen=True):
    """The outcome of records that were sent at a steady rate."""

    lost: int = 0
    twice: int = 0
    errors: int = 0
    """Errors that the application saw."""
    waited_ms: dict[int, float] = {}
    """For each slot of time (monotonic ns // SLOT_NS): how long the slowest record that was due in it took to be
    confirmed, or received."""

    def longest_ms(self, first_ns: int, last_ns: int) -> float:
        """Return the longest wait of records that were due in this time."""
        slots = range(first_ns // SLOT_NS, last_ns // SLOT_NS + 1)
        return max((self.waited_ms.get(slot, 0.0) for slot in slots), default=0.0)


class Done(msgspec.Struct, frozen=True, tag=True):
    records: int
    value_bytes: int
    seconds: float
    cpu_s: float
    """The processor time of the worker's process in that time."""
    latency_ms: dict[str, float] = {}
    """By the names of `SHARES`. Publishing: from the call to its confirm. Latency: from the due time of the record
    until the consumer has it."""
    steady: Steady | None = None

    @property
    def rate(self) -> float:
        return self.records / self.seconds


class Failed(msgspec.Struct, frozen=True, tag=True):
    message: str


Told = Ready | ProgressReport | Done | Failed


def percentiles_ms(taken_ns: Sequence[int]) -> dict[str, float]:
    if not taken_ns:
        return {}
    ordered = sorted(taken_ns)
    return {name: ordered[int((len(ordered) - 1) * share)] / 1e6 for name, share in SHARES.items()}
