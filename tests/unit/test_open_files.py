"""The limit of open files, and the connections that fit below it."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator

import pytest

from braid.broker.config import BrokerConfig, Limits
from braid.cli.commands.serve import within_open_files
from braid.ports.open_files import OWN_FILES, connections_within, raise_open_files


@pytest.fixture
def hard() -> Iterator[int]:
    """A soft limit below the hard one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one(hard: int) -> None:
    assert raise_open_files() == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


@pytest.mark.parametrize(
    ("files", "connections"), [(64, 32), (1_024, 512), (2_048, 1_024), (4_096, 4_096 - OWN_FILES), (1 << 20, 1_047_552)]
)
def test_clients_leave_files_for_the_broker(files: int, connections: int) -> None:
    assert connections_within(files) == connections


def test_connections_that_do_not_fit_are_not_promised(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    few = BrokerConfig(limits=Limits(max_connections=10))
    assert within_open_files(few) == few
    with caplog.at_level(logging.WARNING):
        many = within_open_files(BrokerConfig(limits=Limits(max_connections=2 * hard)))
    assert many.limits.max_connections == connections_within(hard)
    assert f"may open only {hard} files" in caplog.text
