"""What is wrong with a topic, in a few words: of the metrics of all brokers, and of what is under way.

The limits are those of the alerts in `deploy/prometheus/braid.rules.yml`. An alert waits until a state has lasted; a
page shows it immediately.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from braid.console.numbers import age_text, counted
from braid.console.watch.metrics_text import Series
from braid.console.watch.view import Json

HOT: Final = "braid_segment_hot_key_ratio"
LAG_SECONDS: Final = "braid_subscription_lag_seconds"
STREAM_CONSUMERS: Final = "braid_subscription_consumers"
QUEUE_CONSUMERS: Final = "braid_queue_consumers"
IN_SYNC: Final = "braid_replica_in_sync"
UNEXPORTED_S: Final = "braid_segment_unexported_age_seconds"
METRICS: Final = (HOT, LAG_SECONDS, STREAM_CONSUMERS, QUEUE_CONSUMERS, IN_SYNC, UNEXPORTED_S)

LONG_ALONE_S: Final = 3_600.0
LONG_UNEXPORTED_S: Final = 3_600.0
LONG_CHANGE_S: Final = 300.0

Found = Mapping[str, Series]
"""The metrics of one broker. Labels are in the order of their names."""


def of_metrics(families: Sequence[Found]) -> dict[str, list[str]]:
    """Return alarms by the path of their topic."""
    alarms: dict[str, list[str]] = {}
    for path, text in (*_copies(families), *_alone(families), *_unexported(families), *_hot(families)):
        alarms.setdefault(path, []).append(text)
    return alarms


def _all(families: Sequence[Found], name: str) -> Iterable[tuple[tuple[str, ...], float]]:
    return (item for found in families for item in found.get(name, {}).items())


def _copies(families: Sequence[Found]) -> Iterable[tuple[str, str]]:
    behind: dict[str, set[tuple[str, str]]] = {}
    for (follower, segment, path), in_sync in _all(families, IN_SYNC):
        if not in_sync:
            behind.setdefault(path, set()).add((segment, follower))
    return ((path, f"{counted(len(copies), 'copy')} behind") for path, copies in behind.items())


def _alone(families: Sequence[Found]) -> Iterable[tuple[str, str]]:
    consumers: dict[tuple[str, str], float] = {}
    for (subscription, path), count in _all(families, STREAM_CONSUMERS):
        consumers[path, subscription] = consumers.get((path, subscription), 0.0) + count
    for (_, subscription, path), count in _all(families, QUEUE_CONSUMERS):
        consumers[path, subscription] = consumers.get((path, subscription), 0.0) + count
    ages: dict[tuple[str, str], float] = {}
    for (_, subscription, path), age_s in _all(families, LAG_SECONDS):
        ages[path, subscription] = max(age_s, ages.get((path, subscription), 0.0))
    return (
        (path, f"{subscription} is {age_text(age_s)} behind, without a consumer")
        for (path, subscription), age_s in ages.items()
        if age_s > LONG_ALONE_S and not consumers.get((path, subscription), 0.0)
    )


def _unexported(families: Sequence[Found]) -> Iterable[tuple[str, str]]:
    oldest: dict[str, float] = {}
    for (_, path), age_s in _all(families, UNEXPORTED_S):
        oldest[path] = max(age_s, oldest.get(path, 0.0))
    return (
        (path, f"nothing is exported for {age_text(age_s)}")
        for path, age_s in oldest.items()
        if age_s > LONG_UNEXPORTED_S
    )


def _hot(families: Sequence[Found]) -> Iterable[tuple[str, str]]:
    return ((path, f"one key is {share:.0%} of segment {segment}") for (segment, path), share in _all(families, HOT))


def of_changes(changes: Sequence[Json], path: str, now: float) -> list[str]:
    """Return the alarms about changes of a topic's layout that do not get to their commit."""
    return [
        f"a change of its layout waits for {age_text(age_s)}"
        for each in changes
        if each["topic"] == path and each["kind"] == "layout" and each["step"] in ("CREATING", "SEALING")
        if each["since"] and (age_s := now - each["since"] / 1e6) > LONG_CHANGE_S
    ]
