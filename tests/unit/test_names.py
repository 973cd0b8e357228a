import msgspec
import pytest

from braid.model.errors import InvalidName
from braid.model.layout import HashRange, Layout
from braid.model.names import MAX_NAME_CHARS, SegmentName, TopicName, check_name


@pytest.mark.parametrize("text", ["orders", "public/default/orders", "topic://public/default/orders"])
def test_three_ways_to_write_one_topic(text: str) -> None:
    topic = TopicName.parse(text)
    assert topic == TopicName("public", "default", "orders")
    assert str(topic) == "topic://public/default/orders"
    assert topic.path == "public/default/orders"


@pytest.mark.parametrize(
    "text",
    [
        "", "/", "a/b", "a/b/c/d", "a//c", "topic://", "topic://orders", "topic://a/b", "segment://a/b/c/0000-ffff-0",
        "a/../c", "a/./c", ".", "..", ".hidden", "-option", "a b", "a\n", "naïve", "a:b", "a%2e", "a\0", "a\\b", "a*",
        "x" * (MAX_NAME_CHARS + 1),
    ],
)  # fmt: skip
def test_what_is_no_topic_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidName, match="is no"):
        TopicName.parse(text)


@pytest.mark.parametrize("name", ["a", "A", "0", "_x", "a.b", "a-b", "a=b", "2024-01-01", "x" * MAX_NAME_CHARS])
def test_names_may_have_letters_digits_and_a_few_signs(name: str) -> None:
    assert check_name("subscription", name) == name
    assert TopicName.parse(name).name == name


def test_the_error_says_whose_name_it_is_and_what_is_allowed() -> None:
    with pytest.raises(InvalidName, match="'a/b' is no subscription name: use 1 to 128 letters"):
        check_name("subscription", "a/b")


def test_a_topic_name_is_checked_however_it_is_made() -> None:
    with pytest.raises(InvalidName):
        TopicName("public", "..", "orders")
    with pytest.raises(InvalidName):
        msgspec.json.decode(b'{"tenant": "a", "namespace": "b", "name": "c/d"}', type=TopicName)


def test_a_segment_name_is_written_and_read_back() -> None:
    segment = Layout.initial(2).active[1]
    name = SegmentName.of(TopicName.parse("orders"), segment)
    assert str(name) == "segment://public/default/orders/8000-ffff-1"
    assert name.descriptor == "8000-ffff-1"
    assert name.path == "public/default/orders/8000-ffff-1"
    assert SegmentName.parse(str(name)) == name
    assert SegmentName.parse("segment://a/b/c/0000-0000-123").range == HashRange(0, 0)


@pytest.mark.parametrize(
    "text",
    [
        "orders", "public/default/orders/0000-ffff-0", "segment://public/default/orders", "segment://a/b/c/d/0000-ffff-0",
        "segment://a/b/c/0-ffff-0", "segment://a/b/c/0000-FFFF-0", "segment://a/b/c/0000-ffff-00",
        "segment://a/b/c/0000-ffff-", "segment://a/b/c/0000-ffff--1", "segment://a/b/c/8000-7fff-0",
        "segment://a/b/c/00000-ffff-0", "segment://a/../c/0000-ffff-0", "segment://a/b/c/0000-ffff-0\n",
        "segment://a/b/c/0000-ffff-" + "9" * 30, "segment://a/b/c/0000-ffff-٣",
    ],
)  # fmt: skip
def test_what_is_no_segment_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        SegmentName.parse(text)
