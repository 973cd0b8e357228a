"""What errors repeat of their input."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from braid.broker.admin.call import read
from braid.model.errors import BraidError, InvalidArgument, cut, quote
from braid.model.names import SegmentName, TopicName, check_name
from braid.wire.operations import MAX_MESSAGE_CHARS, error_body

DIGITS = "1" * (4 << 20)


def test_short_input_is_quoted_whole_and_long_input_by_its_beginning_and_length() -> None:
    assert quote("orders") == "'orders'"
    assert quote("x" * 200) == repr("x" * 200)
    assert quote("x" * 201) == repr("x" * 200) + "… (201 characters)"
    assert quote(b"x" * 300) == repr(b"x" * 200) + "… (300 characters)"
    assert quote(10**300) == "1" + "0" * 199 + "… (301 characters)"
    assert cut("a sentence") == "a sentence"
    assert cut("abc", 2) == "ab… (3 characters)"


class Ordered(msgspec.Struct):
    to: Literal["earliest", "latest"] = "latest"


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: check_name("topic", DIGITS),
        lambda: TopicName.parse(DIGITS),
        lambda: TopicName.parse(f"{DIGITS}/b"),
        lambda: SegmentName.parse(DIGITS),
        lambda: SegmentName.parse(f"segment://a/b/{DIGITS}/0000-ffff-0"),
        lambda: read("seek", Ordered, {"to": DIGITS}),
        lambda: read("seek", Ordered, {DIGITS: 1}),
        lambda: read("seek", Ordered, {str(number): 1 for number in range(100_000)}),
    ],
)
def test_no_error_repeats_a_megabyte(refuse: object) -> None:
    assert callable(refuse)
    with pytest.raises(BraidError) as raised:
        refuse()
    assert len(str(raised.value)) < 1_000
    assert "1" * 201 not in str(raised.value)


def test_a_wrong_word_is_refused_with_its_place_and_the_right_words() -> None:
    with pytest.raises(InvalidArgument, match=r"… \(4194\d+ characters\) - at `\$\.to`; choose 'earliest' or 'latest'"):
        read("seek", Ordered, {"to": DIGITS})


def test_a_peer_is_told_of_every_error_however_long_it_is() -> None:
    body = error_body(InvalidArgument(DIGITS))
    assert len(body.message) < MAX_MESSAGE_CHARS + 100
