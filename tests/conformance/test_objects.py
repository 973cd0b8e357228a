"""What every object store promises, and what each kind does on a bad day."""

from __future__ import annotations

import array
import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator
from uuid import uuid4

import pytest

from braid.model.errors import (
    DiskFull,
    InvalidArgument,
    InvalidName,
    ObjectExists,
    ObjectMissing,
    ObjectStoreUnavailable,
)
from braid.ports.disk import Buffer
from braid.ports.os_disk import OsDisk
from braid.storage.objects.disk import DRAFT_MARK, DiskObjects, pieces
from braid.storage.objects.remote import Probe, RemoteObjects, probe
from braid.storage.objects.store import Objects
from braid.storage.objects.urls import RemoteLimits
from braid.testing.sim.disk import DiskFaults, SimulatedDisk
from braid.testing.sim.loop import Simulation, run_simulation
from braid.testing.sim.objects import MemoryObjects
from tests.conformance.objects_factories import (
    BRISK,
    PLACES,
    Handler,
    Place,
    open_s3,
    place_of,
    s3_for_tests,
    serving,
    told,
)
from tests.kits.s3_server import SECRET, S3Server, unused_port

BOUND_S = 15.0
"""Far above what the limits of these tests allow, and below the 30 s that the library would take by itself."""
LONG, DEEP = "x" * 256, "/".join(["x" * 200] * 5)
Call = Callable[[Objects], Awaitable[object]]
EVERY_CALL: dict[str, Call] = {
    "create": lambda objects: objects.create("a/b", [b"content"]),
    "read": lambda objects: objects.read("a/b", 0, 10),
    "read nothing": lambda objects: objects.read("a/b", 0, 0),
    "stat": lambda objects: objects.stat("a/b"),
    "list": lambda objects: objects.list("a"),
    "delete": lambda objects: objects.delete("a/b"),
    "delete below": lambda objects: objects.delete_below("a"),
}


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with s3_for_tests() as server:
        yield server


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request)


async def content_of(objects: Objects, name: str) -> bytes:
    return bytes(await objects.read(name, 0, (await objects.stat(name)).size + 1))


class TestEveryStore:
    def test_an_object_reads_back_as_it_was_created(self, place: Place) -> None:
        async def story(objects: Objects) -> None:
            signed = memoryview(array.array("b", [-1, 2, -3]))
            wide = memoryview(array.array("q", [1, 2]))
            parts: list[Buffer] = [b"bytes", b"", bytearray(b"array"), memoryview(b"a view")[2:], signed, wide]
            await objects.create("t/ns/n/0000-ffff-0/00000000000000000000-1.chunk", parts)
            stat = await objects.stat("t/ns/n/0000-ffff-0/00000000000000000000-1.chunk")
            assert stat.name == "t/ns/n/0000-ffff-0/00000000000000000000-1.chunk"
            expected = b"bytes" + b"array" + b"view" + b"\xff\x02\xfd" + wide.tobytes()
            assert stat.size == len(expected)
            assert stat.modified_us > 0
            assert await content_of(objects, stat.name) == expected

        place.run(story)

    @pytest.mark.parametrize("parts", [[], [b""], [b"", bytearray()]], ids=["no parts", "an empty part", "two"])
    def test_an_object_may_be_empty(self, place: Place, parts: list[bytes]) -> None:
        async def story(objects: Objects) -> None:
            await objects.create("empty", parts)
            assert (await objects.stat("empty")).size == 0
            assert await objects.read("empty", 0, 0) == b""
            assert await objects.read("empty", 0, 10) == b""
            assert [stat.name for stat in await objects.list("")] == ["empty"]

        place.run(story)

    def test_an_object_of_20_mib_in_uneven_parts_reads_back(self, place: Place) -> None:
        content = random.Random(1).randbytes(20 << 20)
        cuts = [0, 1, 9 << 20, (9 << 20) + 3, 19 << 20, len(content)]
        parts = [memoryview(content)[start:end] for start, end in itertools.pairwise(cuts)]

        async def story(objects: Objects) -> None:
            await objects.create("big", parts)
            assert await content_of(objects, "big") == content
            assert await objects.read("big", (9 << 20) - 5, 11) == content[(9 << 20) - 5 : (9 << 20) + 6]

        place.run(story)

    @pytest.mark.parametrize(
        ("start", "length", "expected"),
        [
            (0, 10, b"0123456789"),
            (3, 4, b"3456"),
            (9, 1, b"9"),
            (0, 0, b""),
            (5, 0, b""),
            (7, 100, b"789"),
            (0, 1 << 40, b"0123456789"),
            (10, 1, b""),
            (10, 0, b""),
            (1_000, 5, b""),
        ],
    )
    def test_a_range_is_exact_and_shorter_only_at_the_end(
        self, place: Place, start: int, length: int, expected: bytes
    ) -> None:
        async def story(objects: Objects) -> None:
            await objects.create("digits", [b"0123", b"456789"])
            assert await objects.read("digits", start, length) == expected

        place.run(story)

    @pytest.mark.parametrize(("start", "length"), [(-1, 5), (0, -1)])
    def test_a_negative_range_is_refused(self, place: Place, start: int, length: int) -> None:
        async def story(objects: Objects) -> None:
            await objects.create("digits", [b"0123456789"])
            with pytest.raises(InvalidArgument, match="neither may be negative"):
                await objects.read("digits", start, length)

        place.run(story)

    def test_a_second_create_is_refused_and_the_first_content_kept(self, place: Place) -> None:
        async def story(objects: Objects) -> None:
            await objects.create("a/b", [b"first"])
            for again in (b"second, and longer", b"", b"first"):
                with pytest.raises(ObjectExists, match="'a/b'"):
                    await objects.create("a/b", [again])
            assert await content_of(objects, "a/b") == b"first"
            assert [stat.name for stat in await objects.list("")] == ["a/b"]

        place.run(story)

    def test_of_8_concurrent_creators_exactly_one_wins(self, place: Place) -> None:
        async def story(objects: Objects) -> None:
            contents = [b"creator %d" % n * 1_000 for n in range(8)]
            creating = [objects.create("new-folder/x", [content]) for content in contents]
            outcomes = await asyncio.gather(*creating, return_exceptions=True)
            winners = [content for content, outcome in zip(contents, outcomes) if outcome is None]
            assert sum(isinstance(outcome, ObjectExists) for outcome in outcomes) == 7
            assert [await content_of(objects, "new-folder/x")] == winners

        place.run(story)

    def test_what_was_never_created_is_missing(self, place: Place) -> None:
        async def story(objects: Objects) -> None:
            for name in ("nothing", "no/such/folder/nothing"):
                for call in (objects.read(name, 0, 1), objects.read(name, 0, 0), objects.stat(name)):
                    with pytest.raises(ObjectMissing, match=f"'{name}'"):
                        await call
            assert await objects.list("") == []
            assert await objects.list("no/such") == []

        place.run(story)

    def test_a_listing_has_all_depths_in_order_of_names_and_only_that_folder(self, place: Place) -> None:
        names = ["a-c/x", "a/b", "a/bc", "a/c/1", "a/c/2/deep/er", "a/c-d", "a/c.d", "a/c0/1", "a%2Fb=1", "ab", "b"]

        async def story(objects: Objects) -> None:
            for name in reversed(names):
                await objects.create(name, [name.encode()])
            everything = await objects.list("")
            assert [stat.name for stat in everything] == sorted(names)
            assert everything == [await objects.stat(name) for name in sorted(names)]
            for folder in ("a", "a/c", "a/c/2", "a/c/2/de", "nothing"):
                below = sorted(name for name in names if name.startswith(f"{folder}/"))
                assert [stat.name for stat in await objects.list(folder)] == below

        place.run(story)

    def test_everything_below_a_folder_can_be_deleted_and_nothing_beside_it(self, place: Place) -> None:
        async def story(objects: Objects) -> None:
            for name in ("a/b/c", "a/b/d/e", "a/bb", "z"):
                await objects.create(name, [b"old"])
            for _ in range(2):
                await objects.delete_below("a/b")
                await objects.delete_below("never/there")
            assert [stat.name for stat in await objects.list("")] == ["a/bb", "z"]
            await objects.create("a/b/c", [b"new"])
            assert await content_of(objects, "a/b/c") == b"new"

        place.run(story)

    def test_only_empty_folders_are_removed(self, place: Place) -> None:
        async def story(objects: Objects) -> None:
            for name in ("a/b/c/d", "a/d/e"):
                await objects.create(name, [b"old"])
            for folder in ("a", "a/b", "never/there"):
                await objects.remove_empty_folders(folder)
            assert [stat.name for stat in await objects.list("")] == ["a/b/c/d", "a/d/e"]
            await objects.delete("a/b/c/d")
            for _ in range(2):
                await objects.remove_empty_folders("a/b")
            await objects.create("a/b/c/d", [b"new"])
            assert await content_of(objects, "a/b/c/d") == b"new"

        place.run(story)

    def test_delete_can_be_repeated_and_frees_the_name(self, place: Place) -> None:
        async def story(objects: Objects) -> None:
            await objects.create("a/b", [b"old"])
            await objects.create("a/c", [b"other"])
            for _ in range(2):
                await objects.delete("a/b")
                await objects.delete("never/there")
            with pytest.raises(ObjectMissing):
                await objects.read("a/b", 0, 1)
            assert [stat.name for stat in await objects.list("a")] == ["a/c"]
            await objects.create("a/b", [b"new"])
            assert await content_of(objects, "a/b") == b"new"

        place.run(story)

    @pytest.mark.parametrize(
        "name",
        ["", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a b", "ä", "~a", "a\n", "a\0", LONG, DEEP],
        ids=repr,
    )
    def test_a_bad_name_is_refused(self, place: Place, name: str) -> None:
        async def story(objects: Objects) -> None:
            calls = [objects.create(name, [b"x"]), objects.read(name, 0, 1), objects.stat(name), objects.delete(name)]
            for call in [*calls, objects.list(name)] if name else calls:
                with pytest.raises(InvalidName, match="cannot name an object"):
                    await call
            assert await objects.list("") == []

        place.run(story)

    def test_the_longest_name_works(self, place: Place) -> None:
        name = "/".join(["x" * 255] * 3)

        async def story(objects: Objects) -> None:
            await objects.create(name, [b"x"])
            assert await content_of(objects, name) == b"x"

        place.run(story)

    def test_the_probe_finds_that_create_only_is_honoured_and_leaves_nothing(self, place: Place) -> None:
        async def story(objects: Objects) -> None:
            assert await probe(objects) is Probe.HONOURED
            assert Probe.HONOURED.warning is None
            assert await objects.list("") == []

        place.run(story)


class OverwritingObjects(MemoryObjects):
    """As some stores behave that do not know the condition."""

    async def create(self, name: str, parts: object) -> None:
        await self.delete(name)
        await super().create(name, parts)  # type: ignore[arg-type]


def test_the_probe_warns_of_a_store_that_overwrites() -> None:
    async def story(objects: Objects) -> None:
        assert await probe(objects, creators=1) is Probe.IGNORED
        assert "ignores the create-only condition" in (Probe.IGNORED.warning or "")
        assert await objects.list("") == []

    asyncio.run(told(story, OverwritingObjects()))


class TestS3:
    @pytest.mark.parametrize("call", EVERY_CALL.values(), ids=EVERY_CALL)
    def test_a_server_that_is_not_there_is_unavailable_not_empty(self, s3_server: S3Server, call: Call) -> None:
        nowhere = f"s3://braid/prefix?region=us-east-1&endpoint=http://127.0.0.1:{unused_port()}"
        expect_unavailable(nowhere, BRISK, call)

    @pytest.mark.parametrize("call", EVERY_CALL.values(), ids=EVERY_CALL)
    def test_a_server_that_never_answers_is_unavailable_within_the_limits(
        self, s3_server: S3Server, call: Call
    ) -> None:
        limits = RemoteLimits(
            connect_timeout_s=1,
            request_timeout_s=0.2,
            retries=1,
            first_pause_s=0.01,
            longest_pause_s=0.05,
            retry_window_s=1,
        )

        async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async def main() -> None:
            async with serving(silence) as url:
                await unavailable(url, limits, call)

        asyncio.run(main())

    @pytest.mark.parametrize("call", EVERY_CALL.values(), ids=EVERY_CALL)
    def test_a_missing_bucket_is_unavailable_not_empty(self, s3_server: S3Server, call: Call) -> None:
        expect_unavailable(s3_server.url("prefix", bucket="no-such-bucket"), BRISK, call)

    @pytest.mark.parametrize("call", EVERY_CALL.values(), ids=EVERY_CALL)
    def test_wrong_credentials_are_unavailable_and_never_shown(
        self, s3_server: S3Server, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-" + SECRET)
        message = expect_unavailable(s3_server.url("prefix"), BRISK, call)
        assert SECRET not in message
        assert "403" in message

    def test_a_create_whose_answer_was_lost_finds_its_own_object(self, s3_server: S3Server) -> None:
        async def main() -> None:
            async with serving(first_answer_lost(s3_server)) as url:

                async def story(objects: Objects) -> None:
                    with pytest.raises(ObjectExists):
                        await objects.create("mine", [b"my content"])
                    assert await content_of(objects, "mine") == b"my content"

                await told(story, open_s3(url))

        asyncio.run(main())

    def test_close_waits_for_the_requests_of_cancelled_callers(self, s3_server: S3Server) -> None:
        async def main() -> None:
            arrived, answer = asyncio.Event(), asyncio.Event()

            async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                arrived.set()
                await answer.wait()
                writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

            async with serving(slow) as url:
                objects = open_s3(url)
                reading = asyncio.create_task(objects.read("a", 0, 1))
                await arrived.wait()
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                closing = asyncio.create_task(objects.close())
                for _ in range(10):
                    await asyncio.sleep(0)
                assert not closing.done()
                answer.set()
                await asyncio.wait_for(closing, 20)
                with pytest.raises(ObjectStoreUnavailable, match="was closed"):
                    await objects.read("a", 0, 1)

        asyncio.run(main())

    def test_a_foreign_object_in_the_bucket_is_not_listed(self, s3_server: S3Server) -> None:
        async def story(objects: Objects) -> None:
            assert isinstance(objects, RemoteObjects)
            await objects.create("ours", [b"x"])
            await objects._store.put_async(f"{objects._prefix}not ours", b"x")
            assert [stat.name for stat in await objects.list("")] == ["ours"]

        asyncio.run(told(story, open_s3(s3_server.url(f"foreign/{uuid4().hex}"))))


def first_answer_lost(server: S3Server) -> Handler:
    """A relay to the server that cuts the first connection when its answer comes back."""
    connections = 0

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        first = connections == 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def forward() -> None:
            while data := await reader.read(65_536):
                far_writer.write(data)

        forwarding = asyncio.create_task(forward())
        try:
            while data := await far_reader.read(65_536):
                if first:
                    writer.transport.abort()
                    return
                writer.write(data)
        finally:
            forwarding.cancel()
            await asyncio.gather(forwarding, return_exceptions=True)
            far_writer.close()
            await far_writer.wait_closed()

    return relay


async def unavailable(url: str, limits: RemoteLimits, call: Call) -> str:
    with pytest.raises(ObjectStoreUnavailable) as caught:
        await told(call, open_s3(url, limits), BOUND_S)
    assert caught.value.__cause__ is None
    assert "\n" not in str(caught.value)
    return str(caught.value)


def expect_unavailable(url: str, limits: RemoteLimits, call: Call) -> str:
    return asyncio.run(unavailable(url, limits, call))


class TestDisk:
    @pytest.mark.parametrize("seed", range(150))
    def test_a_crash_while_creating_leaves_whole_objects_and_drafts_only(self, seed: int) -> None:
        async def main(simulation: Simulation) -> None:
            luck = simulation.random
            disk = SimulatedDisk(luck)
            contents = {f"t/{n % 3}/{n}": luck.randbytes(luck.choice((0, 1, 700, 9_000, 70_000))) for n in range(8)}
            confirmed: set[str] = set()
            dying = DiskObjects(disk.mount(), "/objects", random=luck)

            async def create(name: str) -> None:
                await asyncio.sleep(luck.uniform(0, 0.01))
                await dying.create(name, [memoryview(contents[name])[:5_000], contents[name][5_000:]])
                confirmed.add(name)

            process = simulation.process("creator")
            for name in contents:
                process.start(create(name))
            await asyncio.sleep(luck.uniform(0, 0.02))
            disk.crash()
            process.kill()

            objects = DiskObjects(disk, "/objects", random=luck)
            found = [stat.name for stat in await objects.list("")]
            assert confirmed <= set(found) <= set(contents)
            for name in found:
                assert await content_of(objects, name) == contents[name]
            await objects.sweep(older_than_us=1 << 62)
            assert [path.removeprefix("/objects/") for path in disk.paths()] == found
            for name in sorted(contents.keys() - set(found)):
                await objects.create(name, [contents[name]])
            assert [stat.name for stat in await objects.list("")] == sorted(contents)

        run_simulation(seed, main)

    def test_a_full_disk_says_so_and_keeps_no_draft(self) -> None:
        async def main(simulation: Simulation) -> None:
            disk = SimulatedDisk(simulation.random, faults=DiskFaults(capacity_bytes=10_000))
            objects = DiskObjects(disk, "/objects", random=simulation.random)
            await objects.create("fits", [bytes(9_000)])
            with pytest.raises(DiskFull):
                await objects.create("too/large", [bytes(9_000)])
            assert disk.paths() == ["/objects/fits"]

        run_simulation(1, main)

    def test_a_failed_sync_creates_nothing_and_a_new_try_starts_afresh(self) -> None:
        async def main(simulation: Simulation) -> None:
            disk = SimulatedDisk(simulation.random)
            objects = DiskObjects(disk, "/objects", random=simulation.random)
            await objects.create("a/first", [b"x"])
            disk.faults = DiskFaults(sync_failure=1.0)
            with pytest.raises(ObjectStoreUnavailable, match="'a/b'"):
                await objects.create("a/b", [b"content"])
            disk.faults = DiskFaults()
            assert [stat.name for stat in await objects.list("")] == ["a/first"]
            await objects.create("a/b", [b"content"])
            disk.crash()
            assert await content_of(objects, "a/b") == b"content"

        run_simulation(1, main)

    @pytest.mark.parametrize("seed", range(30))
    def test_what_a_repeated_deletion_found_gone_does_not_come_back(self, seed: int) -> None:
        """The first try removes the names and fails to sync that."""

        async def main(simulation: Simulation) -> None:
            disk = SimulatedDisk(simulation.random)
            objects = DiskObjects(disk, "/objects", random=simulation.random)
            for name in ("a/b", "a/c/d", "beside"):
                await objects.create(name, [b"content"])
            disk.faults = DiskFaults(sync_failure=0.7)
            while True:
                try:
                    await objects.delete_below("a")
                    break
                except ObjectStoreUnavailable:
                    continue
            disk.crash()
            assert disk.paths() == ["/objects/beside"]

        run_simulation(seed, main)

    def test_a_read_error_is_unavailable_not_missing(self) -> None:
        async def main(simulation: Simulation) -> None:
            disk = SimulatedDisk(simulation.random)
            objects = DiskObjects(disk, "/objects", random=simulation.random)
            await objects.create("a", [b"content"])
            disk.faults = DiskFaults(read_failure=1.0)
            with pytest.raises(ObjectStoreUnavailable, match="could not read object 'a'"):
                await objects.read("a", 0, 1)

        run_simulation(1, main)

    def test_sweep_removes_old_drafts_only(self, tmp_path: object) -> None:
        async def story(objects: Objects) -> None:
            assert isinstance(objects, DiskObjects)
            await objects.create("a/b", [b"content"])
            draft = await disk.open(f"{tmp_path}/a/{DRAFT_MARK}0123456789abcdef", create=True)
            await draft.write(0, [b"half of someth"], sync=True)
            await draft.close()
            assert [stat.name for stat in await objects.list("")] == ["a/b"]
            [written_us] = [file.modified_us for file in await disk.list(f"{tmp_path}/a") if file.name != "b"]
            assert await objects.sweep(older_than_us=written_us) == 0
            assert await objects.sweep(older_than_us=written_us + 1) == 1
            assert [file.name for file in await disk.list(f"{tmp_path}/a")] == ["b"]

        disk = OsDisk()
        asyncio.run(told(story, DiskObjects(disk, str(tmp_path))))
        asyncio.run(disk.close())

    def test_a_creator_whose_draft_is_swept_fails_and_creates_nothing(self) -> None:
        async def main(simulation: Simulation) -> None:
            disk = SimulatedDisk(simulation.random)
            objects = DiskObjects(disk, "/objects", random=simulation.random)
            creating = asyncio.create_task(objects.create("a", [b"content"]))
            while not await objects.sweep(older_than_us=1 << 62):
                pass
            with pytest.raises(ObjectStoreUnavailable, match="try again"):
                await creating
            assert disk.paths() == []

        run_simulation(1, main)

    @pytest.mark.parametrize("seed", range(30))
    def test_a_cancelled_create_leaves_a_whole_object_or_at_most_a_draft(self, seed: int) -> None:
        async def main(simulation: Simulation) -> None:
            disk = SimulatedDisk(simulation.random)
            objects = DiskObjects(disk, "/objects", random=simulation.random)
            creating = asyncio.create_task(objects.create("a", [b"content"]))
            await asyncio.sleep(simulation.random.uniform(0, 0.006))
            creating.cancel()
            await asyncio.gather(creating, return_exceptions=True)
            await asyncio.sleep(1)  # The disk still ends what it had begun.
            assert [stat.name for stat in await objects.list("")] in ([], ["a"])
            await objects.sweep(older_than_us=1 << 62)
            if disk.paths():
                assert disk.paths() == ["/objects/a"]
                assert await content_of(objects, "a") == b"content"

        run_simulation(seed, main)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pieces_are_the_same_bytes_in_groups_of_the_limit(limit: int) -> None:
    parts: list[Buffer] = [b"", b"a", b"bcdefgh", bytearray(b"ijk"), memoryview(b"lmnopq"), b""]
    groups = list(pieces(parts, limit))
    assert b"".join(b"".join(group) for group in groups) == b"abcdefghijklmnopq"
    sizes = [sum(map(len, group)) for group in groups]
    assert all(size == limit for size in sizes[:-1])
    assert 0 < sizes[-1] <= limit
