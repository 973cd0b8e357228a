"""The simulated network keeps a stream's bytes and order, and breaks everything else that a network may break."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

import pytest

from braid.ports.network import Network, SocketNetwork
from braid.testing.sim.loop import Simulation, SimulationFailed, run_simulation
from braid.testing.sim.network import NEVER_NOTICED, BufferOverrun, SimulatedNetwork

T = TypeVar("T")
SEEDS = range(50)
DATA = bytes(range(256)) * 400


class Recorder(asyncio.Protocol):
    """Keeps everything that it is told."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.paused = 0
        self.resumed = 0
        self.ended = False
        self.lost = asyncio.Event()
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    @property
    def received(self) -> bytes:
        return b"".join(self.pieces)

    async def until_received(self, size: int) -> bytes:
        while len(self.received) < size:
            self.changed.clear()
            await self.changed.wait()
        return self.received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self.changed.set()

    def eof_received(self) -> bool | None:
        self.ended = True
        self.changed.set()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        assert not self.lost.is_set(), "told twice"
        self.error = exc
        self.lost.set()

    def pause_writing(self) -> None:
        self.paused += 1

    def resume_writing(self) -> None:
        self.resumed += 1
        self.changed.set()


class HalfOpen(Recorder):
    def eof_received(self) -> bool:
        super().eof_received()
        return True


class Buffered(asyncio.BufferedProtocol):
    """Receives into a small buffer of its own."""

    def __init__(self) -> None:
        self.room = bytearray(100)
        self.received = b""
        self.lost = asyncio.Event()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.room

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self.room[:nbytes]

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


async def pair(network: SimulatedNetwork, kind: Callable[[], Recorder] = Recorder) -> tuple[Recorder, Recorder]:
    """A connection from host `a` to host `b`: the client's protocol and the server's."""
    servers: list[Recorder] = []

    def accept() -> Recorder:
        servers.append(kind())
        return servers[-1]

    listener = await network.host("b").listen("b", 0, accept)
    _, client = await network.host("a").connect(*listener.address, kind)
    return client, servers[0]


def simulate(seed: int, main: Callable[[Simulation, SimulatedNetwork], Awaitable[T]]) -> T:
    async def run(sim: Simulation) -> T:
        return await main(sim, SimulatedNetwork(sim.random))

    return run_simulation(seed, run)


def test_a_host_of_the_simulation_and_the_sockets_are_networks() -> None:
    networks: list[Network] = [SocketNetwork(), SimulatedNetwork(Random(1)).host("a")]
    assert len(networks) == 2


@pytest.mark.parametrize("seed", SEEDS)
async def test_bytes_arrive_whole_and_in_order_both_ways(
    seed: int, simulation: Simulation, network: SimulatedNetwork
) -> None:
    network.loss = 0.1
    client, server = await pair(network)
    for start in range(0, len(DATA), 5_000):
        client.transport.write(DATA[start : start + 5_000])
        server.transport.writelines([DATA[start : start + 2_500], memoryview(DATA)[start + 2_500 : start + 5_000]])
        await asyncio.sleep(simulation.random.random() / 100)
    assert await server.until_received(len(DATA)) == DATA
    assert await client.until_received(len(DATA)) == DATA


def test_pieces_are_cut_in_other_places_than_the_writes() -> None:
    async def main(sim: Simulation, network: SimulatedNetwork) -> list[int]:
        client, server = await pair(network)
        for _ in range(50):
            client.transport.write(bytes(100))
        await server.until_received(5_000)
        return [len(piece) for piece in server.pieces]

    cuts = {size % 100 for seed in SEEDS for size in simulate(seed, main)}
    assert len(cuts) > 20


def test_the_same_seed_gives_the_same_stream() -> None:
    async def main(sim: Simulation, network: SimulatedNetwork) -> list[tuple[bytes, float]]:
        client, server = await pair(network)
        client.transport.write(DATA)
        await server.until_received(len(DATA))
        return [(piece, sim.loop.time()) for piece in server.pieces]

    assert simulate(1, main) == simulate(1, main)
    assert simulate(1, main) != simulate(2, main)


async def test_a_buffered_protocol_gets_the_bytes_in_its_own_buffer(network: SimulatedNetwork) -> None:
    servers: list[Buffered] = []

    def accept() -> Buffered:
        servers.append(Buffered())
        return servers[-1]

    listener = await network.host("b").listen("b", 7_000, accept)
    transport, _ = await network.host("a").connect("b", 7_000, Recorder)
    transport.write(DATA)
    transport.close()
    await asyncio.wait_for(servers[0].lost.wait(), 1_000)
    assert servers[0].received == DATA
    await listener.close()


async def test_a_peer_that_does_not_read_makes_the_writer_pause(network: SimulatedNetwork) -> None:
    client, server = await pair(network)
    server.transport.pause_reading()
    client.transport.set_write_buffer_limits(high=1_000, low=100)
    client.transport.write(bytes(1_000))
    assert client.paused == 0
    client.transport.write(bytes(1))
    assert client.paused == 1
    await asyncio.sleep(1_000)
    assert (server.received, client.resumed) == (b"", 0)
    assert client.transport.get_write_buffer_size() == 1_001
    server.transport.resume_reading()
    await server.until_received(1_001)
    assert (client.paused, client.resumed) == (1, 1)


async def test_a_writer_that_never_pauses_fails_the_simulation(network: SimulatedNetwork) -> None:
    client, server = await pair(network)
    server.transport.pause_reading()
    for _ in range(64):
        client.transport.write(bytes(1 << 20))
    with pytest.raises(BufferOverrun, match="I12"):
        client.transport.write(b"x")


async def test_nobody_listening_is_a_refusal(network: SimulatedNetwork) -> None:
    network.host("b")
    with pytest.raises(ConnectionRefusedError, match="port 1 of b"):
        await network.host("a").connect("b", 1, Recorder)
    listener = await network.host("b").listen("b", 1, Recorder)
    with pytest.raises(OSError, match="in use"):
        await network.host("b").listen("b", 1, Recorder)
    await network.host("a").connect("b", 1, Recorder)
    await listener.close()
    await listener.close()
    with pytest.raises(ConnectionRefusedError):
        await network.host("a").connect("b", 1, Recorder)
    with pytest.raises(OSError, match="no host called c"):
        await network.host("a").connect("c", 1, Recorder)


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_cut_is_silent_and_nothing_is_lost_when_it_heals(
    seed: int, simulation: Simulation, network: SimulatedNetwork
) -> None:
    client, server = await pair(network)
    client.transport.write(DATA)
    await asyncio.sleep(simulation.random.random() / 50)
    network.cut("a", "b")
    before = len(server.received)
    await asyncio.sleep(10_000)
    assert len(server.received) == before
    assert not client.lost.is_set()
    assert not server.lost.is_set()
    network.heal("a", "b")
    assert await server.until_received(len(DATA)) == DATA


async def test_what_was_sent_to_a_host_that_stood_still_arrives_before_its_timers(network: SimulatedNetwork) -> None:
    client, server = await pair(network)
    network.cut("a", "b")
    client.transport.write(b"x")
    await asyncio.sleep(1)
    network.heal("a", "b")
    assert server.received == b"", "bytes take their time"
    network.arrive("a")
    assert server.received == b"", "those are for another host"
    network.arrive("b")
    assert server.received == b"x"
    await asyncio.sleep(1)
    assert server.received == b"x", "they come once"


async def test_a_cut_one_way_lets_the_other_way_through(network: SimulatedNetwork) -> None:
    client, server = await pair(network)
    network.cut("a", "b", one_way=True)
    client.transport.write(b"lost")
    server.transport.write(b"heard")
    await asyncio.sleep(100)
    assert (client.received, server.received) == (b"heard", b"")
    network.heal("b")
    assert await server.until_received(4) == b"lost"


async def test_connecting_over_a_cut_waits_and_gives_up_after_two_minutes(
    simulation: Simulation, network: SimulatedNetwork
) -> None:
    await network.host("b").listen("b", 1, Recorder)
    network.cut("a", "b")
    with pytest.raises(TimeoutError):
        await network.host("a").connect("b", 1, Recorder)
    assert 120 < simulation.loop.time() < 140
    connecting = asyncio.create_task(network.host("a").connect("b", 1, Recorder))
    await asyncio.sleep(5)
    network.heal()
    await asyncio.wait_for(connecting, 10)


async def test_a_reset_breaks_both_sides_of_the_connections_of_two_hosts_only(network: SimulatedNetwork) -> None:
    client, server = await pair(network)
    await network.host("b").listen("b", 1, Recorder)
    _, other = await network.host("c").connect("b", 1, Recorder)
    client.transport.write(DATA)
    network.reset("a", "b")
    await asyncio.sleep(100)
    assert isinstance(client.error, ConnectionResetError)
    assert isinstance(server.error, ConnectionResetError)
    assert server.received == b""
    assert not other.lost.is_set()


def test_close_sends_what_was_written_and_then_ends_both_sides() -> None:
    async def main(sim: Simulation, network: SimulatedNetwork) -> None:
        client, server = await pair(network)
        client.transport.write(DATA)
        client.transport.close()
        client.transport.write(b"after close")
        await server.lost.wait()
        await client.lost.wait()
        assert (server.received, server.ended) == (DATA, True)
        assert client.error is None
        assert server.error is None
        assert client.transport.is_closing()

    for seed in SEEDS:
        simulate(seed, main)


def test_a_half_open_connection_still_carries_the_other_way() -> None:
    async def main(sim: Simulation, network: SimulatedNetwork) -> None:
        client, server = await pair(network, HalfOpen)
        client.transport.write(b"question")
        client.transport.write_eof()
        with pytest.raises(RuntimeError, match="write_eof"):
            client.transport.write(b"more")
        assert await server.until_received(8) == b"question"
        await asyncio.sleep(100)
        assert server.ended
        server.transport.write(DATA)
        assert await client.until_received(len(DATA)) == DATA
        server.transport.close()
        await asyncio.sleep(100)
        assert client.ended
        client.transport.close()
        await client.lost.wait()
        assert (client.error, server.error) == (None, None)

    for seed in SEEDS:
        simulate(seed, main)


async def test_abort_drops_what_was_written_and_resets_the_peer(network: SimulatedNetwork) -> None:
    client, server = await pair(network)
    client.transport.write(DATA)
    client.transport.abort()
    await asyncio.sleep(100)
    assert client.error is None
    assert isinstance(server.error, ConnectionResetError)
    assert server.received == b""


def test_a_crash_is_noticed_by_the_peer_late_or_never_and_by_the_dead_not_at_all() -> None:
    async def main(sim: Simulation, network: SimulatedNetwork) -> bool:
        host = network.host("b")
        client, server = await pair(network)
        network.crash("b")
        client.transport.write(b"into the void")
        await asyncio.sleep(10_000)
        assert not server.lost.is_set()
        assert server.received == b""
        with pytest.raises(OSError, match="has crashed"):
            await host.listen("b", 0, Recorder)
        return client.lost.is_set()

    noticed = [simulate(seed, main) for seed in range(200)]
    assert 0.5 < sum(noticed) / len(noticed) < 1 - NEVER_NOTICED / 2
    assert not all(noticed)


def test_a_host_that_is_up_again_resets_those_who_still_send_to_its_former_self() -> None:
    async def main(sim: Simulation, network: SimulatedNetwork) -> None:
        client, server = await pair(network)
        network.crash("b")
        await asyncio.sleep(100)
        again = network.host("b")
        assert network.host("b") is again
        client.transport.write(b"are you there")
        await asyncio.sleep(100)
        assert isinstance(client.error, ConnectionResetError)
        assert not server.lost.is_set()
        await again.listen("b", 1, Recorder)
        await network.host("a").connect("b", 1, Recorder)

    for seed in SEEDS:
        simulate(seed, main)


async def test_what_a_protocol_starts_dies_with_the_process_that_listens(
    simulation: Simulation, network: SimulatedNetwork
) -> None:
    ticks: list[float] = []

    async def tick() -> None:
        for _ in range(1_000):
            await asyncio.sleep(1)
            ticks.append(simulation.loop.time())

    class Starter(Recorder):
        def data_received(self, data: bytes) -> None:
            self.task = asyncio.get_running_loop().create_task(tick())

    async def serve() -> None:
        await network.host("b").listen("b", 1, Starter)

    broker = simulation.process("broker")
    await broker.start(serve())
    transport, _ = await network.host("a").connect("b", 1, Recorder)
    transport.write(b"x")
    await asyncio.sleep(10)
    assert ticks
    network.crash("b")
    broker.kill()
    count = len(ticks)
    await asyncio.sleep(100)
    assert len(ticks) == count


def test_a_protocol_that_raises_fails_the_simulation() -> None:
    class Faulty(Recorder):
        def data_received(self, data: bytes) -> None:
            raise ValueError("cannot parse")

    async def main(sim: Simulation, network: SimulatedNetwork) -> None:
        client, _ = await pair(network, Faulty)
        client.transport.write(b"x")
        await asyncio.sleep(100)

    with pytest.raises(SimulationFailed, match="cannot parse"):
        simulate(1, main)


def test_sockets_send_at_once_and_name_their_real_port() -> None:
    async def main() -> None:
        network = SocketNetwork()
        servers: list[Recorder] = []

        accepted = asyncio.Event()

        def accept() -> Recorder:
            servers.append(Recorder())
            accepted.set()
            return servers[-1]

        listener = await network.listen("127.0.0.1", 0, accept)
        transport, client = await network.connect(*listener.address, Recorder)
        transport.write(DATA)
        await accepted.wait()
        assert await servers[0].until_received(len(DATA)) == DATA
        for end in (transport, servers[0].transport):
            raw = end.get_extra_info("socket")
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await listener.close()
        await listener.close()
        transport.close()
        await asyncio.gather(client.lost.wait(), servers[0].lost.wait())
        with pytest.raises(ConnectionRefusedError):
            await network.connect(*listener.address, Recorder)

    asyncio.run(asyncio.wait_for(main(), 60))
