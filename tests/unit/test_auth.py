"""Tokens and permissions: what is believed, what is allowed, and that neither ever shows a secret."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from braid.broker.auth import ANONYMOUS, LEEWAY_S, Access, Action, Principal, allowed, covers, read_grants
from braid.broker.config import AuthConfig, Grant
from braid.model.errors import InvalidConfig, PermissionDenied, Unauthenticated
from braid.model.names import TopicName

SECRET = "correct horse battery staple, and then some"
RSA_KEY = rsa.generate_private_key(65537, 2048)


def pem(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def with_secret(folder: Path, **settings: Any) -> Access:
    path = folder / "secret"
    path.write_text(SECRET + "\n")
    return Access(AuthConfig(secret_file=str(path), **settings))


def with_public_key(folder: Path, content: bytes, **settings: Any) -> Access:
    path = folder / "public.pem"
    path.write_bytes(content)
    return Access(AuthConfig(public_key_file=str(path), **settings))


def token(key: Any = SECRET, algorithm: str = "HS256", **claims: Any) -> str:
    return jwt.encode({"sub": "ann", **claims}, key, algorithm=algorithm)


def raw_token(header: dict[str, Any], claims: dict[str, Any], secret: bytes | None) -> str:
    """Made by hand, since the library refuses to make what attackers send."""
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, claims)]
    signed = b".".join(parts)
    signature = b"" if secret is None else hmac.new(secret, signed, hashlib.sha256).digest()
    return (signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


def test_without_configuration_everybody_may_do_everything() -> None:
    access = Access(None)
    principal = access.authenticate("")
    assert principal == ANONYMOUS
    for action in Action:
        access.check(principal, action, "*")
        access.check(principal, action, "acme", "shop", "orders")


def test_a_good_token_names_its_bearer_with_the_default_role(tmp_path: Path) -> None:
    expires = int(time.time()) + 60
    assert with_secret(tmp_path).authenticate(token(exp=expires)) == Principal("ann", ("ann",), float(expires))


def test_roles_come_from_the_token_and_replace_the_default(tmp_path: Path) -> None:
    assert with_secret(tmp_path).authenticate(token(roles=["a", "b"])) == Principal("ann", ("a", "b"), None)
    assert with_secret(tmp_path).authenticate(token(roles=[])).roles == ()


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [
        (RSA_KEY, "RS256"),
        (ec.generate_private_key(ec.SECP256R1()), "ES256"),
        (ed25519.Ed25519PrivateKey.generate(), "EdDSA"),
    ],
    ids=["RS256", "ES256", "EdDSA"],
)
def test_each_kind_of_public_key_checks_its_own_algorithm(tmp_path: Path, key: Any, algorithm: str) -> None:
    access = with_public_key(tmp_path, pem(key))
    assert access.authenticate(token(key, algorithm)).name == "ann"
    with pytest.raises(Unauthenticated, match=algorithm):
        access.authenticate(token(SECRET, "HS256"))


def test_the_public_key_used_as_a_shared_secret_signs_nothing(tmp_path: Path) -> None:
    access = with_public_key(tmp_path, pem(RSA_KEY))
    for secret in (pem(RSA_KEY), pem(RSA_KEY).strip()):
        with pytest.raises(Unauthenticated, match="not signed with RS256"):
            access.authenticate(raw_token({"alg": "HS256", "typ": "JWT"}, {"sub": "ann"}, secret))


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "", None, 7, ["HS256"], "HS512", "RS256"])
def test_the_token_does_not_choose_the_algorithm(tmp_path: Path, algorithm: Any) -> None:
    for secret in (None, SECRET.encode()):
        with pytest.raises(Unauthenticated):
            with_secret(tmp_path).authenticate(raw_token({"alg": algorithm}, {"sub": "ann"}, secret))


def test_a_token_made_by_hand_is_good_when_nothing_is_wrong_with_it(tmp_path: Path) -> None:
    made = raw_token({"alg": "HS256"}, {"sub": "ann"}, SECRET.encode())
    assert with_secret(tmp_path).authenticate(made).name == "ann"


NOW = int(time.time())

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "expired": ({}, {"exp": NOW - LEEWAY_S - 5}, "expired"),
    "an end that no clock shows": ({}, {"exp": 10**400}, "'exp' claim is no time"),
    "an infinite end": ({}, {"exp": float("inf")}, "no JSON web token"),
    "not valid yet": ({}, {"nbf": NOW + 3600}, "not valid yet"),
    "a beginning that no clock shows": ({}, {"nbf": 10**400}, "not valid yet"),
    "issued tomorrow": ({}, {"iat": NOW + 86400}, "not valid yet"),
    "another audience": ({"audience": "braid"}, {"aud": "shop"}, "another audience"),
    "no audience": ({"audience": "braid"}, {}, "no 'aud' claim"),
    "an audience where none is configured": ({}, {"aud": "shop"}, "none configured"),
    "another issuer": ({"issuer": "https://id"}, {"iss": "https://evil"}, "another issuer"),
    "no issuer": ({"issuer": "https://id"}, {}, "no 'iss' claim"),
    "no sub": ({}, {"sub": None}, "'sub'"),
    "an empty sub": ({}, {"sub": ""}, "'sub'"),
    "a number as sub": ({}, {"sub": 7}, "no JSON web token"),
    "roles that are a string": ({}, {"roles": "admin"}, "'roles'"),
    "roles that are numbers": ({}, {"roles": [1]}, "'roles'"),
    "roles that are null": ({}, {"roles": None}, "'roles'"),
    "an empty role": ({}, {"roles": [""]}, "'roles'"),
    "too many roles": ({}, {"roles": [f"r{i}" for i in range(65)]}, "65 roles"),
    "an exp that is text": ({}, {"exp": "soon"}, "no JSON web token"),
    "an exp without end": ({}, {"exp": float("inf")}, "refused"),
    "an exp that is no number": ({}, {"exp": float("nan")}, "refused"),
}


@pytest.mark.parametrize(("settings", "claims", "said"), list(REFUSED.values()), ids=list(REFUSED))
def test_a_token_is_refused_that_is(
    tmp_path: Path, settings: dict[str, Any], claims: dict[str, Any], said: str
) -> None:
    made = raw_token({"alg": "HS256"}, {"sub": "ann", **claims}, SECRET.encode())
    with pytest.raises(Unauthenticated, match=said):
        with_secret(tmp_path, **settings).authenticate(made)


def test_a_token_without_sub_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unauthenticated, match="no 'sub' claim"):
        with_secret(tmp_path).authenticate(raw_token({"alg": "HS256"}, {"roles": ["admin"]}, SECRET.encode()))


def test_clocks_may_differ_a_little(tmp_path: Path) -> None:
    now = int(time.time())
    principal = with_secret(tmp_path).authenticate(token(exp=now - 1, nbf=now + 5))
    assert not principal.expired(now)
    assert principal.expired(now + LEEWAY_S + 1)
    assert not Principal("service", (), None).expired(1e18)


def test_issuer_and_audience_are_accepted_when_they_are_right(tmp_path: Path) -> None:
    access = with_secret(tmp_path, issuer="https://id", audience="braid")
    assert access.authenticate(token(iss="https://id", aud=["shop", "braid"])).name == "ann"


NESTED = base64.urlsafe_b64encode(b'{"alg":' + b"[" * 8_000).decode().rstrip("=")


@pytest.mark.parametrize(
    "garbage",
    ["x", "a.b.c", "...", "..", "\0", "ключ", "e30.e30.", "\ud800", "a" * 20_000, f"{NESTED}.e30.x", "Bearer x.y.z"],
)
def test_garbage_is_refused(tmp_path: Path, garbage: str) -> None:
    with pytest.raises(Unauthenticated):
        with_secret(tmp_path).authenticate(garbage)


def test_no_token_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Unauthenticated, match="requires a token"):
        with_secret(tmp_path).authenticate("")


def test_no_error_shows_the_token_or_the_secret(tmp_path: Path) -> None:
    access = with_secret(tmp_path)
    for bad in (token("another secret of more than 32 bytes"), token(exp=1), token() + "x", "not-a-token-at-all"):
        with pytest.raises(Unauthenticated) as caught:
            access.authenticate(bad)
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value.__context__)
        assert all(part not in shown for part in bad.split("."))
        assert SECRET not in shown


SECRET_FILES: dict[str, tuple[bytes, bool]] = {
    "32 bytes": (b"x" * 32, True),
    "31 bytes and a newline": (b"x" * 31 + b"\n", False),
    "empty": (b"", False),
    "random bytes that end like a line": (b"\xff" * 31 + b"\n", True),
    "a public key": (pem(RSA_KEY), False),
}


@pytest.mark.parametrize(("content", "good"), list(SECRET_FILES.values()), ids=list(SECRET_FILES))
def test_a_secret_file_with(tmp_path: Path, content: bytes, good: bool) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    config = AuthConfig(secret_file=str(path))
    if good:
        Access(config)
    else:
        with pytest.raises(InvalidConfig, match="auth") as caught:
            Access(config)
        assert content == b"" or content.decode() not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"no key at all",
        RSA_KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        pem(rsa.generate_private_key(65537, 1024)),
        pem(ec.generate_private_key(ec.SECP384R1())),
    ],
    ids=["garbage", "a private key", "short RSA", "another curve"],
)
def test_a_public_key_file_is_refused_with(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidConfig, match="auth"):
        with_public_key(tmp_path, content)


def test_exactly_one_key_must_be_configured(tmp_path: Path) -> None:
    for config in (AuthConfig(), AuthConfig(secret_file="a", public_key_file="b")):
        with pytest.raises(InvalidConfig, match="exactly one"):
            Access(config)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        Access(AuthConfig(secret_file=str(tmp_path / "absent")))


@pytest.mark.parametrize(
    ("grant", "place", "reaches"),
    [
        ("acme", "acme", True),
        ("acme", "acme/shop", True),
        ("acme", "acme/shop/orders", True),
        ("acme", "other/shop/orders", False),
        ("acme", "acme2/shop/orders", False),
        ("acme/shop", "acme/shop/orders", True),
        ("acme/shop", "acme/shop", True),
        ("acme/shop", "acme", False),
        ("acme/shop", "acme/other/orders", False),
        ("acme/shop/orders", "acme/shop/orders", True),
        ("acme/shop/orders", "acme/shop/orders2", False),
        ("acme/shop/orders", "acme/shop", False),
        ("acme/*/orders", "acme/shop/orders", True),
        ("acme/*/orders", "acme/shop/other", False),
        ("*/shop", "acme/shop/orders", True),
        ("*/shop", "acme/other/orders", False),
        ("*/*/orders", "acme/shop/orders", True),
        ("acme/*", "acme", False),
        ("acme/*", "acme/shop", True),
        ("*", "acme/shop/orders", True),
        ("*", "*", True),
        ("acme", "*", False),
        ("*/*", "*", False),
    ],
)
def test_a_grant_reaches_its_place_and_what_is_below(grant: str, place: str, reaches: bool) -> None:
    assert covers(grant.split("/"), place.split("/")) is reaches


GRANTS = read_grants([
    Grant(role="shop", on="acme/shop", allow=("produce", "consume")),
    Grant(role="audit", on="*", allow=("consume",)),
    Grant(role="operator", on="acme", allow=("admin",)),
])  # fmt: skip


@pytest.mark.parametrize(
    ("roles", "action", "place", "result"),
    [
        ([], Action.CONSUME, "acme/shop/orders", False),
        (["nobody"], Action.CONSUME, "acme/shop/orders", False),
        (["shop"], Action.PRODUCE, "acme/shop/orders", True),
        (["shop"], Action.ADMIN, "acme/shop/orders", False),
        (["operator"], Action.ADMIN, "acme/shop/orders", True),
        (["operator"], Action.PRODUCE, "acme/shop/orders", False),
        (["operator"], Action.ADMIN, "*", False),
        (["audit"], Action.CONSUME, "other/x/y", True),
        (["audit"], Action.PRODUCE, "other/x/y", False),
        (["audit", "operator"], Action.ADMIN, "acme/shop", True),
        (["audit", "operator"], Action.PRODUCE, "acme/shop", False),
    ],
)
def test_what_no_grant_allows_is_denied(roles: list[str], action: Action, place: str, result: bool) -> None:
    assert allowed(GRANTS, roles, action, place.split("/")) is result


def test_a_superuser_may_do_everything_and_others_only_what_is_granted(tmp_path: Path) -> None:
    grants = (Grant(role="shop", on="acme/shop", allow=("produce",)),)
    access = with_secret(tmp_path, superusers=("root",), grants=grants)
    root = access.authenticate(token(roles=["root"]))
    for action in Action:
        access.check(root, action, "*")
        access.check(root, action, "acme", "shop", "orders")
    shop = access.authenticate(token(roles=["shop"]))
    access.check(shop, Action.PRODUCE, "acme", "shop", "orders")
    with pytest.raises(PermissionDenied, match="'ann' may not consume on 'acme/shop/orders'"):
        access.check(shop, Action.CONSUME, "acme", "shop", "orders")
    with pytest.raises(PermissionDenied, match="whole cluster"):
        access.check(shop, Action.ADMIN, "*")


@pytest.mark.parametrize("action", list(Action))
def test_who_may_do_anything_with_a_topic_may_know_of_it(tmp_path: Path, action: Action) -> None:
    access = with_secret(tmp_path, grants=(Grant(role="shop", on="acme/shop/orders", allow=(action.value,)),))
    shop = access.authenticate(token(roles=["shop"]))
    access.check_may_know(shop, TopicName("acme", "shop", "orders"))
    with pytest.raises(PermissionDenied, match="may not produce or consume or admin on 'acme/shop/other'"):
        access.check_may_know(shop, TopicName("acme", "shop", "other"))


def test_one_of_several_actions_is_enough(tmp_path: Path) -> None:
    access = with_secret(tmp_path, grants=(Grant(role="shop", on="acme", allow=("consume",)),))
    shop, orders = access.authenticate(token(roles=["shop"])), TopicName("acme", "shop", "orders")
    access.check_topic(shop, orders, Action.ADMIN, Action.CONSUME)
    with pytest.raises(PermissionDenied):
        access.check_topic(shop, orders, Action.ADMIN, Action.PRODUCE)


@pytest.mark.parametrize(
    ("grant", "said"),
    [
        (Grant(role="", on="acme", allow=("admin",)), "no role"),
        (Grant(role="*", on="acme", allow=("admin",)), "no role"),
        (Grant(role="a", on="", allow=("admin",)), "no tenant name"),
        (Grant(role="a", on="acme/", allow=("admin",)), "no namespace name"),
        (Grant(role="a", on="acme/sh*", allow=("admin",)), "no namespace name"),
        (Grant(role="a", on="a/b/c/d", allow=("admin",)), "write 'tenant'"),
        (Grant(role="a", on="acme", allow=("write",)), "use produce"),
        (Grant(role="a", on="acme", allow=()), "allows nothing"),
    ],
)
def test_a_grant_that_means_nothing_is_an_error(grant: Grant, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        read_grants([grant])


def test_without_authentication_the_token_library_is_not_imported() -> None:
    check = "import sys; from braid.broker.auth import Access; Access(None).authenticate(''); " \
        "sys.exit(any(name in sys.modules for name in ('jwt', 'cryptography')))"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
