"""What the admin port refuses before anything is done, and the statuses of errors."""

from __future__ import annotations

import pytest

from braid.admin.guard import token_of
from braid.admin.status import body_of, headers_of, status_of
from braid.model import errors
from braid.model.errors import BraidError, Unauthenticated
from braid.wire.web_origin import comes_from_elsewhere, is_loopback, names_this_machine


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1:8660", True),
        ("127.0.0.1", True),
        ("localhost:8660", True),
        ("LOCALHOST", True),
        ("braid.localhost:80", True),
        ("[::1]:8660", True),
        ("10.1.2.3:8660", True),
        ("evil.example", False),
        ("evil.example:8660", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("user@evil.example", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_only_addresses_and_localhost_name_this_machine(host: str, here: bool) -> None:
    assert names_this_machine(host) is here


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("broker-1", False),
    ],
)
def test_loopback_is_told_from_other_addresses(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("method", "headers", "elsewhere"),
    [
        ("POST", {}, False),
        ("POST", {"origin": "http://127.0.0.1:8660", "host": "127.0.0.1:8660"}, False),
        ("POST", {"origin": "http://evil.example", "host": "127.0.0.1:8660"}, True),
        ("POST", {"origin": "http://127.0.0.1:9000", "host": "127.0.0.1:8660"}, True),
        ("POST", {"origin": "null", "host": "127.0.0.1:8660"}, True),
        ("POST", {"origin": "http://[", "host": "127.0.0.1:8660"}, True),
        ("DELETE", {"sec-fetch-site": "cross-site"}, True),
        ("DELETE", {"sec-fetch-site": "same-site"}, True),
        ("PUT", {"sec-fetch-site": "same-origin", "origin": "http://proxy.example", "host": "10.0.0.1"}, False),
        ("PUT", {"sec-fetch-site": "none"}, False),
        ("GET", {"sec-fetch-site": "cross-site", "origin": "http://evil.example"}, False),
    ],
)
def test_changes_for_pages_of_other_origins_are_recognised(
    method: str, headers: dict[str, str], elsewhere: bool
) -> None:
    assert comes_from_elsewhere(method, headers) is elsewhere


def test_the_token_is_what_follows_bearer_in_any_case() -> None:
    assert token_of({}) == ""
    assert token_of({"authorization": "Bearer abc"}) == "abc"
    assert token_of({"authorization": "bearer  abc "}) == "abc"
    for other in ("Basic abc", "abc", "Bearerabc"):
        with pytest.raises(Unauthenticated) as caught:
            token_of({"authorization": other})
        assert "abc" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.InvalidArgument, 400),
        (errors.InvalidName, 400),
        (errors.Unauthenticated, 401),
        (errors.PermissionDenied, 403),
        (errors.TopicNotFound, 404),
        (errors.SegmentNotFound, 404),
        (errors.SubscriptionNotFound, 404),
        (errors.TopicExists, 409),
        (errors.SubscriptionExists, 409),
        (errors.SubscriptionBusy, 409),
        (errors.SubscriptionKindConflict, 409),
        (errors.ConditionFailed, 412),
        (errors.NotAvailable, 501),
        (errors.NotServing, 503),
        (errors.MetadataUnavailable, 503),
        (errors.DiskFull, 503),
        (errors.MetadataCorrupt, 500),
        (errors.BrokenInvariant, 500),
    ],
)
def test_each_error_has_its_status(kind: type[BraidError], status: int) -> None:
    assert status_of(kind("so it is")) == status
    assert body_of(kind("so it is")).json() == (
        f'{{"code":"{kind.code}","message":"so it is","retriable":{str(kind.retriable).lower()}}}'.encode()
    )


def test_no_error_of_the_tree_is_answered_with_success() -> None:
    for kind in BraidError.by_code.values():
        error = kind.__new__(kind, "so it is")
        assert 400 <= status_of(error) <= 599
        # Who waited for a move in vain may ask again, and waits for the same one.
        assert (status_of(error) == 503) <= (kind.retriable or kind is errors.TimedOut)


def test_statuses_bring_the_headers_that_http_wants() -> None:
    assert "Bearer" in headers_of(401)["WWW-Authenticate"]
    assert headers_of(503) == {"Retry-After": "1"}
    assert headers_of(404) == {}
