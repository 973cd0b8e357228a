"""Where brokers are: `braid://host:port,host:port`, as users write it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from braid.model.errors import InvalidArgument, quote
from braid.ports.network import Address

SCHEME: Final = "braid://"
DEFAULT_PORT: Final = 6660
DEFAULT_URL: Final = f"{SCHEME}127.0.0.1:{DEFAULT_PORT}"

_ADDRESS: Final = re.compile(r"(?:\[(?P<ipv6>[^\[\]\s]+)\]|(?P<host>[^\[\]\s:]+))(?::(?P<port>[0-9]{1,5}))?")


def parse_url(url: str) -> tuple[Address, ...]:
    """Parse the brokers of a URL. A client may begin with any of them."""
    if not url.startswith(SCHEME):
        raise InvalidArgument(f"{quote(url)} is no broker URL: write {SCHEME}host:port, several brokers by comma")
    hosts = url.removeprefix(SCHEME).rstrip("/").split(",")
    return tuple(parse_address(host) for host in hosts)


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> Address:
    """Parse `host:port`, `host`, `[::1]:port`."""
    match = _ADDRESS.fullmatch(text.strip())
    port = match["port"] or str(default_port) if match else ""
    if match is None or int(port) > 65_535:
        raise InvalidArgument(
            f"{quote(text)} is no address: write host:port, with a port from 0 to 65535, and [host]:port for IPv6"
        )
    return Address(match["ipv6"] or match["host"], int(port))


def format_address(address: Address) -> str:
    return str(address)


def format_url(addresses: Sequence[Address]) -> str:
    return SCHEME + ",".join(map(format_address, addresses))
