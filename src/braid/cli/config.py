"""A broker's configuration, from a TOML file, the environment and options, in this order: the last one wins.

The file has BrokerConfig's names: plain keys for the broker itself, tables for its parts.

    id = "broker-1"
    listen = "0.0.0.0:6660"

    [limits]
    max_connections = 2_000

    [auth]
    secret_file = "/etc/braid/secret"
    superusers = ["ops"]

    [[auth.grants]]
    role = "billing"
    on = "public/default/orders"
    allow = ["consume"]

A wrong setting is an error of one line that names the key as it stands in the file. Paths are as seen from the folder
that the broker is started in.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from braid.admin.logs import LEVELS
from braid.broker.config import (
    AuthConfig,
    BrokerConfig,
    BrokerTlsConfig,
    CursorConfig,
    Grant,
    GroupConfig,
    Limits,
    TlsConfig,
)
from braid.model.errors import BraidError, InvalidArgument, InvalidConfig, InvalidName
from braid.model.topic import AutoScalePolicy
from braid.wire.address import parse_address

_SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "": BrokerConfig,
    "limits": Limits,
    "cursors": CursorConfig,
    "groups": GroupConfig,
    "auto_scale": AutoScalePolicy,
    "tls": BrokerTlsConfig,
    "admin_tls": TlsConfig,
    "auth": AuthConfig,
    "auth.grants": Grant,
}
_MAY_BE_ZERO: Final = frozenset({"spare_files"})
_METADATA: Final = ("sqlite:", "etcd://")
_NO_PORT: Final = -1
"""The port of an address without one."""
_STORAGE: Final = ("file://", "s3://", "gs://", "az://")


def load_config(path: str | None, settings: Mapping[str, str | bool | float | None]) -> BrokerConfig:
    """Read the configuration of a broker. Settings that are not None replace those of the file. Raises `InvalidConfig`
    for the contents of the file, and `InvalidArgument` for a setting or a file that cannot be used at all."""
    given = {name: value for name, value in settings.items() if value is not None}

    def refuse(key: str, message: str) -> BraidError:
        from_file = path and key.partition(".")[0] not in given
        return InvalidConfig(f"{path}: {message}") if from_file else InvalidArgument(message)

    values = {**(_read(path) if path else {}), **given}
    try:
        config = msgspec.convert(values, BrokerConfig)
    except msgspec.ValidationError as error:
        raise refuse("", _explain(str(error))) from error
    except BraidError as error:
        raise refuse("id" if isinstance(error, InvalidName) else "", str(error)) from error
    for key, wrong in _wrong_values(config):
        raise refuse(key, wrong)
    return config


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidArgument(f"the configuration {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"the configuration {path} is no text in UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"the configuration {path} is no TOML: {error}") from error


def _explain(message: str) -> str:
    """Rephrase msgspec's message for a reader of the file: the key first, as it is written there."""
    text, _, place = message.partition(" - at ")
    key = place.strip("`").removeprefix("$").removeprefix(".")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", text)
    missing = re.fullmatch(r"Object missing required field `(.*)`", text)
    if unknown is not None:
        known = _SECTIONS[re.sub(r"\[(\d+|\.\.\.)\]", "", key)].__struct_fields__
        close = difflib.get_close_matches(unknown[1], known, n=1)
        meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        return f"{_join(key, unknown[1])} is no setting; {meant}"
    if missing is not None:
        return f"{_join(key, missing[1])} is missing"
    return f"{key or 'the file'}: {text[:1].lower()}{text[1:]}".replace("`", "")


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _wrong_values(config: BrokerConfig) -> Iterator[tuple[str, str]]:
    """Yield keys, and what is wrong with their values."""
    for key in ("listen", "admin", "advertise"):
        address = getattr(config, key)
        if not address and key == "advertise":
            continue
        try:
            if parse_address(address, default_port=_NO_PORT).port == _NO_PORT:
                yield key, f"{key} is {address!r}, which has no port: write HOST:PORT"
        except BraidError as error:
            yield key, f"{key}: {error}"
    if config.metadata and not _names(config.metadata, _METADATA):
        yield "metadata", f"metadata is {config.metadata!r}; write sqlite:PATH or etcd://HOST:PORT,…"
    if config.storage != "local" and not _names(config.storage, _STORAGE):
        yield "storage", f"storage is {config.storage!r}; write local, file:///PATH or s3://BUCKET/PREFIX"
    if config.log_level not in LEVELS:
        yield "log_level", f"log_level is {config.log_level!r}; write one of {', '.join(LEVELS)}"
    if not config.data:
        yield "data", "data is empty; name the folder for the broker's files"
    parts = {"": config, "limits": config.limits, "cursors": config.cursors, "groups": config.groups}
    for section, part in parts.items():
        for field in part.__struct_fields__:
            value = getattr(part, field)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not (value > 0 or (value == 0 and field in _MAY_BE_ZERO)):
                yield section, f"{_join(section, field)} is {value}; it must be above 0"
    for section, tls in ("tls", config.tls), ("admin_tls", config.admin_tls):
        for field, path in _files_of(tls):
            if (reason := _unreadable(path)) is not None:
                yield section, f"{section}.{field}: {path} cannot be read: {reason}"


def _names(url: str, schemes: tuple[str, ...]) -> bool:
    return any(url.startswith(scheme) and len(url) > len(scheme) for scheme in schemes)


def _files_of(tls: TlsConfig | None) -> Iterator[tuple[str, str]]:
    if tls is not None:
        for field in tls.__struct_fields__:
            path = getattr(tls, field)
            if path or field not in ("client_ca", "peer_ca"):
                yield field, path


def _unreadable(path: str) -> str | None:
    try:
        with open(path, "rb"):
            return None
    except OSError as error:
        return error.strerror or str(error)
