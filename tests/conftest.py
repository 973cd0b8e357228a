"""Coroutine tests run in virtual time (`braid.testing.pytest_plugin`). Properties have no deadline: a processor that
does much else makes an example slow, and not wrong."""

import os
import signal

from hypothesis import settings

from tests.kits.examples import DEFAULT, share
from tests.kits.java import start_java_quickly

pytest_plugins = ["braid.testing.pytest_plugin", "pytester"]

settings.register_profile("braid", deadline=None, max_examples=share(DEFAULT))
settings.load_profile("braid")

start_java_quickly(os.environ)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets its background jobs ignore Ctrl-C, and so would the programs that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
