"""A broker with the usual limits. A test fails if the broker did not survive it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kits.bad_input import survives
from tests.kits.raw_client import WatchedBroker


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedBroker]:
    with WatchedBroker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker
        broker.end()


@pytest.fixture
def broker(running: WatchedBroker) -> Iterator[WatchedBroker]:
    yield from survives(running)
