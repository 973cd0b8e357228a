"""What pages show while they wait for brokers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from braid.console.pages.messages import Reading, _read
from braid.console.pages.subscriptions import _cards
from braid.console.pages.visit import Visit
from braid.console.records import Shown
from braid.console.watch.view import ClusterView, TopicDetail, TopicSeen

GIVEN = {"topic": "public/default/orders", "by": "end", "segment": None, "offset": 0, "time": "", "key": "", "count": 9}
FOLLOWED = Shown(value=b"new", key=None, timestamp_us=1, offset=7, headers={}, segment=0, topic="orders")


@pytest.mark.parametrize("change", ["follow", "look-elsewhere"])
async def test_a_look_that_is_late_does_not_take_away_what_the_page_shows_meanwhile(change: str) -> None:
    reading, given = Reading(), dict[str, Any](GIVEN)

    async def get(path: str) -> dict[str, Any]:
        reading.records.append(FOLLOWED)
        if change == "follow":
            reading.following = True
        else:
            given["topic"] = "public/default/mails"
        return {"segments": {}}

    visit = SimpleNamespace(rest=SimpleNamespace(get=get), client=None, refresh=lambda: None)
    await _read(cast("Visit", visit), reading, given)
    assert [*reading.records] == [FOLLOWED]


def test_subscriptions_are_not_said_to_be_missing_before_a_broker_has_answered() -> None:
    path = "public/default/orders"
    details: dict[str, TopicDetail] = {}
    view = ClusterView(topics={path: TopicSeen(path=path)})
    visit = cast("Visit", SimpleNamespace(view=view, watch=SimpleNamespace(details=details), read_only=True))
    assert "Asking the brokers" in _cards(visit, path, {})
    details[path] = TopicDetail(layout={}, stats={"subscriptions": {}, "groups": {}})
    assert "There is no subscription yet" in _cards(visit, path, {})
