"""docs/operating/configuration.md has every setting of a broker with its default; files that documents show work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from braid.broker.auth import Access
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
from braid.cli.commands.serve import serve
from braid.cli.config import load_config
from braid.client.consuming.stream import RELEASE_GRACE_S
from braid.model.topic import AutoScalePolicy
from braid.storage.log.context import MAX_FILE_BYTES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "operating" / "configuration.md").read_text(encoding="utf-8")

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "": BrokerConfig,
    "limits.": Limits,
    "cursors.": CursorConfig,
    "groups.": GroupConfig,
    "auto_scale.": AutoScalePolicy,
    "tls.": BrokerTlsConfig,
    "admin_tls.": TlsConfig,
    "auth.": AuthConfig,
    "auth.grants.": Grant,
}
TABLES = {prefix.rstrip(".") for prefix in SECTIONS} - {"auth.grants"}


def default_of(field: msgspec.structs.FieldInfo) -> object:
    return "" if field.default_factory is dict else field.default


def shown(name: str, default: object) -> str:
    match default:
        case msgspec.NODEFAULT:
            return "required"
        case "":
            return "empty"
        case ():
            return "none"
        case str():
            return f"`{default}`"
        case bool():
            return f"`{str(default).lower()}`"
        case int() | float() if name.endswith("_s"):
            return f"{default:g} s"
        case int() if "bytes" in name and default % (1 << 20) == 0:
            return f"{default >> 20} MiB"
        case int() if "bytes" in name:
            return f"{default:,} bytes"
    return f"{default:,}"


def settings() -> Iterator[tuple[str, str]]:
    for prefix, struct in SECTIONS.items():
        for field in msgspec.structs.fields(struct):
            if prefix + field.name not in TABLES:
                yield prefix + field.name, shown(field.name, default_of(field))


def test_every_setting_is_there_once_with_its_default_and_no_other() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", PAGE, flags=re.MULTILINE)
    assert sorted(rows) == sorted(settings())


def test_every_struct_of_the_configuration_is_looked_at() -> None:
    """A table that is added to the configuration belongs into SECTIONS."""
    parts = {field.name for field in msgspec.structs.fields(BrokerConfig) if "braid." in str(field.type)}
    assert parts | {""} == TABLES


def test_every_option_stands_beside_its_key_with_its_variable() -> None:
    for parameter in serve.params:
        option, variable = parameter.opts[0], getattr(parameter, "envvar", None)
        found = f"`{option}`, `{variable}`" in PAGE or f"| `{option}` | `{variable}` |" in PAGE
        assert found or (variable is None and f"| `{option}` | |" in PAGE), option
    written = set(re.findall(r"`(--[a-z-]+)`, `BRAID_\w+` \|", PAGE))
    known = {parameter.opts[0] for parameter in serve.params}
    assert written <= known


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    assert f"At most {MAX_FILE_BYTES >> 30} GiB" in PAGE
    assert f"above the {RELEASE_GRACE_S:g} s that the Python client leaves" in PAGE


@pytest.mark.parametrize("name", ["operating/configuration.md", "cli.md"])
def test_the_file_that_a_document_shows_is_accepted(name: str, tmp_path: Path) -> None:
    text = (DOCS / name).read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    for path in set(re.findall(r'"/etc/braid/([^"]+)"', text)):
        (tmp_path / path).write_text("a secret, or whatever a file has: 40 bytes")
    file = tmp_path / "broker.toml"
    file.write_text(text.replace("/etc/braid/", f"{tmp_path}/"), encoding="utf-8")
    config = load_config(str(file), {})
    assert config != BrokerConfig()
    assert config.limits.max_connections == 2_000
    Access(config.auth)
