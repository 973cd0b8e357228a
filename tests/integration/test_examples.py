"""Every example runs as a user runs it, and says what its page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from braid.testing.processes import BrokerProcess
from tests.kits.etcd_server import free_ports

pytestmark = pytest.mark.processes


ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
"""Far above what a run takes (2 to 12 s), for machines that do much else."""


def run(command: list[str], folder: Path) -> str:
    scripts = Path(sys.executable).parent  # where `braid` is
    environment = {**os.environ, "TMPDIR": str(folder), "PATH": f"{scripts}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("storage")
    said = run([sys.executable, str(ROOT / "examples" / "storage.py")], folder)
    assert list(folder.iterdir()) == [], "the example leaves files behind"
    return said


def test_storage_continues_at_22_and_the_consumer_reads_chunks_then_the_wal(storage: str) -> None:
    assert re.search(
        r"stored and synced +22\.\.27\n +read 14\.\.21 +from \S+\.chunk\n +read 22\.\.27 +from \S+\.wal\n", storage
    )


def test_storage_refuses_the_old_owner_and_nothing_changes(storage: str) -> None:
    assert "refused (fenced)" in storage
    assert re.search(r"changed +nothing: ", storage)


def test_storage_says_how_much_recovery_cut_and_reads_all_that_was_confirmed(storage: str) -> None:
    cut = re.search(r"cut off +(\d+) torn bytes", storage)
    confirmed = re.search(r"confirmed +28\.\.(\d+)", storage)
    again = re.search(r"read again +0\.\.(\d+)", storage)
    assert cut is not None
    assert int(cut[1]) > 0
    assert confirmed is not None
    assert again is not None
    assert int(again[1]) >= int(confirmed[1])


def test_storage_uses_no_colours_where_nobody_sees_them(storage: str) -> None:
    assert "\x1b" not in storage


def check_timeline(said: str) -> None:
    assert re.search(r"stored and synced +0\.\.21 by broker-0\n +consumed +0\.\.13", said)
    assert re.search(r"moved +from broker-0 to broker-1, .*\n +files left at broker-0 +0\n", said)
    assert re.search(r"stored and synced +22\.\.27 by broker-1\n +consumed +14\.\.27, without a gap", said)
    counts = re.search(r"sent and confirmed +([\d,]+) and ([\d,]+) records", said)
    assert counts is not None
    assert counts[1] == counts[2]
    assert int(counts[1].replace(",", "")) > 1_000
    for nothing in ("lost", "stored twice", "delivered again", "errors seen by the application"):
        assert re.search(rf"{nothing} +0\n", said), nothing
    assert "\x1b" not in said


def test_the_timeline_moves_a_topic_and_then_whole_brokers_under_load(tmp_path: Path) -> None:
    check_timeline(run([sys.executable, str(ROOT / "examples" / "timeline.py")], tmp_path))
    assert list(tmp_path.iterdir()) == [], "the example leaves files behind"


def test_segments_are_split_and_merged_under_load_and_each_customers_numbers_stay_in_order(tmp_path: Path) -> None:
    said = run([sys.executable, str(ROOT / "examples" / "split_and_merge.py")], tmp_path)
    assert re.search(r"segment 2 is split at hash c000 +[\d.]+ s; a record waited [\d,]+ ms at most\n", said)
    for nothing in ("not seen", "out of order"):
        assert re.search(rf"{nothing} +0\n", said), nothing
    drawing = said.partition("epoch ")[2].partition("SEGMENT")[0]
    for row in (
        r"0 +│0 +│",
        r"1 +│1 +│2 +│",
        r"2 +│ +│3 +│4 +│",
        r"3 +│5 +│ +│",
        r"4 +│6 +│7 +│8 +│ +│",
        r"5 +│9 broker-[01] +│",
    ):
        assert re.search(rf"\n +{row}\n", drawing), row
    assert "\x1b" not in said
    assert list(tmp_path.iterdir()) == [], "the example leaves files behind"


def test_a_lost_machine_costs_no_record_and_its_replica_is_made_again(tmp_path: Path) -> None:
    said = run([sys.executable, str(ROOT / "examples" / "lost_machine.py")], tmp_path)
    lost = re.search(r"(broker-\d), which owns the topic, is killed with SIGKILL", said)
    assert lost is not None
    assert re.search(r"the topic goes on +at broker-\d; a record waited [\d,]+ ms at most\n", said)
    rebuilt = said.partition("its replica is made again")[2]
    assert re.search(rf"\n +{lost[1]} +in-sync\n", rebuilt)
    for nothing in ("lost", "out of order"):
        assert re.search(rf"{nothing} +0\n", said), nothing
    assert re.search(r"longest pause +[\d,]+ ms\n", said)
    assert "\x1b" not in said
    assert list(tmp_path.iterdir()) == [], "the example leaves files behind"


def test_a_task_queue_does_every_task_once_and_buries_those_that_always_fail(tmp_path: Path) -> None:
    said = run([sys.executable, str(ROOT / "examples" / "task_queue.py"), "--tasks", "60"], tmp_path)
    assert re.search(r"finished after the signal +\d+ tasks; \d+ of them failed\n +exit code +0\n", said)
    image = said.partition("The life of image-")[2].partition("\n\n")[0]
    for row in (
        r"attempt 1, \w+ +.* again after 0\.1 s",
        r"attempt 2, \w+ +.* again after 0\.2 s",
        r"attempt 3, \w+ +done",
    ):
        assert re.search(row, image), row
    charge = said.partition("The life of charge-")[2].partition("\n\n")[0]
    assert re.search(r"attempt 4, \w+ +card \S+ has expired\n +dead letter +4 deliveries, reason: ValueError: ", charge)
    for what, count in (("sent", "60 tasks"), ("done", "54"), ("dead letters", "6, in topic tasks-dead")):
        assert re.search(rf"\n +{what} +{count}\n", said.partition("In the end:")[2]), what
    for nothing in ("done twice", "lost"):
        assert re.search(rf"{nothing} +0(\n|$)", said), nothing
    assert "\x1b" not in said
    assert list(tmp_path.iterdir()) == [], "the example leaves files behind"


def test_a_worker_of_the_task_queue_that_cannot_finish_in_time_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "task_queue.py"), "--seconds", "0.01"],
        env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "the tasks were not done within 0.01 s\n")


README, FIRST_STEPS = ROOT / "README.md", ROOT / "docs" / "first-steps.md"


def first_block(page: Path, language: str) -> str:
    """The page's first fenced block in this language."""
    block = page.read_text(encoding="utf-8").partition(f"```{language}\n")[2].partition("```")[0]
    assert block, f"{page.name} has no {language}"
    return block


def test_the_transcript_in_the_first_steps_is_what_the_commands_print(tmp_path: Path) -> None:
    """Ports and times differ from run to run; every other character is as it is printed."""
    transcript = first_block(FIRST_STEPS, "console")
    said = run(["bash", str(ROOT / "examples" / "first_steps.sh")], tmp_path)
    assert repeatable(said) == repeatable(transcript)
    assert list(tmp_path.iterdir()) == [], "the example leaves files behind"


def repeatable(text: str) -> list[str]:
    portless = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", text)
    timeless = re.sub(r" +TOOK$| +[\d.]+ m?s$", " TIME", portless, flags=re.MULTILINE)
    return timeless.strip().splitlines()


def test_the_transcript_in_the_readme_is_what_its_commands_print(tmp_path: Path) -> None:
    """Its commands run as they stand there, on free ports, in an empty folder."""
    transcript = first_block(README, "console")
    ports = dict(zip(("LISTEN", "ADMIN"), free_ports(2), strict=True))
    script = [f"export BRAID_{name}=127.0.0.1:{port}" for name, port in ports.items()]
    script += [f"export BRAID_URL=braid://127.0.0.1:{ports['LISTEN']}", "trap 'kill -9 $(jobs -p)' EXIT"]
    commands = re.findall(r"^\$ (.+)$", transcript, flags=re.MULTILINE)
    for command in commands:
        script += [f"printf '$ %s\\n' {shlex.quote(command)}", command]
        if command.startswith("kill -9"):
            script.append(f"wait {command.split()[-1]} 2>/dev/null || true")  # Bash would tell of the kill.
        if command.startswith("braid serve"):  # A person needs longer for the next line than a broker to start.
            script.append("until grep -qs 'is ready' broker.log; do sleep 0.05; kill -0 $! || exit 1; done")
    assert any(command.startswith("kill -9") for command in commands)
    path = tmp_path / "transcript.sh"
    path.write_text("\n".join(["set -e", *script]))
    assert run(["bash", str(path)], tmp_path).splitlines() == transcript.splitlines()


@pytest.mark.parametrize("page", [README, FIRST_STEPS], ids=lambda page: page.stem)
def test_the_snippet_on_a_page_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    snippet = first_block(page, "python")
    promised = re.findall(r"# prints (.+)", snippet)
    script = tmp_path / "snippet.py"
    with BrokerProcess(tmp_path / "data") as broker:
        assert snippet.count("braid://127.0.0.1:6660") == 1
        script.write_text(snippet.replace("braid://127.0.0.1:6660", broker.url))
        said = run([sys.executable, str(script)], tmp_path)
    assert promised
    assert said.splitlines() == promised


def test_the_shop_ships_every_order_once_and_in_order(tmp_path: Path) -> None:
    said = run([sys.executable, str(ROOT / "examples" / "shop.py")], tmp_path)
    shipped = re.search(r"anna shipped ([\d,]+) orders and ben ([\d,]+), each customer's in order", said)
    assert shipped is not None
    counts = [int(each.replace(",", "")) for each in shipped.groups()]
    assert sum(counts) == 10_000
    assert min(counts) > 0, "they share the work"
    assert "backlog is 0" in said
    assert "10,000 orders are worth 5,446.90 EUR" in said
