"""One budget for the unfinished frames of all connections: which of them are read."""

from __future__ import annotations

from braid.broker.connections.unfinished_frames import OLDEST_S, UnfinishedFrames

MB = 1 << 20


class Client:
    def __init__(self, name: str) -> None:
        self.name = name
        self.waits = False

    def wait_for_room(self, waits: bool) -> None:
        assert waits is not self.waits
        self.waits = waits


class Clock:
    now = 0.0

    def time(self) -> float:
        return self.now


def budget(clock: Clock | None = None) -> UnfinishedFrames:
    return UnfinishedFrames(64 * MB, (clock or Clock()).time)


def test_below_the_budget_everybody_is_read() -> None:
    frames = budget()
    clients = [Client(str(number)) for number in range(63)]
    for client in clients:
        frames.note(client, MB)
    assert frames.bytes == 63 * MB
    assert not any(client.waits for client in clients)
    for client in clients:
        frames.note(client, 0)
    assert frames.bytes == 0


def test_above_the_budget_the_oldest_and_those_with_little_are_read() -> None:
    frames = budget()
    oldest, second, third, small = (Client(name) for name in ("oldest", "second", "third", "small"))
    for client in (oldest, second, third):
        frames.note(client, 20 * MB)
    frames.note(small, MB)
    assert (oldest.waits, second.waits, third.waits, small.waits) == (False, False, False, False)
    frames.note(third, 24 * MB)
    assert (oldest.waits, second.waits, third.waits, small.waits) == (False, True, True, False)
    frames.note(oldest, 36 * MB)
    frames.note(small, 2 * MB)
    assert (oldest.waits, small.waits) == (False, False)
    frames.note(small, 17 * MB)
    assert small.waits


def test_a_frame_that_is_whole_makes_room_for_the_next_oldest() -> None:
    frames = budget()
    clients = [Client(str(number)) for number in range(10)]
    for client in clients:
        frames.note(client, 7 * MB)
    assert [client.waits for client in clients] == [False] + 9 * [True]
    for done, client in enumerate(clients, 1):
        frames.note(client, 36 * MB)
        frames.note(client, 0)
        if done < len(clients):
            assert not clients[done].waits
    assert (frames.bytes, frames.late(1e9)) == (0, None)


def test_no_more_go_on_than_have_room_for_what_they_read_next() -> None:
    frames = budget()
    clients = [Client(str(number)) for number in range(65)]
    for client in clients:
        frames.note(client, MB + 1)
    assert sum(client.waits for client in clients) > 60
    frames.note(clients[0], 0)
    reading = sum(not client.waits for client in clients[1:])
    assert 1 <= reading <= 4


def test_a_connection_that_is_gone_holds_nothing() -> None:
    frames = budget()
    one, two, three = Client("one"), Client("two"), Client("three")
    frames.note(one, 40 * MB)
    frames.note(two, 40 * MB)
    assert (one.waits, two.waits) == (False, True)
    frames.note(two, 0)
    assert frames.bytes == 40 * MB
    frames.note(three, 0)
    frames.note(three, 30 * MB)
    frames.note(one, 0)
    assert (three.waits, frames.bytes) == (False, 30 * MB)


def test_the_oldest_is_late_only_while_it_keeps_others_waiting() -> None:
    clock = Clock()
    frames = budget(clock)
    one, two, three = Client("one"), Client("two"), Client("three")
    frames.note(one, 30 * MB)
    clock.now = 100.0
    assert frames.late(clock.now) is None, "nobody waits"
    frames.note(two, 40 * MB)
    frames.note(three, 40 * MB)
    assert frames.late(clock.now) is None, "they have only just begun to wait"
    clock.now += OLDEST_S + 0.1
    assert frames.late(clock.now) is one
    frames.note(one, 0)
    assert frames.late(clock.now) is None, "the next one has only just become the oldest"
    clock.now += OLDEST_S + 0.1
    assert frames.late(clock.now) is two
