"""Traces that go through topics, seen by the SDK's exporter in memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace import TracerProvider as AnyProvider

import braid
from braid import otel, sync
from braid.errors import ClientClosed
from tests.kits.admin import AdminBroker, admin_broker
from tests.kits.waiting import wait_until

WAIT_S = 30.0


@pytest.fixture(name="broker", scope="module")
def _broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminBroker]:
    with admin_broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


class Spans:
    """A program's own provider: tests do not touch the global one."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    def take(self) -> list[ReadableSpan]:
        found = [*self._exporter.get_finished_spans()]
        self._exporter.clear()
        return found


@pytest.fixture(name="spans")
def _spans() -> Iterator[Spans]:
    spans = Spans()
    yield spans
    spans.provider.shutdown()


def _topic(broker: AdminBroker, request: pytest.FixtureRequest) -> str:
    name = request.node.name.replace("[", "-").replace("]", "")[:60]
    with sync.connect(f"braid://{broker.broker.address}") as client:
        client.admin.create_topic(name)
    return str(name)


@pytest.fixture(name="topic")
def _new_topic(broker: AdminBroker, request: pytest.FixtureRequest) -> str:
    return _topic(broker, request)


def test_a_delivery_belongs_to_the_trace_of_its_publish(broker: AdminBroker, topic: str, spans: Spans) -> None:
    async def publish_and_process() -> None:
        async with braid.connect(f"braid://{broker.broker.address}") as client:
            async with otel.traced(client.producer(topic), tracer_provider=spans.provider) as producer:
                with spans.tracer.start_as_current_span("request"):
                    await producer.send(b"value", key=b"k", headers={"mine": b"1"})
            async with client.stream_consumer(topic, "billing", start="earliest") as consumer:
                message = await anext(aiter(consumer))
                assert message.headers["mine"] == b"1"
                assert message.headers["traceparent"].startswith(b"00-")
                with (
                    otel.processing(message, subscription="billing", tracer_provider=spans.provider),
                    spans.tracer.start_as_current_span("work"),
                ):
                    pass

    asyncio.run(publish_and_process())
    send, request, work, process = spans.take()
    path = f"public/default/{topic}"
    assert [each.name for each in (send, request, work, process)] == [
        f"send {path}",
        "request",
        "work",
        f"process {path}",
    ]
    assert send.parent is not None
    assert send.parent.span_id == request.context.span_id
    assert process.parent is not None
    assert process.parent.span_id == send.context.span_id
    assert process.parent.is_remote
    assert work.parent is not None
    assert work.parent.span_id == process.context.span_id
    assert len({each.context.trace_id for each in (send, request, work, process)}) == 1
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    common = {
        "messaging.system": "braid",
        "messaging.destination.name": path,
        "messaging.destination.partition.id": "0",
        "messaging.message.id": "0:0",
        "messaging.message.body.size": 5,
    }
    assert send.attributes == {**common, "messaging.operation.name": "send", "messaging.operation.type": "send"}
    assert process.attributes == {
        **common,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.subscription.name": "billing",
    }


def test_blocking_programs_have_the_same(broker: AdminBroker, topic: str, spans: Spans) -> None:
    with sync.connect(f"braid://{broker.broker.address}") as client:
        with otel.traced(client.producer(topic), tracer_provider=spans.provider) as producer:
            producer.send("one")
            producer.submit("two").result(30)
            producer.send_many(["three", "four"])
        one, two, many = spans.take()
        with client.stream_consumer(topic, "billing", start="earliest") as consumer:
            messages = [next(iter(consumer)) for _ in range(4)]
        assert [bool(each.headers) for each in messages] == [True, True, False, False]
        with (
            spans.tracer.start_as_current_span("poll"),
            otel.processing(messages, subscription="billing", tracer_provider=spans.provider),
        ):
            pass
    batch, poll = spans.take()
    assert one.attributes is not None
    assert many.attributes is not None
    assert two.attributes is not None
    assert two.attributes["messaging.operation.type"] == "create"
    assert many.attributes["messaging.batch.message_count"] == 2
    assert batch.parent is not None
    assert batch.parent.span_id == poll.context.span_id
    assert [link.context.span_id for link in batch.links] == [one.context.span_id, two.context.span_id]
    assert batch.attributes is not None
    assert batch.attributes["messaging.batch.message_count"] == 4


def test_the_trace_of_a_publish_goes_on_in_a_queue_in_its_dead_letter_and_in_a_redrive(
    broker: AdminBroker, topic: str, spans: Spans
) -> None:
    dead, path = f"{topic}-dead", f"public/default/{topic}"
    with sync.connect(f"braid://{broker.broker.address}") as client:
        client.admin.create_topic(dead)
        client.admin.create_subscription(topic, "q", kind="queue", max_deliveries=2, dead_letter_topic=dead)
        with otel.traced(client.producer(topic), tracer_provider=spans.provider) as producer:
            producer.send(b"value", key=b"k", headers={"mine": b"1"})
        (send,) = spans.take()

        def process(message: braid.Message | None, subscription: str) -> braid.Message:
            assert message is not None
            with otel.processing(message, subscription=subscription, tracer_provider=spans.provider):
                return message

        with client.queue_consumer(topic, "q") as consumer:
            for delivered_before in (0, 1):
                message = consumer.receive(timeout=WAIT_S)
                process(message, "q")
                assert message is not None
                assert message.redelivery_count == delivered_before
                consumer.nack(message, reason="no stamps")
            wait_until(lambda: client.admin.subscription(topic, "q")["queue"]["deadLettered"] == 1, "a dead letter")
        with client.stream_consumer(dead, "undertaker", start="earliest") as letters:
            letter = process(next(iter(letters)), "undertaker")
        assert letter.headers["braid-dead-letter-reason"] == b"no stamps"
        assert client.admin.redrive(topic, "q")["redriven"] == 1
        with client.queue_consumer(topic, "q") as consumer:
            again = process(consumer.receive(timeout=WAIT_S), "q")
    first, second, buried, redriven = spans.take()
    for each in (first, second, buried, redriven):
        assert each.kind == SpanKind.CONSUMER
        assert each.context.trace_id == send.context.trace_id
        assert each.parent is not None
        assert each.parent.is_remote
        assert each.parent.span_id == send.context.span_id
    places = [_place(each) for each in (first, second, buried, redriven)]
    public = f"public/default/{dead}"
    assert places == [(path, "q", "0:0"), (path, "q", "0:0"), (public, "undertaker", "0:0"), (path, "q", "0:1")]
    assert dict(again.headers) == {"mine": b"1", "traceparent": letter.headers["traceparent"]}


def _place(span: ReadableSpan) -> tuple[object, ...]:
    assert span.attributes is not None
    names = ("destination.name", "destination.subscription.name", "message.id")
    return tuple(span.attributes[f"messaging.{name}"] for name in names)


def test_a_message_without_a_context_begins_no_foreign_trace(spans: Spans) -> None:
    message = braid.Message(key=None, value=b"v", timestamp_us=0, offset=3, segment=1, topic="a/b/c")
    bad = braid.Message(
        key=None, value=b"v", timestamp_us=0, offset=4, segment=1, topic="a/b/c", headers={"traceparent": b"\xff\x00"}
    )
    with spans.tracer.start_as_current_span("here"):
        for each in (message, bad):
            with otel.processing(each, tracer_provider=spans.provider):
                pass
    first, second, here = spans.take()
    assert first.parent is not None
    assert second.parent is not None
    assert first.parent.span_id == second.parent.span_id == here.context.span_id


def test_the_context_of_the_span_replaces_one_that_the_program_has_given(spans: Spans) -> None:
    """A program that sends on what it got sends on its headers."""
    given = {"traceparent": b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01", "colour": b"red"}
    with spans.tracer.start_as_current_span("here") as here:
        headers = otel._injected(given)
    assert headers is not None
    assert headers["colour"] == b"red"
    assert f"{here.get_span_context().trace_id:032x}" in str(headers["traceparent"])


def test_a_hostile_context_costs_neither_an_error_nor_a_page_of_log(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {
        "traceparent": b"00-" + b"f" * 1_000_000,
        "tracestate": b"a=b," * 1_000_000,
        "baggage": b"k=%ff;" * 1_000_000,
    }
    message = braid.Message(value=b"x", key=None, timestamp_us=0, offset=0, headers=headers, topic="t")
    with otel.processing(message, tracer_provider=spans.provider):
        pass
    (span,) = spans.take()
    assert span.parent is None
    assert sum(map(len, caplog.messages)) < 20_000


def test_errors_are_in_the_span(broker: AdminBroker, topic: str, spans: Spans) -> None:
    with sync.connect(f"braid://{broker.broker.address}") as client:
        plain = client.producer(topic)
        producer = otel.traced(plain, tracer_provider=spans.provider)
        producer.close()
        with pytest.raises(ClientClosed):
            producer.send(b"late")
    with pytest.raises(ZeroDivisionError), otel.processing([], tracer_provider=spans.provider):
        raise ZeroDivisionError
    send, process = spans.take()
    assert send.status.status_code is process.status.status_code is StatusCode.ERROR
    assert send.attributes is not None
    assert process.attributes is not None
    assert send.attributes["error.type"] == ClientClosed.code
    assert process.attributes["error.type"] == "ZeroDivisionError"


def test_without_an_sdk_records_get_no_headers(broker: AdminBroker, topic: str) -> None:
    from opentelemetry.trace import NoOpTracerProvider

    silent: AnyProvider = NoOpTracerProvider()
    with sync.connect(f"braid://{broker.broker.address}") as client:
        with otel.traced(client.producer(topic), tracer_provider=silent) as producer:
            producer.send(b"one")
        with client.stream_consumer(topic, "billing", start="earliest") as consumer:
            message = next(iter(consumer))
    assert dict(message.headers) == {}
    assert otel._injected(None) is None, "the producer's fast path takes records without headers alone"
    with otel.processing(message, tracer_provider=silent) as span:
        assert not span.is_recording()


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_a_program_that_does_not_ask_for_traces_does_not_import_them() -> None:
    code = "import sys, braid, braid.sync, braid.client.producing.producer, braid.client.consuming.stream"
    assert _python(f"{code}\nprint([name for name in sys.modules if 'opentelemetry' in name])") == "[]\n"


def test_an_installation_without_opentelemetry_says_what_to_install() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from braid.errors import NotAvailable
try:
    import braid.otel
except NotAvailable as error:
    print(error)
"""
    assert "pip install 'braidmq[otel]'" in _python(code)


def test_the_page_shows_what_the_module_has() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operating" / "tracing.md").read_text()
    for name in otel.__all__:
        assert name in page, name
