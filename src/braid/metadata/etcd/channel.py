"""One endpoint of etcd: one gRPC channel, calls with a deadline, streams that can be waited on with a time-out.

Nothing is retried here, neither by us nor by gRPC. Every failure comes out as `CallError`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
import grpc.aio
import msgspec

from braid.metadata.etcd.messages import Method
from braid.metadata.etcd.outcome import NOT_CONNECTED, CallOutcome, outcome_of
from braid.model.errors import InvalidArgument

Metadata = tuple[tuple[str, str], ...]

_OPTIONS: Final = (
    # etcd hangs up on clients that ping more often than every 5 s, or without a stream; 10 s is gRPC's own floor.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),  # 0 lifts the limit: a watch may be silent for hours
    # The least time to back off is also gRPC's time-out for a connection attempt (default 20 s).
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),  # a repeated Txn may be applied twice
    ("grpc.use_local_subchannel_pool", 1),  # two stores in one process do not share a connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),  # a page of a listing is as large as its values
)

_STATE_POLL_S: Final = 0.005


class EtcdTls(msgspec.Struct, frozen=True):
    """Files in PEM format. `ca` verifies the server; `cert` and `key` identify the client, where etcd asks for it."""

    ca: str
    cert: str | None = None
    key: str | None = None


class CallError(Exception):
    """A call or stream without an answer; `outcome` says what that means for the request."""

    def __init__(self, address: str, code: str, details: str) -> None:
        super().__init__(f"{address}: {code}: {details}")
        self.code = code
        self.details = details

    @property
    def outcome(self) -> CallOutcome:
        return outcome_of(self.code, self.details)


def channel_credentials(tls: EtcdTls) -> Any:
    def content(path: str | None) -> bytes | None:
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise InvalidArgument(f"the TLS file {path!r} of etcd cannot be read: {error.strerror}") from error

    return grpc.ssl_channel_credentials(content(tls.ca), content(tls.key), content(tls.cert))


class Endpoint:
    def __init__(self, address: str, credentials: Any | None) -> None:
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdecimal():
            raise InvalidArgument(f"{address!r} is no endpoint of etcd; write HOST:PORT, for example '10.0.0.7:2379'")
        self.address = address
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
        self._unary: dict[str, Any] = {}

    async def connect(self, timeout_s: float) -> None:
        """Return once the channel is connected. A request that fails before that was provably not sent."""
        try:
            async with asyncio.timeout(timeout_s):
                state = self._channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.READY:
                    if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                        raise CallError(self.address, NOT_CONNECTED, "the connection is refused or broken")
                    # Not `wait_for_state_change`: a time-out could not withdraw it, and it would outlive the loop.
                    await asyncio.sleep(_STATE_POLL_S)
                    state = self._channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise CallError(self.address, NOT_CONNECTED, f"no connection within {timeout_s:g} s") from None

    async def call(self, method: Method, request: Any, timeout_s: float, metadata: Metadata) -> Any:
        """Send one request and return its answer; also for a method that streams one answer to one request."""
        unary = self._unary.get(method.path)
        if unary is None:
            unary = self._unary[method.path] = self._channel.unary_unary(
                method.path,
                request_serializer=type(request).SerializeToString,
                response_deserializer=method.response.FromString,
            )
        call = unary(request, timeout=timeout_s, metadata=metadata)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise _failure(self.address, error) from None
        except asyncio.CancelledError:
            # gRPC also cancels when the channel is closed under the call; only the task knows whether it was cancelled.
            if _cancelled_from_outside():
                raise
            raise CallError(self.address, "CANCELLED", "the store was closed during the call") from None

    def stream(self, method: Method, request_type: Any, metadata: Metadata) -> Stream:
        open_stream = self._channel.stream_stream(
            method.path,
            request_serializer=request_type.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return Stream(self.address, open_stream(metadata=metadata))

    async def close(self) -> None:
        await self._channel.close()


class Stream:
    """A stream in both directions, owned by one task."""

    def __init__(self, address: str, call: Any) -> None:
        self._address = address
        self._call = call
        self._reading: asyncio.Task[Any] | None = None

    async def send(self, request: Any, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.write(request)
        except TimeoutError:
            raise CallError(self._address, "SILENT", f"took no request for {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise _failure(self._address, error) from None
        except asyncio.InvalidStateError:  # the stream had ended before; its status says why
            raise await self._ended() from None

    async def receive(self, timeout_s: float) -> Any | None:
        """Return the next message; None when none came in time. The read goes on: its end would end the stream."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
        done, _ = await asyncio.wait((self._reading,), timeout=timeout_s)
        if not done:
            return None
        reading, self._reading = self._reading, None
        if reading.cancelled():
            raise CallError(self._address, "CANCELLED", "the store was closed under the stream")
        error = reading.exception()
        if isinstance(error, grpc.aio.AioRpcError):
            raise _failure(self._address, error)
        if error is not None:
            raise error
        message = reading.result()
        if message is grpc.aio.EOF:
            raise await self._ended()
        return message

    def failure(self, code: str, details: str) -> CallError:
        return CallError(self._address, code, details)

    async def close(self) -> None:
        self._call.cancel()
        if self._reading is not None:  # it ends with the call, and takes its error with it
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _ended(self) -> CallError:
        code = await self._call.code()
        return CallError(self._address, code.name, await self._call.details() or "the server ended the stream")


def _failure(address: str, error: Any) -> CallError:
    return CallError(address, error.code().name, error.details() or "no details given")


def _cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
