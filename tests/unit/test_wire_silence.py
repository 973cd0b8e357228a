"""When a link to a silent broker is over (wire/silence.py), as a table of times."""

from __future__ import annotations

import pytest

from braid.wire.silence import ANSWER_S, BUSY_BYTES, BUSY_REQUESTS, PING_AFTER_S, Look, Silence

MIB = 1 << 20


def test_a_broker_that_sends_something_is_left_alone() -> None:
    silence = Silence()
    assert silence.begin(10.0) == 10.0 + PING_AFTER_S
    assert silence.look(12.0, 11.5, 1, 0) == (Look.LATER, 11.5 + PING_AFTER_S)


def test_a_broker_that_is_silent_is_asked_once_and_then_given_up() -> None:
    silence = Silence()
    silence.begin(10.0)
    assert silence.look(12.0, 10.0, 1, 0) == (Look.PING, 12.0 + ANSWER_S)
    assert silence.look(12.0 + ANSWER_S, 10.0, 2, 0)[0] is Look.OVER


def test_a_broker_that_has_answered_the_ping_is_asked_again_after_a_time() -> None:
    """A long call: only the answers to PING come."""
    silence = Silence()
    silence.begin(10.0)
    silence.look(12.0, 10.0, 1, 0)
    assert silence.look(16.0, 12.1, 1, 0) == (Look.PING, 16.0 + ANSWER_S)
    assert silence.look(20.0, 16.1, 1, 0)[0] is Look.PING


def test_bytes_on_their_way_get_time() -> None:
    silence = Silence()
    silence.begin(10.0)
    assert silence.look(12.0, 10.0, 8, 5 * MIB) == (Look.PING, 12.0 + ANSWER_S + 5)


@pytest.mark.parametrize(("requests", "unanswered"), [(BUSY_REQUESTS, 0), (1, BUSY_BYTES)])
def test_a_broker_that_may_not_read_is_left_to_the_heartbeat(requests: int, unanswered: int) -> None:
    silence = Silence()
    silence.begin(10.0)
    for now in (12.0, 14.0, 16.0, 18.0, 20.0):
        assert silence.look(now, 10.0, requests, unanswered) == (Look.LATER, now + PING_AFTER_S)


def test_a_process_that_stood_still_itself_asks_again() -> None:
    """The answer may wait in its socket."""
    silence = Silence()
    silence.begin(10.0)
    assert silence.look(12.0, 10.0, 1, 0)[0] is Look.PING
    assert silence.look(40.0, 10.0, 1, 0) == (Look.PING, 40.0 + ANSWER_S)
    assert silence.look(44.0, 10.0, 1, 0)[0] is Look.OVER
