"""The admin port, taken before the broker opens anything.

So a port that somebody else has is noticed before this broker is known to anybody, and the number that it registers is
the real one, also when any free port was asked for. Whoever connects while the broker starts waits until it is open.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final

from braid.model.errors import InvalidConfig
from braid.ports.network import Address, listen_failure

BACKLOG: Final = 128


class AdminPort:
    def __init__(self, host: str, sockets: list[socket.socket]) -> None:
        self.sockets: Final = sockets
        """Listening. One for each address of the host."""
        self.address: Final = Address(host, sockets[0].getsockname()[1])

    @classmethod
    def take(cls, address: Address) -> AdminPort:
        """Raises InvalidConfig."""
        with contextlib.ExitStack() as taken:
            try:
                sockets: list[socket.socket] = []
                for family, host in _addresses(address.host):
                    # Any free port means the same one on all addresses.
                    port = address.port or (sockets[0].getsockname()[1] if sockets else 0)
                    sockets.append(taken.enter_context(_listening(family, host, port)))
            except (OSError, UnicodeError) as error:
                reason = listen_failure(error, address.host)
                raise InvalidConfig(f"cannot listen on {address} for admin: {reason}") from error
            taken.pop_all()
            return cls(address.host, sockets)

    def close(self) -> None:
        """Closing twice is fine."""
        for each in self.sockets:
            each.close()


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(where[0])) for family, _, _, _, where in found))


def _listening(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # What a broker before this one left does not count.
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.setblocking(False)
        opened.bind((host, port))
        # At once: two sockets may be bound to one port as long as neither listens.
        opened.listen(BACKLOG)
    except BaseException:
        opened.close()
        raise
    return opened
