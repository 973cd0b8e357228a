"""The pieces of a page: each follows what it shows, and one that breaks leaves the others alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from nicegui import Client
from nicegui.page import page

from braid.console.html import Html
from braid.console.pages.visit import Piece


@pytest.fixture
def open_page() -> Iterator[None]:
    with Client(page(""), request=None):
        yield


@pytest.mark.usefixtures("open_page")
def test_a_piece_shows_what_has_changed() -> None:
    shown = ["one"]
    piece = Piece(lambda: Html(shown[0]), "stack")
    assert piece.element.content == "one"
    shown[0] = "two"
    piece.refresh()
    assert piece.element.content == "two"
    piece.clear()
    assert piece.element.content == ""


@pytest.mark.usefixtures("open_page")
def test_a_piece_that_cannot_be_drawn_says_so_until_it_can(caplog: pytest.LogCaptureFixture) -> None:
    numbers = [1, 0, 2]
    piece = Piece(lambda: Html(str(6 // numbers[0])), "stack")
    del numbers[0]
    with caplog.at_level(logging.ERROR):
        piece.refresh()
    assert "could not be drawn" in piece.element.content
    assert "ZeroDivisionError" in caplog.text
    del numbers[0]
    piece.refresh()
    assert piece.element.content == "3"
