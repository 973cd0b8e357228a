"""What `braid pipeline audit` and `compact` print: a verdict, a table, and every defect with its place."""

from __future__ import annotations

import json

import pytest

from braid.cli.pipeline.audit import SHOWN_DEFECTS
from braid.cli.pipeline.audit import render as render_audit
from braid.cli.pipeline.compact import render as render_compact
from braid.cli.pipeline.report import print_report
from braid.spark.jobs import compact
from braid.spark.jobs.audit import job as audit


def audited(*defects: audit.Defect, notes: tuple[str, ...] = ()) -> audit.AuditReport:
    segment = audit.AuditedSegment(0, "0000-ffff", 3, 40, 4_000, 1 << 20, 5, 4_005, False)
    return audit.AuditReport(
        "topic://public/default/orders", not defects, (segment,), 3, 40, 4_000, 1 << 20, 2.0, defects, notes
    )


def compacted(
    *failures: compact.CompactFailure, dry_run: bool = False, notes: tuple[str, ...] = ()
) -> compact.CompactReport:
    segment = compact.CompactedSegment(0, "0000-ffff", 9, 2, 1, 8, 1 << 20)
    return compact.CompactReport(
        "topic://public/default/orders", not failures, dry_run, 1 << 26, 9, 2, 1 << 20, (segment,), failures, notes, 3.0
    )


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_a_sound_topic_is_called_sound(capsys: pytest.CaptureFixture[str]) -> None:
    report = audited()
    print_report(report, render_audit(report), as_json=False)
    text = printed(capsys)
    assert "verdict  sound" in text
    assert "5–4004" in text
    assert "Defects" not in text


def test_every_defect_stands_there_with_its_rule_place_and_object(capsys: pytest.CaptureFixture[str]) -> None:
    report = audited(audit.Defect("batch-body", 0, "x.chunk", 17, "bad checksum"), notes=("something",))
    print_report(report, render_audit(report), as_json=False)
    text = printed(capsys)
    assert "verdict  1 defect\n" in text
    assert any(line.split() == ["batch-body", "0", "17", "bad", "checksum"] for line in text.splitlines())
    assert "segment 0: x.chunk" in text
    assert text.endswith("Notes\nsomething\n")


def test_a_long_list_of_defects_is_cut_and_json_has_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    report = audited(*(audit.Defect("offset-gap", 0, "", offset, "gap") for offset in range(SHOWN_DEFECTS + 7)))
    print_report(report, render_audit(report), as_json=False)
    assert "7 more; --json has them all" in printed(capsys)
    print_report(report, render_audit(report), as_json=True)
    found = json.loads(printed(capsys))
    assert (found["ok"], len(found["defects"])) == (False, SHOWN_DEFECTS + 7)
    assert found["defects"][0] == {"rule": "offset-gap", "segment": 0, "object": "", "offset": 0, "text": "gap"}


def test_a_compaction_tells_what_became_of_the_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    report = compacted()
    print_report(report, render_compact(report), as_json=False)
    text = printed(capsys)
    assert "9 → 2" in text
    assert "8 in 1" in text
    dry = compacted(dry_run=True)
    print_report(dry, render_compact(dry), as_json=False)
    assert "would be rewritten" in printed(capsys)


def test_what_could_not_be_joined_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    failed = compacted(compact.CompactFailure(0, "y.chunk", "chunk-corrupt", "bad batch"), notes=("left alone",))
    print_report(failed, render_compact(failed), as_json=False)
    text = printed(capsys)
    assert any(line.split() == ["0", "y.chunk", "bad", "batch"] for line in text.splitlines())
    assert "left alone" in text
    print_report(failed, render_compact(failed), as_json=True)
    assert json.loads(printed(capsys))["chunksAfter"] == 2
