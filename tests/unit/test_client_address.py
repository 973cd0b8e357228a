from __future__ import annotations

import pytest

from braid.model.errors import InvalidArgument
from braid.ports.network import Address
from braid.wire.address import DEFAULT_PORT, format_address, format_url, parse_address, parse_url


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("broker:7000", Address("broker", 7000)),
        ("broker", Address("broker", DEFAULT_PORT)),
        ("10.0.0.1:0", Address("10.0.0.1", 0)),
        ("[::1]:65535", Address("::1", 65535)),
        ("[fe80::1%eth0]", Address("fe80::1%eth0", DEFAULT_PORT)),
        (" broker:7000 ", Address("broker", 7000)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(format_address(address)) == address


@pytest.mark.parametrize(
    "text",
    ["", ":7000", "broker:", "broker:x", "broker:65536", "broker:-1", "broker:٣", "::1", "[::1", "::1]:7000", "[]:7000",
     "broker:7000/path", "a b:7000", "broker:" + "9" * 5_000],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgument, match="write host:port"):
        parse_address(text)


def test_a_url_names_one_or_several_brokers() -> None:
    brokers = (Address("a", 1), Address("::1", 2), Address("c", DEFAULT_PORT))
    assert parse_url("braid://a:1,[::1]:2,c") == brokers
    assert parse_url(format_url(brokers)) == brokers
    assert parse_url("braid://a:1/") == (Address("a", 1),)


@pytest.mark.parametrize("url", ["", "a:1", "http://a:1", "braid://", "braid://a:1,,b:2", "braid:/a:1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="is no"):
        parse_url(url)
