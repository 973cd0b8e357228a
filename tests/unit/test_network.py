"""Why an address cannot be used, in words that help."""

from __future__ import annotations

import socket

from braid.ports.network import listen_failure, reason_of


def test_a_host_name_that_cannot_be_resolved_is_named() -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    expected = "the host name 'nowhere' cannot be resolved (Name or service not known)"
    assert reason_of(unknown, "nowhere") == listen_failure(unknown, "nowhere") == expected
    assert reason_of(UnicodeError("label too long"), "x" * 100) == f"{'x' * 100!r} is no host name"
    taken = OSError(98, "error while attempting to bind on address ('127.0.0.1', 1)")
    assert listen_failure(taken, "127.0.0.1") == "Address already in use; is another broker running?"
