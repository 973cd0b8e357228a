"""One Spark session for all tests that need one, and one broker for the Spark tests of a pytest worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.dying_jobs import Left, killed_driver
from tests.spark.spark_kit import TIMEOUT_S, StoredBroker, spark_session

GROUPS = {
    "streams": ("test_stream", "test_stream_losses", "test_stream_subscription"),
    "programs": ("test_clusters", "test_pipeline_commands"),
}
"""Files of one group run on one worker. Those of `streams` need no session. The programs start their own sessions, in
processes of their own. All other files are of the group `tables`, which has the one session of the suite."""
TABLES = "tables"


def group_of(module: str) -> str:
    return next((group for group, modules in GROUPS.items() if module in modules), TABLES)


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.xdist_group(f"spark-{group_of(item.path.stem)}"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with spark_session(tmp_path_factory.mktemp("spark")) as session:
        yield session


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredBroker]:
    """Shared by all: each test file has topics of its own. Tests that stop a broker start one for themselves."""
    with StoredBroker(tmp_path_factory.mktemp("broker")) as process:
        yield process


@pytest.fixture(scope="session")
def killed(broker: StoredBroker, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """Three jobs whose driver was killed, each for one test to go on with."""
    return killed_driver(broker, tmp_path_factory.mktemp("killed"))
