"""The documents say what the code does: links resolve, byte tables are the structs, examples are made by the code."""

from __future__ import annotations

import functools
import re
import struct
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from braid.metadata.memory import MemoryStore
from braid.metadata.paths import chunk, current_chunk, sealed_state
from braid.model import errors, topic
from braid.model.batch import header as batch
from braid.model.batch.columns import encode_batch
from braid.model.batch.header import NO_KEYS, Flag, control_batch, parse_header
from braid.model.ids import Epoch, Offset, Revision
from braid.model.layout import Layout
from braid.storage import cache, handles, reader
from braid.storage import chunk as chunks
from braid.storage.cache import HotCache
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.history import catalog, exporter
from braid.storage.history.catalog import ChunkDescriptor, Frontier, SealedState
from braid.storage.history.manifest import SegmentManifest, TopicManifest, write_topic_manifest
from braid.storage.log import checkpoint, preallocated, producers, promise, wal
from braid.storage.log.checkpoint import ClosedFile, LogCheckpoint
from braid.storage.log.context import FileConfig, LogConfig
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation, run_simulation
from braid.testing.sim.objects import MemoryObjects

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])

TOPIC, DESCRIPTOR = "public/default/orders", "0000-ffff-0"
NOON_US = 1_700_000_000_000_000


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose_of(page: Path) -> str:
    """The page without fenced and indented code."""
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


# ── links and names ──────────────────────────────────────────────────────────────────────────────────────────────────


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{named(page)} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{named(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_file_and_test_that_is_named_exists(page: Path) -> None:
    for path, test in re.findall(r"`((?:src|tests|examples|docs|tools)/[\w/.-]+)(?:::(\w+))?`", text_of(page)):
        assert (ROOT / path).exists(), f"{named(page)} names {path}"
        if test:
            assert f"def {test}(" in text_of(ROOT / path), f"{named(page)} names {path}::{test}"


def test_the_index_links_to_every_page() -> None:
    index = text_of(DOCS / "README.md")
    linked = {(DOCS / target.partition("#")[0]).resolve() for target in re.findall(r"\]\(([^)\s]+)\)", index)}
    missing = [named(page) for page in DOCS.rglob("*.md") if page not in linked and page != DOCS / "README.md"]
    assert missing == []


def test_the_index_of_decisions_lists_each_with_its_own_title() -> None:
    index = text_of(DOCS / "decisions" / "README.md")
    for page in sorted((DOCS / "decisions").glob("0*.md")):
        assert f"]({page.name})" in index, page.name
        assert re.match(r"# 0*(\d+)", text_of(page)), f"{page.name} begins with its number"


def test_the_readme_says_how_to_run_the_demo_and_the_tests() -> None:
    readme = text_of(ROOT / "README.md")
    assert "make demo" in readme
    assert "make test" in readme


def test_the_readme_and_the_description_of_the_package_promise_only_what_there_is() -> None:
    readme = text_of(ROOT / "README.md")
    description = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["description"]
    if "not released yet" in readme:
        assert not re.search(r"pip install '?braidmq", readme), "an index has no such package yet"
    if "no replicas yet" in readme:
        assert "Without replicas yet" in description
    assert "alpha" in readme.lower()
    assert "alpha" in description


def test_the_numbers_in_the_readme_stand_on_the_page_that_explains_them() -> None:
    section = text_of(ROOT / "README.md").partition("\n## How fast\n")[2].partition("\n## ")[0]
    numbers = re.findall(r"\*\*(.+?)\*\*", section)
    assert len(numbers) >= 3
    measured = text_of(DOCS / "operating" / "performance.md")
    for number in numbers:
        assert number in measured, number


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_error_code_is_explained_once_and_says_whether_to_retry() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (yes|no) \|", text_of(DOCS / "errors.md"), flags=re.MULTILINE)
    codes = [code for code, _ in rows]
    raised = [code for code, kind in errors.BraidError.by_code.items() if kind.__module__ == errors.__name__]
    assert sorted(codes) == sorted(raised)
    for code, retriable in rows:
        assert (retriable == "yes") == errors.BraidError.by_code[code].retriable, code


def test_every_error_code_in_the_table_of_bad_days_exists() -> None:
    table = text_of(DOCS / "storage.md").partition("## Bad days")[2]
    codes = re.findall(r"^\| [^|]+ \| `([a-z-]+)`", table, flags=re.MULTILINE)
    assert codes
    assert set(codes) <= set(errors.BraidError.by_code)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────

LIMITED = {
    "LogConfig": LogConfig,
    "FileConfig": FileConfig,
    "RetentionPolicy": RetentionPolicy,
    "batch": batch,
    "cache": cache,
    "catalog": catalog,
    "chunk": chunks,
    "exporter": exporter,
    "handles": handles,
    "producers": producers,
    "reader": reader,
    "preallocated": preallocated,
    "wal": wal,
}


def limits_in_docs() -> dict[str, str]:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| ([^|]+) \|", text_of(DOCS / "storage.md"), flags=re.MULTILINE)
    return {name: default.strip() for name, default in rows}


def shown(name: str, value: object) -> str:
    match value:
        case None:
            return "keep for ever"
        case bool():
            return "yes" if value else "no"
        case topic.Durability():
            return value.value
        case int() | float() if name.endswith(("_S", "_s")):
            return f"{value:g} s"
        case int() if value % (1 << 30) == 0:
            return f"{value >> 30} GiB"
        case int() if value % (1 << 20) == 0:
            return f"{value >> 20} MiB"
        case int() if value % (1 << 10) == 0 and name.lower().endswith("bytes"):
            return f"{value >> 10} KiB"
    return f"{value:,}"


def test_every_documented_limit_has_the_documented_default() -> None:
    for name, default in limits_in_docs().items():
        owner, _, attribute = name.partition(".")
        thing = LIMITED[owner]
        value = getattr(thing(), attribute) if isinstance(thing, type) else getattr(thing, attribute)
        assert default == shown(attribute, value), name


def test_every_setting_of_the_log_is_documented() -> None:
    settings = {f"LogConfig.{name}" for name in LogConfig.__struct_fields__ if name not in ("files", "on_sync")}
    settings |= {f"FileConfig.{name}" for name in FileConfig.__struct_fields__}
    settings |= {f"RetentionPolicy.{name}" for name in RetentionPolicy.__struct_fields__}
    assert settings <= set(limits_in_docs())


# ── byte tables ──────────────────────────────────────────────────────────────────────────────────────────────────────

CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q"}
TABLES = {
    ("record-batch.md", "Header"): batch._HEADER,
    ("chunk.md", "Index"): chunks._INDEX,
    ("chunk.md", "Producer rows"): producers._ROW,
    ("chunk.md", "Trailer"): chunks._TRAILER,
}


class Field(NamedTuple):
    at: int
    size: int
    kind: str


def byte_table(page: str, heading: str) -> list[Field]:
    section = text_of(DOCS / "formats" / page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", section, flags=re.MULTILINE)
    return [Field(int(at), int(size), kind) for at, size, kind in rows]


@pytest.mark.parametrize(("page", "heading"), TABLES, ids=str)
def test_the_byte_table_is_the_struct(page: str, heading: str) -> None:
    code, at = "<", 0
    for field in byte_table(page, heading):
        assert field.at == at
        at += field.size
        part = {"bytes": f"{field.size}s", "zeros": f"{field.size}x"}.get(field.kind) or CODES[field.kind]
        assert struct.calcsize("<" + part) == field.size
        code += part
    assert code == TABLES[page, heading].format


# ── examples ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def hex_block(page: str, heading: str) -> bytes:
    """The bytes of the hex dump below a heading: address, four groups of four bytes, words."""
    section = text_of(DOCS / "formats" / page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = bytearray()
    rows = re.findall(r"^    ([0-9a-f]{2})  ((?:[0-9a-f]{2} {1,2}){1,16})", section, flags=re.MULTILINE)
    for address, row in rows:
        assert int(address, 16) == len(found), f"{page}: the row at {address}"
        found += bytes.fromhex(row)
    return bytes(found)


def json_block(page: str, heading: str) -> bytes:
    section = text_of(DOCS / "formats" / page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return section.partition("```json\n")[2].partition("```")[0].encode()


def documented_name(page: str, what: str, *, folder: str = "", revision: int = 0) -> str:
    """The name that the page's pattern gives this thing of the example log."""
    text = text_of(DOCS / "formats" / page)
    patterns = re.findall(rf"^\| \[{what}\][^|]+\|[^|]+\| `([^`]+)` \|", text, flags=re.MULTILINE)
    patterns += re.findall(rf"^    (\S+\.{what})$", text, flags=re.MULTILINE)
    (pattern,) = patterns
    fields = {"topic": TOPIC, "descriptor": DESCRIPTOR, "revision": revision, "base": 0, "next": 4, "epoch": 3}
    return folder + str(pattern).format(**fields)


class Example(NamedTuple):
    """What is left of a small log: four records of producer 7, handed over by broker-1 in epoch 3."""

    names: dict[str, bytes]
    """Every object and every metadata key of the log, by name."""
    chunk_bytes: bytes
    manifest: bytes
    topic_manifest: bytes
    descriptor: bytes
    frontier: bytes
    sealed: bytes


@functools.cache
def example() -> Example:
    async def main(simulation: Simulation) -> Example:
        disk = SimulatedDisk(simulation.random)
        objects, store = MemoryObjects(simulation.clock), MemoryStore(simulation.clock)
        context = StorageContext(
            broker_id="broker-1",
            disk=disk,
            folder="wal",
            store=store,
            objects=objects,
            mode=StorageMode.SHARED_FS,
            clock=simulation.clock,
            cache=HotCache(),
            handles=ReadHandles(disk),
            footers=FooterCache(),
            preallocated=None,
            random=simulation.random,
        )
        segment = await SegmentStorage.open(context, TOPIC, DESCRIPTOR, Epoch(3), LogConfig())
        keys = [b"alpha", b"key-0", None]
        first = encode_batch([b"paid", b"sent", b"ping"], keys=keys, now_us=NOON_US, producer_id=7, first_sequence=0)
        await segment.log.confirm(segment.append(first))
        second = encode_batch([b"paid"], keys=[b"key-1"], now_us=NOON_US + 1_000_000, producer_id=7, first_sequence=3)
        await segment.log.confirm(segment.append(second))
        await segment.hand_over()
        await write_topic_manifest(objects, TOPIC, Revision(5), Layout.initial(2), topic_id=7)
        names = {stat.name: await objects.read(stat.name, 0, 1 << 20) for stat in await objects.list(TOPIC)}
        names |= {entry.key: entry.value for entry in (await store.list("/storage/")).entries}
        # When it was sealed depends on how long the simulated disk took, which is no part of the format.
        sealed = msgspec.json.decode(names[sealed_state(TOPIC, DESCRIPTOR)], type=SealedState)
        sealed = msgspec.structs.replace(sealed, timestamp=NOON_US + 2_000_000)
        # The digest is of a transaction that contains that time.
        frontier = msgspec.json.decode(names[current_chunk(TOPIC, DESCRIPTOR)], type=Frontier)
        assert len(frontier.digest) == 16
        frontier = msgspec.structs.replace(frontier, digest="9f86d081884c7d65")
        return Example(
            names,
            names[documented_name("chunk.md", "chunk", folder=f"{TOPIC}/{DESCRIPTOR}/")],
            names[documented_name("manifest.md", "segment manifest", revision=4)],
            names[documented_name("manifest.md", "topic manifest", revision=5)],
            names[chunk(TOPIC, DESCRIPTOR, Offset(0))],
            msgspec.json.encode(frontier),
            msgspec.json.encode(sealed),
        )

    return run_simulation(0, main)


@pytest.mark.parametrize("what", ["chunk descriptor", "frontier", "sealed state"])
def test_every_documented_key_is_the_one_that_the_code_writes(what: str) -> None:
    assert documented_name("manifest.md", what) in example().names


def test_the_example_footer_is_what_the_code_writes_and_reads() -> None:
    documented = hex_block("chunk.md", "A footer, byte by byte")
    made = example().chunk_bytes
    footer = chunks.decode_footer(documented)
    assert made[-len(documented) :] == documented
    assert (footer.base_offset, footer.next_offset, footer.size) == (0, 4, len(documented))
    assert footer.batch_bytes + footer.size == len(made)
    assert [run.batches for run in footer.index.runs] == [2]
    assert list(footer.producers.rows()) == [documented[40:72], documented[72:104]]


def test_the_example_checkpoint_is_what_the_code_writes_and_reads() -> None:
    documented = hex_block("wal.md", "A checkpoint, byte by byte")
    name = wal.wal_name(0)
    size = len(example().chunk_bytes)
    batch_bytes = chunks.decode_footer(example().chunk_bytes).batch_bytes
    file = ClosedFile(
        name, Offset(0), Offset(4), batch_bytes, size, (Epoch(3),), 0x1A2B3C4D, NOON_US + 1_000_000, False, Epoch(3)
    )
    assert checkpoint.decode(documented) == LogCheckpoint(Offset(4), (file,))
    assert checkpoint.encode(LogCheckpoint(Offset(4), (file,))) == documented


def test_the_example_of_a_replicas_mark_is_what_the_code_writes() -> None:
    async def written(simulation: Simulation) -> bytes:
        disk = SimulatedDisk(simulation.random)
        await disk.make_folder("orders")
        await promise.write(disk, "orders", promise.ReplicaMark(promised=Epoch(7), member=True))
        file = await disk.open(f"orders/{promise.NAME}")
        return await file.read(0, 4096)

    section = text_of(DOCS / "formats" / "wal.md").partition("\n## The file replica\n")[2].partition("\n## ")[0]
    assert f"    {run_simulation(1, written).decode()}\n" in section


@pytest.mark.parametrize("flag", Flag, ids=lambda flag: str(flag.name))
def test_control_batches_are_as_documented(flag: Flag) -> None:
    page = text_of(DOCS / "formats" / "wal.md")
    header = parse_header(control_batch(flag))
    assert (header.size, header.body_length, header.count) == (96, 0, 0)
    assert (header.min_key_hash, header.max_key_hash) == NO_KEYS
    assert f"| {flag.name} | {flag.value} |" in page


def documented_examples() -> Iterator[tuple[str, str, type[msgspec.Struct], bytes]]:
    yield "manifest.md", "Segment manifest", SegmentManifest, example().manifest
    yield "manifest.md", "Topic manifest", TopicManifest, example().topic_manifest
    yield "manifest.md", "Chunk descriptor", ChunkDescriptor, example().descriptor
    yield "manifest.md", "Frontier", Frontier, example().frontier
    yield "manifest.md", "Sealed state", SealedState, example().sealed


def test_the_json_examples_are_what_the_code_writes_and_reads() -> None:
    for page, heading, kind, made in documented_examples():
        documented = json_block(page, heading)
        decoded = msgspec.json.decode(documented, type=kind)
        assert decoded == msgspec.json.decode(made, type=kind), heading
        # Every field is shown, none that the code does not know.
        assert msgspec.json.decode(documented) == msgspec.json.decode(made), heading


def test_every_field_of_the_json_examples_is_explained() -> None:
    for page, heading, _, made in documented_examples():
        section = text_of(DOCS / "formats" / page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        explained = set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))
        assert set(msgspec.json.decode(made)) <= explained, heading
