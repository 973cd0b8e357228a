"""Which brokers a command talks to, and as whom.

The options may stand before the command (`braid --url … topic list`) or behind it; what stands behind wins, then what
stands before, then the environment, then the default.
"""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click
import msgspec

from braid.model.errors import ConnectFailed

if TYPE_CHECKING:
    from braid.client.client import Client

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])

DEFAULT_ADMIN_URL: Final = "http://127.0.0.1:8660"
DEFAULT_URL: Final = "braid://127.0.0.1:6660"
"""As in wire/address.py, which `braid --help` must not wait for."""

CONNECT_S: Final = 3.0
"""For so long a broker that cannot be reached is tried again: enough for one that is just being started, and a person
who waits learns soon that there is none."""


class Target(msgspec.Struct, frozen=True):
    url: str = DEFAULT_URL
    admin_url: str = DEFAULT_ADMIN_URL
    token: str = ""
    tls_ca: str = ""

    def connect(self) -> Client:
        """A client as a program has it: it waits for its brokers for as long as its timeout."""
        from braid.client.client import connect

        return connect(self.url, token=self.token, tls=self.tls_ca or None, name=f"braid-cli-{os.getpid()}")

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        """A client that has reached one of the brokers, for a person who waits."""
        import asyncio

        from braid.client.retry import retrying

        client = self.connect()
        try:
            await retrying(client.pool.any, asyncio.get_running_loop().time() + CONNECT_S, client.backoff())
        except BaseException as error:
            await client.close()
            if isinstance(error, ConnectFailed) and self.url == DEFAULT_URL:
                raise ConnectFailed(f"{error}; start one with `braid serve`, or name another by --url") from error
            raise
        async with client:
            yield client


class _Parameter(NamedTuple):
    name: str
    variable: str
    metavar: str
    help: str
    more: str
    """Said once, in the help of `braid` itself."""


_PARAMETERS: Final = (
    _Parameter("--url", "BRAID_URL", "URL", "Brokers, several by comma.", f"[default: {DEFAULT_URL}]"),
    _Parameter(
        "--admin-url",
        "BRAID_ADMIN_URL",
        "URL",
        "The admin port.",
        f"Not needed by any command yet: all of them talk to --url. [default: {DEFAULT_ADMIN_URL}]",
    ),
    _Parameter(
        "--token", "BRAID_TOKEN", "TOKEN", "Who you are.", "Better in the environment: everybody can see options."
    ),
    _Parameter(
        "--tls-ca",
        "BRAID_TLS_CA",
        "FILE",
        "Talk TLS, and trust the authorities in this file.",
        "PEM; /etc/ssl/certs/ca-certificates.crt has the public ones.",
    ),
)


def target_parameters(*, at_root: bool = False) -> Callable[[C], C]:
    """The options themselves. Only those of the root look at the environment, so that it never beats an option."""

    def decorate(command: C) -> C:
        for each in reversed(_PARAMETERS):
            text = f"{each.help} {each.more}" if at_root else each.help
            command = click.option(
                each.name,
                envvar=each.variable if at_root else None,
                metavar=each.metavar,
                help=f"{text} [env: {each.variable}]",
            )(command)
        return command

    return decorate


def remember_target(known: Target, options: Mapping[str, str | None]) -> Target:
    """`known`, with the options that were given."""
    given = {name: options[name] for name in Target.__struct_fields__ if options.get(name) is not None}
    return msgspec.structs.replace(known, **given)


def with_target(command: Callable[..., T]) -> Callable[..., T]:
    """Gives a command the options above, and as its first argument the `Target` that they make."""

    @target_parameters()
    @click.pass_context
    @functools.wraps(command)
    def invoked(ctx: click.Context, /, **options: Any) -> T:
        own = {name: options.pop(name) for name in Target.__struct_fields__}
        known = ctx.find_root().obj
        target = remember_target(known if isinstance(known, Target) else Target(), own)
        return command(target, **options)

    return invoked


def ask(target: Target, question: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    """Connect, ask, and return the answer."""
    import asyncio  # not above: asyncio and ssl would be a third of the time of `braid --help`

    async def asked() -> T:
        async with target.connected() as client:
            return await question(client)

    return asyncio.run(asked())
