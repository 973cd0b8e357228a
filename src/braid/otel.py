"""OpenTelemetry: traces that go through topics. Needs `pip install 'braidmq[otel]'`.

    producer = braid.otel.traced(client.producer("orders"))
    await producer.send(b"…")                            # a span; its context travels in the record's headers

    async for message in consumer:
        with braid.otel.processing(message, subscription="billing"):    # a span, child of the producer's
            …

The context stands in the headers as the propagator of the program writes it: by default `traceparent` and `tracestate`
of W3C. Names and attributes follow OpenTelemetry's conventions for messaging.

Nothing else in Braid knows this module. A program that does not import it pays nothing: not an import, not a branch in
`send`. With it, and without an SDK that records, records get no headers and stay on the producer's fast path.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar, overload

from braid.model.errors import BraidError, NotAvailable
from braid.model.message import Message, MessageId

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import Getter, Setter
    from opentelemetry.trace import Link, Span, SpanKind, Tracer, TracerProvider
except ImportError as missing:
    raise NotAvailable(
        f"traces need OpenTelemetry, which cannot be imported ({missing}): run `pip install 'braidmq[otel]'`"
    ) from missing

if TYPE_CHECKING:
    from braid.client.blocking.producer import BlockingProducer, BlockingReceipt
    from braid.client.producing.open_batch import MessageIds, Receipt
    from braid.client.producing.producer import Producer
    from braid.model.batch.encode import Headers

__all__ = ["TracedBlockingProducer", "TracedProducer", "context_of", "processing", "traced"]

SCOPE: Final = "braid"
MAX_LINKS: Final = 128
"""Of one span, as the SDK's own default (I12)."""
MAX_CONTEXT_BYTES: Final = 8_192
"""Of one header, as W3C's recommendation for baggage. OpenTelemetry logs a longer one as a whole."""

Time = int | datetime.datetime | None
Duration = float | datetime.timedelta | None


class _HeaderSetter(Setter[dict[str, bytes | str]]):
    def set(self, carrier: dict[str, bytes | str], key: str, value: str) -> None:
        carrier[key] = value


class _HeaderGetter(Getter[Mapping[str, bytes]]):
    def get(self, carrier: Mapping[str, bytes], key: str) -> list[str] | None:
        found = carrier.get(key)
        return None if found is None or len(found) > MAX_CONTEXT_BYTES else [found.decode("utf-8", "replace")]

    def keys(self, carrier: Mapping[str, bytes]) -> list[str]:
        return list(carrier)


_SETTER: Final = _HeaderSetter()
_GETTER: Final = _HeaderGetter()


def context_of(message: Message) -> Context:
    """Return the context that a record carries; an empty one if it carries none, or one that cannot be read."""
    return propagate.extract(message.headers, context=Context(), getter=_GETTER)


@contextmanager
def processing(
    delivered: Message | Sequence[Message],
    *,
    subscription: str = "",
    tracer_provider: TracerProvider | None = None,
) -> Iterator[Span]:
    """Trace what a consumer does with a message, or with several of one topic: a span that is current inside the block.

    The span of one message is a child of the span that published it, and has a link to the span that is current here.
    The span of several messages belongs to the current trace, and has a link to each of theirs (128 at most). An error
    that leaves the block is recorded."""
    messages = [delivered] if isinstance(delivered, Message) else list(delivered)
    topic = messages[0].topic if messages else ""
    attributes = _attributes(topic, "process", "process")
    if subscription:
        attributes["messaging.destination.subscription.name"] = subscription
    parent, links = None, []
    if isinstance(delivered, Message):
        attributes["messaging.destination.partition.id"] = str(delivered.segment)
        attributes["messaging.message.id"] = _id_text(delivered.id)
        attributes["messaging.message.body.size"] = len(delivered.value)
        context = context_of(delivered)
        if trace.get_current_span(context).get_span_context().is_valid:
            parent, links = context, _links([trace.get_current_span()])
    else:
        attributes["messaging.batch.message_count"] = len(messages)
        links = _links(trace.get_current_span(context_of(message)) for message in messages)
    tracer = _tracer(tracer_provider)
    with (
        tracer.start_as_current_span(
            f"process {topic}", context=parent, kind=SpanKind.CONSUMER, attributes=attributes, links=links
        ) as span,
        _error_type(span),
    ):
        yield span


@overload
def traced(producer: Producer, *, tracer_provider: TracerProvider | None = None) -> TracedProducer: ...


@overload
def traced(producer: BlockingProducer, *, tracer_provider: TracerProvider | None = None) -> TracedBlockingProducer: ...


def traced(
    producer: Producer | BlockingProducer, *, tracer_provider: TracerProvider | None = None
) -> TracedProducer | TracedBlockingProducer:
    """Return a producer that makes a span of each call and sends the span's context with each record. It takes the same
    calls, asyncio's or blocking ones. `tracer_provider` is the program's own if it is not the global one."""
    from braid.client.producing.producer import Producer

    tracer = _tracer(tracer_provider)
    return (
        TracedProducer(producer, tracer) if isinstance(producer, Producer) else TracedBlockingProducer(producer, tracer)
    )


P = TypeVar("P", "Producer", "BlockingProducer")


class _Traced(Generic[P]):
    """What both producers with spans share: a span for each call, and its context in the headers."""

    def __init__(self, producer: P, tracer: Tracer) -> None:
        self.producer: Final[P] = producer
        """The producer itself, for calls without a span."""
        self._topic = producer.topic.path
        self._tracer = tracer

    @contextmanager
    def _span(self, operation: str, kind: str, attributes: Mapping[str, Any]) -> Iterator[Span]:
        given = {**_attributes(self._topic, operation, kind), **attributes}
        name = f"{operation} {self._topic}"
        with (
            self._tracer.start_as_current_span(name, kind=SpanKind.PRODUCER, attributes=given) as span,
            _error_type(span),
        ):
            yield span

    @contextmanager
    def _sending(
        self, value: bytes | str, headers: Headers | None
    ) -> Iterator[tuple[Headers | None, Callable[[MessageId], None]]]:
        """Yield the headers with the span's context, and how to note where the record was stored."""
        with self._span("send", "send", _size_of(value)) as span:
            yield _injected(headers), partial(_note_id, span)

    @contextmanager
    def _sending_many(self) -> Iterator[Callable[[MessageIds], None]]:
        """Yield how to note that the records were stored."""
        with self._span("send", "send", {}) as span:
            yield lambda ids: span.set_attribute("messaging.batch.message_count", len(ids))

    @contextmanager
    def _submitting(self, value: bytes | str, headers: Headers | None) -> Iterator[Headers | None]:
        with self._span("submit", "create", _size_of(value)):
            yield _injected(headers)


class TracedProducer(_Traced["Producer"]):
    """A `Producer` with spans; `traced` makes it."""

    async def send(
        self,
        value: bytes | str,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: Time = None,
        deliver_after: Duration = None,
        deliver_at: Time = None,
        ttl: Duration = None,
    ) -> MessageId:
        """Publish a record as `Producer.send`, in a span that ends when the record is stored."""
        with self._sending(value, headers) as (given, note):
            id_ = await self.producer.send(value, key, given, timestamp, deliver_after, deliver_at, ttl)
            note(id_)
            return id_

    def submit(
        self,
        value: bytes | str,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: Time = None,
        deliver_after: Duration = None,
        deliver_at: Time = None,
        ttl: Duration = None,
    ) -> Receipt:
        """Publish a record as `Producer.submit`. The span ends immediately: it does not wait for the record."""
        with self._submitting(value, headers) as given:
            return self.producer.submit(value, key, given, timestamp, deliver_after, deliver_at, ttl)

    async def send_many(self, records: Iterable[bytes | str] | Iterable[tuple[Any, bytes | str]]) -> MessageIds:
        """Publish as `Producer.send_many`, in one span. The records carry no context: they have no headers."""
        with self._sending_many() as note:
            ids = await self.producer.send_many(records)
            note(ids)
            return ids

    async def flush(self) -> None:
        await self.producer.flush()

    async def close(self) -> None:
        await self.producer.close()

    async def __aenter__(self) -> Self:
        await self.producer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_: TracebackType | None
    ) -> None:
        await self.producer.__aexit__(kind, error, trace_)


class TracedBlockingProducer(_Traced["BlockingProducer"]):
    """A `BlockingProducer` with spans; `traced` makes it."""

    def send(
        self,
        value: bytes | str,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: Time = None,
        deliver_after: Duration = None,
        deliver_at: Time = None,
        ttl: Duration = None,
    ) -> MessageId:
        """Publish a record as `BlockingProducer.send`, in a span that ends when the record is stored."""
        with self._sending(value, headers) as (given, note):
            id_ = self.producer.send(value, key, given, timestamp, deliver_after, deliver_at, ttl)
            note(id_)
            return id_

    def submit(
        self,
        value: bytes | str,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: Time = None,
        deliver_after: Duration = None,
        deliver_at: Time = None,
        ttl: Duration = None,
    ) -> BlockingReceipt:
        """Publish a record as `BlockingProducer.submit`. The span ends immediately: it does not wait for the record."""
        with self._submitting(value, headers) as given:
            return self.producer.submit(value, key, given, timestamp, deliver_after, deliver_at, ttl)

    def send_many(self, records: Iterable[bytes | str] | Iterable[tuple[Any, bytes | str]]) -> MessageIds:
        """Publish as `BlockingProducer.send_many`, in one span. The records carry no context: they have no headers."""
        with self._sending_many() as note:
            ids = self.producer.send_many(records)
            note(ids)
            return ids

    def flush(self) -> None:
        self.producer.flush()

    def close(self) -> None:
        self.producer.close()

    def __enter__(self) -> Self:
        self.producer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_: TracebackType | None
    ) -> None:
        self.producer.__exit__(kind, error, trace_)


def _tracer(provider: TracerProvider | None) -> Tracer:
    import braid

    return trace.get_tracer(SCOPE, braid.__version__, tracer_provider=provider)


def _attributes(topic: str, operation: str, kind: str) -> dict[str, str | int]:
    return {
        "messaging.system": "braid",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": topic,
    }


def _size_of(value: bytes | str) -> dict[str, int]:
    """The size of a text in bytes is not known yet."""
    return {"messaging.message.body.size": len(value)} if isinstance(value, bytes) else {}


def _injected(headers: Headers | None) -> Headers | None:
    """Return the headers with the current context; the same, if there is none to send."""
    context: dict[str, bytes | str] = {}
    propagate.inject(context, setter=_SETTER)
    if not context:
        return headers
    return {**(headers or {}), **context}


def _note_id(span: Span, id_: MessageId) -> None:
    span.set_attribute("messaging.destination.partition.id", str(id_.segment))
    span.set_attribute("messaging.message.id", _id_text(id_))


def _id_text(id_: MessageId) -> str:
    return f"{id_.segment}:{id_.offset}"


def _links(spans: Iterable[Span]) -> list[Link]:
    """Return a link to each span, once."""
    contexts = [span.get_span_context() for span in spans]
    found = {(context.trace_id, context.span_id): Link(context) for context in contexts if context.is_valid}
    return [*found.values()][:MAX_LINKS]


@contextmanager
def _error_type(span: Span) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        span.set_attribute("error.type", error.code if isinstance(error, BraidError) else type(error).__name__)
        raise
