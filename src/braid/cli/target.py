"""The brokers that a command talks to, and its credentials.

The options may stand before the command (`braid --url … topic list`) or after it. An option after the command wins over
one before it, then comes the environment, then the default.
"""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click
import msgspec

from braid.model.errors import ConnectFailed, ConnectionLost

if TYPE_CHECKING:
    from braid.client.client import Client

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])

DEFAULT_ADMIN_URL: Final = "http://127.0.0.1:8660"
DEFAULT_URL: Final = "braid://127.0.0.1:6660"
"""As in wire/address.py, which `braid --help` must not import."""

CONNECT_S: Final = 6.0
"""How long to retry a broker that cannot be reached: enough for a broker that is just starting on a busy machine, which
was seen to take three seconds, and short enough for a person who waits."""


class Target(msgspec.Struct, frozen=True):
    url: str = DEFAULT_URL
    admin_url: str = DEFAULT_ADMIN_URL
    token: str = ""
    tls_ca: str = ""

    def connect(self) -> Client:
        """Make a client as programs use it: it waits for its brokers until its timeout."""
        from braid.client.client import connect

        return connect(self.url, token=self.token, tls=self.tls_ca or None, name=f"braid-cli-{os.getpid()}")

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        """Make a client that has reached one of the brokers, for a person who waits."""
        import asyncio

        from braid.client.retry import retrying

        client = self.connect()
        try:
            await retrying(client.pool.any, asyncio.get_running_loop().time() + CONNECT_S, client.backoff())
        except BaseException as error:
            await client.close()
            if isinstance(error, ConnectFailed):
                raise ConnectFailed(f"{error}{self._advice(error)}") from error
            raise
        async with client:
            yield client

    def _advice(self, error: ConnectFailed) -> str:
        import ssl

        if isinstance(error.__cause__, ssl.SSLCertVerificationError):
            return "; name the authority that signed it by --tls-ca"
        if isinstance(error.__cause__, ssl.SSLError):
            return " If not, leave out --tls-ca and BRAID_TLS_CA"
        if isinstance(error.__cause__, ConnectionLost):
            return "; if it speaks TLS, name the authority that signed its certificate by --tls-ca"
        start = "start one with `braid serve`" if self.url == DEFAULT_URL else "start it"
        return f"; {start}, or name another by --url"


class _Parameter(NamedTuple):
    name: str
    variable: str
    metavar: str
    help: str
    more: str
    """Shown only in the help of `braid` itself."""


_PARAMETERS: Final = (
    _Parameter("--url", "BRAID_URL", "URL", "Brokers, several by comma.", f"[default: {DEFAULT_URL}]"),
    _Parameter(
        "--admin-url",
        "BRAID_ADMIN_URL",
        "URL",
        "The admin port.",
        f"Only `braid console` needs it, several by comma; the others talk to --url. [default: {DEFAULT_ADMIN_URL}]",
    ),
    _Parameter(
        "--token",
        "BRAID_TOKEN",
        "TOKEN",
        "Your bearer token.",
        "Better in the environment: every user of the machine can see options.",
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
    """Add the options. Only the root's options read the environment, so that it never wins over an option."""

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
    """Return `known` with the given options."""
    given = {name: options[name] for name in Target.__struct_fields__ if options.get(name) is not None}
    return msgspec.structs.replace(known, **given)


def with_target(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command these options, and their `Target` as its first argument."""

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
