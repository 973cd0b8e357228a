"""The alert rules and the dashboard in deploy/ ask for metrics and labels that brokers have."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from braid.admin.topic_metrics import topic_families
from braid.broker.config import Limits
from braid.cli.main import braid
from tests.kits.admin import admin_broker
from tests.kits.cluster_process import ClusterProcess
from tests.kits.commands import run_to_end
from tests.kits.raw_client import RawClient
from tests.kits.waiting import wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "braid.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "braid.json"
ADDED_BY_PROMETHEUS = {"job", "instance"}
Metrics = Mapping[str, set[str]]
"""Labels by a metric's name, as it stands in an expression."""


@pytest.fixture(name="metrics", scope="module")
def _metrics(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """What two brokers show that share a replicated topic with a stream and a queue, and one that refuses clients."""
    found: dict[str, set[str]] = {"up": set()}
    for family in topic_families([]):  # Labels of families that are empty now: nothing holds retention back.
        names = [family.name, f"{family.name}_total"]
        found.update((name, set(family._labelnames)) for name in names)  # type: ignore[attr-defined]
    with ClusterProcess(tmp_path_factory.mktemp("cluster"), shared=True, brokers=2) as cluster:
        cluster.run("topic", "create", "orders", "--replicas", "2")
        cluster.run("subscription", "create", "orders", "billing")
        cluster.run("subscription", "create", "orders", "tasks", "--kind", "queue")
        assert run_to_end(cluster.url, "topic", "show", "missing").returncode == 1  # A request that fails.
        texts: list[str] = []

        def scrape() -> bool:
            texts[:] = [_read(broker.ready["adminUrl"] + "/metrics") for broker in cluster.brokers.values()]
            return any("braid_replica_in_sync{" in text for text in texts)

        wait_until(scrape, "a broker shows its follower")
    shown = set()
    for text in [*texts, _refusing(tmp_path_factory.mktemp("full"))]:
        for family in text_string_to_metric_families(text):
            shown.add(family.name)
            shown.add(f"{family.name}_total")
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    assert {name for name in found if name.startswith("braid_")} - {f"{name}_bucket" for name in shown} - {
        f"{name}_{part}" for name in shown for part in ("sum", "count", "created")
    } <= shown
    return found


def _refusing(folder: Path) -> str:
    """What a broker shows that has refused a connection."""
    limits = Limits(max_connections=1)
    with admin_broker(folder, limits=limits) as broker, RawClient(broker.broker.address) as client:
        client.ping()
        with socket.create_connection(broker.broker.address) as second:
            while second.recv(1 << 16):
                pass
        return broker.ask("GET", "/metrics").body.decode()


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        text: str = answer.read().decode()
        return text


def _inside(text: str, opened: int) -> str:
    """What stands between the bracket at `opened` and its partner."""
    depth = 0
    for at in range(opened, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return text[opened + 1 : at]
    raise AssertionError(f"a bracket is open: {text}")


def used(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the metrics of a PromQL expression, each with the labels that the expression asks of it."""
    plain = re.sub(r'"(\\.|[^"\\])*"', '""', expression)
    for name, _, matchers in re.findall(r"\b([a-z_][a-z0-9_]*_[a-z0-9_]+|up)\b(\{([^}]*)\})?(?!\s*\()", plain):
        if re.match(r"(braid|process|python)_|up$", name):
            yield name, set(re.findall(r"(\w+)\s*[=!]", matchers))
    for group in re.finditer(r"\bby\s*\(([^)]*)\)\s*\(", plain):
        labels = set(re.findall(r"\w+", group[1]))
        for name, _ in used(_inside(plain, group.end() - 1)):
            yield name, labels


def test_expressions_are_taken_apart() -> None:
    expression = 'sum by (a, b) (rate(braid_x_total{c=~"d{e}"}[5m])) > 0 and on (a) braid_y == 0'
    assert [*used(expression)] == [("braid_x_total", {"c"}), ("braid_y", set()), ("braid_x_total", {"a", "b"})]


def _check(expression: str, metrics: Metrics, where: str) -> None:
    asked = [*used(expression)]
    assert asked, f"{where} asks for no metric: {expression}"
    for name, labels in asked:
        assert name in metrics, f"{where} asks for {name}, which no broker shows"
        missing = labels - metrics[name] - ADDED_BY_PROMETHEUS
        assert not missing, f"{where}: {name} has no label {missing}, only {metrics[name]}"


def _rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_alert_rules_ask_for_metrics_that_exist(metrics: Metrics) -> None:
    rules = _rules()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 20
    for rule in rules:
        _check(rule["expr"], metrics, rule["alert"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        texts = " ".join(rule["annotations"].values())
        kept = {label for _, labels in used(rule["expr"]) for label in labels} | ADDED_BY_PROMETHEUS
        shown = {label for name, _ in used(rule["expr"]) for label in metrics[name]}
        for label in re.findall(r"\$labels\.(\w+)", texts):
            assert label in kept | shown, f"{rule['alert']} names the label {label}, which its expression drops"
        for name in re.findall(r"\bbraid_\w+", texts):
            assert name in metrics, f"{rule['alert']} names {name}"


def _command(words: list[str]) -> click.Command | None:
    found: click.Command | None = braid
    for word in words:
        if not isinstance(found, click.Group):
            return found
        found = found.get_command(click.Context(found), word)
    return found


def test_every_alert_is_documented() -> None:
    page = (DEPLOY.parent / "docs" / "operating" / "monitoring.md").read_text()
    assert set(re.findall(r"`(Braid[A-Z]\w+)`", page)) == {rule["alert"] for rule in _rules()}


def test_alert_rules_name_commands_that_exist() -> None:
    named = re.findall(r"`braid ([a-z ]+)`", RULES.read_text())
    assert named
    for words in named:
        assert _command(words.split()) is not None, f"there is no `braid {words}`"


def test_alert_rules_pass_promtool(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is missing: `make test` installs it, or `apt-get install prometheus`"
    for arguments in (["check", "rules", "braid.rules.yml"], ["test", "rules", "braid.rules.test.yml"]):
        done = subprocess.run([promtool, *arguments], cwd=RULES.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_asks_for_metrics_that_exist(metrics: Metrics) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) > 25
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5m")
            _check(expression, metrics, panel["title"])
            kept = {label for _, labels in used(expression) for label in labels}
            kept |= {label for name, _ in used(expression) for label in metrics[name]} | ADDED_BY_PROMETHEUS
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in kept, f"{panel['title']} shows the label {label}"
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            inside = _inside(variable["definition"], variable["definition"].index("("))
            expression, _, label = inside.rpartition(",")
            _check(expression, metrics, variable["name"])
            assert label.strip() in {each for name, _ in used(expression) for each in metrics[name]} | {"instance"}


def test_the_dashboard_is_laid_out() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels, variables = dashboard["panels"], {each["name"] for each in dashboard["templating"]["list"]}
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (other := taken.setdefault((x, y), panel["title"])) is panel["title"], (other, panel["title"])
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}
        assert panel["type"] == "row" or panel["description"]
