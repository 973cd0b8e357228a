"""`braid token`: tokens for brokers whose configuration has `[auth]`. Works without a broker."""

from __future__ import annotations

import os
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import click

from braid.cli.extras import require_server
from braid.cli.terminal.output import json_option, print_json, print_note
from braid.cli.terminal.param_types import DURATION
from braid.model.errors import BraidError, InvalidArgument, InvalidConfig

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

SECRET_BYTES: Final = 48


@click.group()
def token() -> None:
    """Make tokens for brokers that ask for them.

    \b
    Examples:
      braid token keygen secret                                  # once; the broker's [auth] secret_file
      braid token create --role ops --secret-file secret         # prints the token
      export BRAID_TOKEN=$(braid token create --role billing --expires 30d --secret-file secret)
    """


@token.command()
@click.option("--role", "roles", multiple=True, required=True, metavar="ROLE", help="A role of the bearer. Repeatable.")
@click.option("--name", metavar="NAME", help="The bearer's name in logs. [default: the first role]")
@click.option(
    "--expires", type=DURATION, metavar="TIME", help="How long the token is valid: 15m, 12h, 30d. [default: for ever]"
)
@click.option("--secret-file", metavar="FILE", help="The broker's shared secret (HS256).")
@click.option("--private-key-file", metavar="FILE", help="PEM of an RSA, EC P-256 or Ed25519 key.")
@click.option("--issuer", metavar="TEXT", help="For brokers with [auth] issuer.")
@click.option("--audience", metavar="TEXT", help="For brokers with [auth] audience.")
@json_option
def create(
    roles: tuple[str, ...],
    name: str | None,
    expires: int | None,
    secret_file: str | None,
    private_key_file: str | None,
    issuer: str | None,
    audience: str | None,
    as_json: bool,
) -> None:
    """Print a token (a JWT).

    \b
    Examples:
      braid token create --role ops --secret-file secret
      braid token create --role billing --name billing-1 --expires 30d --private-key-file key.pem
    """
    require_server("braid token create")
    import jwt

    if bool(secret_file) == bool(private_key_file):
        raise click.UsageError("give exactly one of --secret-file and --private-key-file")
    key: bytes | PrivateKeyTypes
    if secret_file:
        algorithm, key = "HS256", _read_secret(secret_file)
    else:
        assert private_key_file
        algorithm, key = _read_private_key(private_key_file)
    now = int(time.time())
    claims: dict[str, Any] = {"sub": name or roles[0], "roles": list(roles), "iat": now}
    if expires is not None:
        claims["exp"] = now + expires
    if issuer:
        claims["iss"] = issuer
    if audience:
        claims["aud"] = audience
    made = jwt.encode(claims, key, algorithm=algorithm)  # type: ignore[arg-type]  # of the kinds that the algorithm takes
    if as_json:
        print_json({"token": made, "algorithm": algorithm, "claims": claims})
    else:
        click.echo(made)


@token.command()
@click.argument("file")
@json_option
def keygen(file: str, as_json: bool) -> None:
    """Write a new random secret to FILE, readable by its owner only.

    \b
    Examples:
      braid token keygen /etc/braid/secret
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise BraidError(
            f"{file} exists; a secret that is replaced makes every token worthless: delete it first"
        ) from None
    except OSError as error:
        raise BraidError(f"{file} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as out:
        out.write(secrets.token_urlsafe(SECRET_BYTES) + "\n")
    if as_json:
        print_json({"file": os.path.abspath(file), "algorithm": "HS256"})
    else:
        print_note(f'Wrote {file}. In the broker\'s configuration: [auth] secret_file = "{file}"')


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error


def _read_secret(path: str) -> bytes:
    from braid.broker.auth import read_secret

    try:
        return read_secret(path)
    except InvalidConfig as error:
        raise InvalidArgument(str(error).removeprefix("auth: ")) from error


def _read_private_key(path: str) -> tuple[str, PrivateKeyTypes]:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(path), password=None)
    except TypeError as error:
        raise InvalidArgument(f"the key in {path} has a password: write it without one to make tokens") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidArgument(f"{path} is no private key in PEM") from error
    if isinstance(key, RSAPrivateKey):
        return "RS256", key
    if isinstance(key, EllipticCurvePrivateKey) and isinstance(key.curve, SECP256R1):
        return "ES256", key
    if isinstance(key, Ed25519PrivateKey):
        return "EdDSA", key
    raise InvalidArgument(f"the key in {path} must be RSA, EC P-256 or Ed25519")
