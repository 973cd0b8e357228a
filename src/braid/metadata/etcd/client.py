"""Calls to a cluster of etcd servers: which endpoint, how often, how long, and with which token.

A request that may be repeated goes from endpoint to endpoint until one answers or its time is up; then nothing is
known, and the caller gets `MetadataUnavailable`. A request that may not be repeated waits for a *connection* in the
same way, because nothing was sent yet, and is then sent once. If the answer says that it had no effect, it goes to the
next endpoint; a missing answer is `MetadataUncertain`.

All callers share one current endpoint. A caller that finds it dead moves all of them to the next one. They do not move
back until the others fail in turn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from braid.metadata.etcd.channel import CallError, Endpoint, Metadata
from braid.metadata.etcd.messages import AUTHENTICATE, AuthenticateRequest, Method
from braid.metadata.etcd.outcome import CallOutcome
from braid.metadata.history import store_closed
from braid.model.errors import (
    BraidError,
    InvalidArgument,
    LeaseLost,
    MetadataCompacted,
    MetadataError,
    MetadataUnavailable,
    MetadataUncertain,
)
from braid.ports.clock import Clock

ATTEMPT_TIMEOUT_S: Final = 1.0
"""A stopped server accepts connections and never answers: this long is lost on it."""
DEFAULT_TIMEOUT_S: Final = 6.0
"""All attempts of one call together. An election takes 1–3 s at etcd's defaults; this leaves room for a second one."""
_HAS_LEADER: Final = ("hasleader", "true")
"""A request with this metadata fails immediately on a server that is cut off from its cluster, and streams end."""
PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0


class Login(NamedTuple):
    user: str
    password: str

    def __repr__(self) -> str:
        return f"Login(user={self.user!r})"  # a password never stands in a log


def pause_s(failures: int, endpoints: int, rng: random.Random) -> float:
    """Return the pause after so many failures in a row: none while an endpoint is untried, then doubling."""
    rounds = min(failures // endpoints, 16)
    if rounds == 0:
        return 0.0
    return min(PAUSE_MAX_S, PAUSE_MIN_S * 2.0 ** (rounds - 1)) * rng.uniform(0.5, 1.0)


def refusal(asked: str, failure: CallError) -> BraidError:
    """Return the error for an answer that is final."""
    match failure.outcome:
        case CallOutcome.LEASE_MISSING:
            return LeaseLost(f"{asked}: the lease does not exist (any more) ({failure})")
        case CallOutcome.COMPACTED:
            return MetadataCompacted(f"{asked}: etcd has compacted that revision away; list again ({failure})")
        case CallOutcome.FORBIDDEN | CallOutcome.TOKEN_REJECTED:
            return MetadataError(f"{asked}: etcd does not permit it; check user, password and role ({failure})")
        case _:
            return InvalidArgument(f"{asked}: etcd refuses the request ({failure})")


class EtcdClient:
    def __init__(
        self, endpoints: Sequence[Endpoint], login: Login | None, timeout_s: float, clock: Clock, rng: random.Random
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._current = 0
        self._login = login
        self._token: str | None = None
        self._token_lock = asyncio.Lock()
        self._timeout_s = timeout_s
        self._clock = clock
        self._rng = rng
        self.closed = False

    @property
    def current(self) -> Endpoint:
        return self._endpoints[self._current]

    @property
    def addresses(self) -> str:
        return ", ".join(endpoint.address for endpoint in self._endpoints)

    @property
    def token(self) -> str | None:
        return self._token

    @property
    def metadata(self) -> Metadata:
        return (_HAS_LEADER,) if self._token is None else (_HAS_LEADER, ("token", self._token))

    def turn_from(self, endpoint: Endpoint) -> None:
        if endpoint is self.current:  # otherwise another caller has moved on already
            self._current = (self._current + 1) % len(self._endpoints)

    def pause_s(self, failures: int) -> float:
        return pause_s(failures, len(self._endpoints), self._rng)

    async def call(self, method: Method, request: Any, asked: str, *, repeatable: bool) -> Any:
        give_up_at = self._clock.monotonic() + self._timeout_s
        failures = 0
        while True:
            self.check_open(asked)
            endpoint, token = self.current, self._token
            # A stale token makes etcd refuse even the log-in that would replace it.
            metadata = (_HAS_LEADER,) if method is AUTHENTICATE else self.metadata
            try:
                if not repeatable:
                    await endpoint.connect(ATTEMPT_TIMEOUT_S)
                return await endpoint.call(method, request, ATTEMPT_TIMEOUT_S, metadata)
            except CallError as error:
                failure = error
            match failure.outcome:
                case CallOutcome.TOKEN_REJECTED if self._login is not None and method is not AUTHENTICATE:
                    await self.log_in(instead_of=token)
                case CallOutcome.UNKNOWN if not repeatable:
                    self.turn_from(endpoint)
                    raise MetadataUncertain(
                        f"{asked}: sent to etcd and not answered ({failure}); it may have happened: read and compare"
                    )
                case CallOutcome.UNKNOWN | CallOutcome.NO_EFFECT:
                    self.turn_from(endpoint)
                case _:
                    raise refusal(asked, failure)
            failures += 1
            pause = self.pause_s(failures)
            if self._clock.monotonic() + pause >= give_up_at:
                raise MetadataUnavailable(
                    f"{asked}: no endpoint of etcd ({self.addresses}) took it within {self._timeout_s:g} s; "
                    f"the last one said: {failure}"
                )
            await asyncio.sleep(pause)

    async def log_in(self, instead_of: str | None) -> None:
        """Get a new token, unless another caller has already replaced `instead_of`."""
        if self._login is None:
            return
        async with self._token_lock:
            if self._token != instead_of:
                return
            request = AuthenticateRequest(name=self._login.user, password=self._login.password)
            asked = f"log in as {self._login.user!r}"
            answer = await self.call(AUTHENTICATE, request, asked, repeatable=True)
            self._token = answer.token

    def check_open(self, asked: str) -> None:
        if self.closed:
            raise store_closed(asked)

    async def close(self) -> None:
        self.closed = True
        for endpoint in self._endpoints:
            await endpoint.close()
