"""Authentication and permissions: whom a token names, and the actions that its roles allow.

Tokens are JWTs. The configured key alone decides which algorithm checks them, never what a token says about itself: a
shared secret means HS256; a public key means the one algorithm of its kind (RSA → RS256, EC P-256 → ES256, Ed25519 →
EdDSA). So a token "signed" with HS256 and the public key as its secret, or with `none`, is refused before anything in
it is believed.

    claim     meaning
    sub       required: the name that logs and errors show
    roles     a list of role names; without it the only role is `sub`
    exp, nbf  honoured, with LEEWAY_S for clocks that differ. `exp` is not required, as in Pulsar: a token without it is
              good until the key changes. Give people an `exp`; services may do without one.
    iss       must be the configured issuer, if one is configured
    aud       must name the configured audience. A token that has an `aud` is refused where none is configured: it was
              made for another service (RFC 7519, 4.1.3).

Permissions are a pure function of the configured grants. A request is denied unless one of the caller's roles is a
superuser or has a grant that covers the request. A grant covers everything below its place: `acme` covers the tenant
itself, its namespaces and their topics; `acme/*` covers every namespace of the tenant and their topics, but not calls
about the tenant as a whole. Calls about the whole cluster need ADMIN on tenant `*`, which only a grant on `*` (or a
superuser) has. No action implies another: `admin` alone neither publishes nor reads.

Brokers of one cluster know each other by a secret in the metadata store (peers/links.py), whether or not clients need
tokens. A connection that shows the secret is a *peer*: it may make the calls that brokers make to each other, and
nothing that needs a grant.

An error never shows a token, nor anything that a token says beside the caller's own name and roles. The library's
exceptions quote pieces of their input, so they are neither shown nor chained.
"""

from __future__ import annotations

import hmac
import string
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from braid.broker.config import AuthConfig, Grant
from braid.model.errors import InvalidConfig, InvalidName, PermissionDenied, Unauthenticated, cut, quote
from braid.model.names import TopicName, check_name

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

PEER_TOKEN: Final = "braid-peer "  # noqa: S105 (what precedes the secret)
"""The prefix of a broker's token; the cluster's secret follows it."""
MIN_SECRET_BYTES: Final = 32
"""The size of HS256's hash: a shorter secret is weaker than the signature (RFC 7518, 3.2)."""
MIN_RSA_BITS: Final = 2048
MAX_TOKEN_CHARS: Final = 16 << 10
"""Far above what fits into the header of an HTTP request. Decoding a longer token would only cost time."""
MAX_ROLES: Final = 64
LEEWAY_S: Final = 30.0
ALL: Final = "*"
"""In a grant: everything at that level. In a permission check: the whole cluster."""

_TEXT: Final = frozenset(string.printable.encode())


class Action(Enum):
    PRODUCE = "produce"
    CONSUME = "consume"
    ADMIN = "admin"


class Principal(msgspec.Struct, frozen=True):
    """The caller that a token names."""

    name: str
    roles: tuple[str, ...]
    expires_at: float | None
    """Unix seconds."""
    peer: bool = False
    """Another broker of the cluster."""

    def expired(self, now: float) -> bool:
        """Whether the token has run out, for connections that outlive it. `now` in Unix seconds."""
        return self.expires_at is not None and now >= self.expires_at + LEEWAY_S


ANONYMOUS: Final = Principal("anonymous", (), None)
"""Everybody, on a broker without authentication."""
PEER: Final = Principal("broker", (), None, peer=True)

Grants = Mapping[str, Sequence[tuple[tuple[str, ...], frozenset[Action]]]]
"""By role: the levels of a place, and the actions that are allowed there and below."""


def read_grants(grants: Sequence[Grant]) -> Grants:
    """Check the configured grants. Raises InvalidConfig."""
    found: dict[str, list[tuple[tuple[str, ...], frozenset[Action]]]] = {}
    for grant in grants:
        described = f"the grant to role {grant.role!r} on {grant.on!r}"
        if not grant.role or grant.role == ALL:
            raise InvalidConfig(f"{described} names no role: a grant is for one role, '*' stands only for places")
        levels = tuple(grant.on.split("/"))
        if len(levels) > 3:
            raise InvalidConfig(f"{described}: write 'tenant', 'tenant/namespace' or 'tenant/namespace/topic'")
        for what, level in zip(("tenant", "namespace", "topic"), levels, strict=False):
            try:
                if level != ALL:
                    check_name(what, level)
            except InvalidName as error:
                raise InvalidConfig(f"{described}: {error}") from error
        try:
            actions = frozenset(Action(action) for action in grant.allow)
        except ValueError:
            raise InvalidConfig(f"{described} allows {list(grant.allow)}: use produce, consume or admin") from None
        if not actions:
            raise InvalidConfig(f"{described} allows nothing: name produce, consume or admin, or remove it")
        found.setdefault(grant.role, []).append((levels, actions))
    return found


def covers(grant: Sequence[str], place: Sequence[str]) -> bool:
    """Whether a grant on these levels reaches this place: the place itself or anything below it."""
    return len(grant) <= len(place) and all(level in (ALL, asked) for level, asked in zip(grant, place, strict=False))


def allowed(grants: Grants, roles: Sequence[str], action: Action, place: Sequence[str]) -> bool:
    return any(action in actions and covers(on, place) for role in roles for on, actions in grants.get(role, ()))


class Access:
    """The keys and grants of one broker. The key file is read when this is made."""

    def __init__(self, config: AuthConfig | None) -> None:
        self.enabled: Final = config is not None
        self.peer_secret = ""
        """The secret by which the brokers of the cluster know each other; empty: not known yet."""
        self._superusers: frozenset[str] = frozenset()
        self._grants: Grants = {}
        self._verifier: _Verifier | None = None
        if config is not None:
            self._superusers = frozenset(config.superusers)
            self._grants = read_grants(config.grants)
            self._verifier = _Verifier(config)

    def take(self, other: Access) -> bool:
        """Take over the keys and grants of another one, which has authentication if this one has. Returns whether
        tokens that were good may not be good any more."""
        assert other.enabled is self.enabled
        before, self._verifier = self._verifier, other._verifier
        self._superusers, self._grants = other._superusers, other._grants
        return before is not None and other._verifier is not None and before.material != other._verifier.material

    def authenticate(self, token: str) -> Principal:
        """Return the caller that the token names. Raises Unauthenticated."""
        if token.startswith(PEER_TOKEN):
            return self._peer(token.removeprefix(PEER_TOKEN))
        if self._verifier is None:
            return ANONYMOUS
        if not token:
            raise Unauthenticated(
                "this broker requires a token and none was given: pass one (token=… in a program; --token or "
                "BRAID_TOKEN for a command)"
            )
        return self._verifier.read(token)

    def _peer(self, secret: str) -> Principal:
        if not self.peer_secret or not hmac.compare_digest(secret.encode(), self.peer_secret.encode()):
            raise Unauthenticated(
                "this is not the secret of the broker's cluster: do both use the same metadata store?"
            )
        return PEER

    def check(
        self, principal: Principal, action: Action, tenant: str, namespace: str | None = None, topic: str | None = None
    ) -> None:
        """Check that the caller may do this action. Raises PermissionDenied. `tenant` may be `*`: the whole cluster."""
        self._check(principal, (action,), [level for level in (tenant, namespace, topic) if level is not None])

    def check_topic(self, principal: Principal, topic: TopicName, *actions: Action) -> None:
        """Check that the caller may do one of these actions. Raises PermissionDenied."""
        self._check(principal, actions, [topic.tenant, topic.namespace, topic.name])

    def check_may_know(self, principal: Principal, topic: TopicName) -> None:
        """Check that the caller may know of a topic and where it is: any action is enough. Raises PermissionDenied."""
        self.check_topic(principal, topic, *Action)

    def _check(self, principal: Principal, actions: Sequence[Action], place: Sequence[str]) -> None:
        if not self.enabled or not self._superusers.isdisjoint(principal.roles):
            return
        if not any(allowed(self._grants, principal.roles, action, place) for action in actions):
            asked = " or ".join(action.value for action in actions)
            where = "the whole cluster ('*')" if place == [ALL] else repr("/".join(place))
            roles = cut(", ".join(repr(role) for role in principal.roles)) or "none"
            raise PermissionDenied(
                f"{quote(principal.name)} may not {asked} on {where}: none of its roles ({roles}) has a grant for it"
            )


class _Verifier:
    """Turns a token into a principal, with one key and one algorithm."""

    def __init__(self, config: AuthConfig) -> None:
        if bool(config.secret_file) == bool(config.public_key_file):
            raise InvalidConfig(
                "auth needs exactly one of secret_file (HS256) and public_key_file (RS256, ES256, EdDSA)"
            )
        self._key: bytes | PublicKeyTypes
        if config.secret_file:
            self._algorithm, self._key = "HS256", read_secret(config.secret_file)
        else:
            self._algorithm, self._key = _read_public_key(config.public_key_file)
        self._issuer = config.issuer
        self._audience = config.audience
        self.material: Final = (self._algorithm, _bytes_of(self._key), config.issuer, config.audience)
        """All that decides whether a token is good."""

    def read(self, token: str) -> Principal:
        if len(token) > MAX_TOKEN_CHARS:
            raise Unauthenticated(f"the token has {len(token)} characters; at most {MAX_TOKEN_CHARS} are read")
        found = self._claims(token)
        return found if isinstance(found, Principal) else self._refuse(found)

    def _refuse(self, reason: str) -> Principal:
        raise Unauthenticated(f"the token was refused: {reason}")  # outside of any handler: nothing is chained to it

    def _claims(self, token: str) -> Principal | str:
        """Return the principal, or the reason for a refusal."""
        import jwt

        required = ["sub", *(["iss"] if self._issuer else []), *(["aud"] if self._audience else [])]
        try:
            claims = jwt.decode(
                token,
                self._key,  # type: ignore[arg-type]  # of the kinds that the algorithm takes
                algorithms=[self._algorithm],
                leeway=LEEWAY_S,
                issuer=self._issuer or None,
                audience=self._audience or None,
                options={"require": required},
            )
        except jwt.ExpiredSignatureError:
            return "it has expired; get a new one"
        except jwt.ImmatureSignatureError:
            return "it is not valid yet; compare the clocks"
        except jwt.MissingRequiredClaimError as error:
            return f"it has no {error.claim!r} claim"
        except jwt.InvalidAudienceError:
            if self._audience:
                return "it is for another audience"
            return "it is for a certain audience, and this broker has none configured"
        except jwt.InvalidIssuerError:
            return "it comes from another issuer"
        except jwt.InvalidAlgorithmError:
            return f"it is not signed with {self._algorithm}, which is what this broker's key takes"
        except jwt.InvalidSignatureError:
            return "its signature was not made with this broker's key"
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            return "it is no JSON web token that can be read"
        return _principal(claims)


def _principal(claims: Mapping[str, Any]) -> Principal | str:
    name = claims["sub"]
    roles = claims.get("roles", [name])
    if not isinstance(name, str) or not name:
        return "its 'sub' claim is not a name"
    if not isinstance(roles, list) or not all(isinstance(role, str) and role for role in roles):
        return "its 'roles' claim is not a list of names"
    if len(roles) > MAX_ROLES:
        return f"it has {len(roles)} roles; at most {MAX_ROLES} are taken"
    expires = claims.get("exp")
    try:
        return Principal(name, tuple(roles), None if expires is None else float(expires))
    except (ValueError, TypeError, OverflowError):
        return "its 'exp' claim is no time in seconds since 1970"


def _bytes_of(key: bytes | PublicKeyTypes) -> bytes:
    if isinstance(key, bytes):
        return key
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _read_file(what: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError as error:
        raise InvalidConfig(f"auth: the {what} {path!r} cannot be read: {error.strerror}") from error


def read_secret(path: str) -> bytes:
    secret = _read_file("secret file", path)
    if _TEXT.issuperset(secret):
        secret = secret.strip()  # the newline of an editor or of `openssl rand -base64`; random bytes stay as they are
    if len(secret) < MIN_SECRET_BYTES:
        raise InvalidConfig(
            f"auth: the secret in {path!r} has {len(secret)} bytes; HS256 needs at least {MIN_SECRET_BYTES} "
            "(for example `openssl rand -base64 48`)"
        )
    if secret.startswith((b"-----BEGIN", b"ssh-")):
        raise InvalidConfig(
            f"auth: {path!r} holds a key pair's key, not a secret: give a public key as public_key_file"
        )
    return secret


def _read_public_key(path: str) -> tuple[str, PublicKeyTypes]:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    pem = _read_file("public key file", path)
    if b"PRIVATE KEY" in pem:
        raise InvalidConfig(f"auth: {path!r} holds a private key; a broker needs, and should have, only the public one")
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidConfig(f"auth: {path!r} is no public key in PEM ('-----BEGIN PUBLIC KEY-----')") from error
    if isinstance(key, RSAPublicKey) and key.key_size >= MIN_RSA_BITS:
        return "RS256", key
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return "ES256", key
    if isinstance(key, Ed25519PublicKey):
        return "EdDSA", key
    raise InvalidConfig(f"auth: the key in {path!r} must be RSA of {MIN_RSA_BITS} bits or more, EC P-256 or Ed25519")
