"""How long the client waits before it tries again, and which addresses it accepts."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest

from braid.client.client import connect
from braid.client.retry import Backoff
from braid.model.errors import (
    InvalidArgument,
)


def test_delays_double_up_to_the_limit_spread_by_chance_and_begin_anew() -> None:
    backoff = Backoff(Random(1), first_s=0.1, max_s=1.0)
    for limit in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert limit / 2 <= backoff.next() <= limit
    backoff.reset()
    assert backoff.next() <= 0.1


@pytest.mark.parametrize("url", ["http://x", "braid://", "braid://a:b"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument):
        connect(url)


def test_an_unreadable_file_of_authorities_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="PEM"):
        connect(tls="/nowhere.pem")


def test_importing_braid_and_connecting_needs_no_arrow() -> None:
    code = "import sys, braid; braid.connect; braid.Client; assert not {'pyarrow', 'numpy'} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", code], check=True)
