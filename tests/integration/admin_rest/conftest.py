"""One broker with its REST interface."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kits.admin import ORDERS, AdminBroker, admin_broker


@pytest.fixture(name="broker", scope="package")
def _broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminBroker]:
    with admin_broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture(name="orders")
def _orders(broker: AdminBroker) -> Iterator[str]:
    """The topic `orders` with two segments; gone afterwards."""
    assert broker.ask("PUT", f"{ORDERS}?numInitialSegments=2").status == 201
    yield "public/default/orders"
    broker.ask("DELETE", f"{ORDERS}?force=true")
