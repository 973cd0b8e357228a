"""Coroutine tests run in virtual time (`braid.testing.pytest_plugin`)."""

pytest_plugins = ["braid.testing.pytest_plugin", "pytester"]
