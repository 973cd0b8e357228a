"""A broker's configuration from a file, the environment and options; every mistake is one line that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from braid.broker.config import BrokerConfig, Grant
from braid.cli.commands.serve import serve
from braid.cli.config import load_config
from braid.model.errors import InvalidArgument, InvalidConfig


def written(folder: Path, text: str) -> str:
    path = folder / "broker.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_nothing_given_is_the_default_configuration() -> None:
    assert load_config(None, {"id": None, "data": None}) == BrokerConfig()


def test_a_file_sets_every_part(tmp_path: Path) -> None:
    text = """
        id = "b7"
        listen = "0.0.0.0:7000"
        cache_bytes = 1_048_576
        replace_after_s = 60
        rack = "r1"
        [labels]
        team = "ops"
        [limits]
        max_connections = 12
        [cursors]
        flush_s = 0.5
        [groups]
        session_grace_s = 3
        [auth]
        secret_file = "secret"
        superusers = ["ops"]
        [[auth.grants]]
        role = "billing"
        on = "public/default/orders"
        allow = ["consume"]
    """
    config = load_config(written(tmp_path, text), {})
    assert (config.id, config.listen, config.cache_bytes) == ("b7", "0.0.0.0:7000", 1 << 20)
    assert (config.labels, config.rack, config.replace_after_s) == ({"team": "ops"}, "r1", 60.0)
    assert config.limits.max_connections == 12
    assert config.limits.max_channels == BrokerConfig().limits.max_channels
    assert (config.cursors.flush_s, config.groups.session_grace_s) == (0.5, 3.0)
    assert config.auth is not None
    assert config.auth.grants == (Grant(role="billing", on="public/default/orders", allow=("consume",)),)


def test_an_option_wins_over_the_file(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, 'id = "b7"\nadmin = "127.0.0.1:1"'), {"id": "b8", "admin": None})
    assert (config.id, config.admin) == ("b8", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[limits]\nmax_conections = 1", "limits.max_conections is no setting; did you mean max_connections?"),
        ("colour = 1", "colour is no setting; there are id, data, listen"),
        ('[limits]\nmax_connections = "many"', "limits.max_connections: expected int, got str"),
        ("[limits]\nmax_connections = 0", "limits.max_connections is 0; it must be above 0"),
        ("lease_ttl_s = nan", "lease_ttl_s is nan; it must be above 0"),
        ("cache_bytes = true", "cache_bytes: expected int, got bool"),
        ("limits = 3", "limits: expected object, got int"),
        ('[tls]\nkey = "k"', "tls.certificate is missing"),
        ('[[auth.grants]]\nrole = "a"', "auth.grants[0].on is missing"),
        (
            '[[auth.grants]]\nrole = "a"\non = "*"\nallow = []\nto = 1',
            "auth.grants[0].to is no setting; there are role",
        ),
        ('id = "two words"', "'two words' is no broker name"),
        ('listen = "here"', "listen is 'here', which has no port: write HOST:PORT"),
        ('admin = "127.0.0.1:http"', "admin: '127.0.0.1:http' is no address"),
        ('metadata = "postgres://x"', "metadata is 'postgres://x'; write sqlite:PATH or etcd://HOST:PORT,…"),
        ('metadata = "sqlite:"', "metadata is 'sqlite:'; write"),
        ('storage = "ftp://x"', "storage is 'ftp://x'; write local, file:///PATH or s3://BUCKET/PREFIX"),
        ('data = ""', "data is empty"),
        ("lease_ttl_s = 1", "lease_ttl_s is 1.0; below 2 s"),
        ('[tls]\ncertificate = "/none"\nkey = "/none"', "tls.certificate: /none cannot be read: No such file"),
    ],
)
def test_a_mistake_is_one_line_that_names_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidConfig) as caught:
        load_config(path, {})
    assert str(caught.value).startswith(f"{path}: {said}")
    assert "\n" not in str(caught.value)


def test_a_mistake_in_an_option_does_not_blame_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, 'id = "b7"')
    with pytest.raises(InvalidArgument, match=r"^storage is 'nfs'; write local"):
        load_config(path, {"storage": "nfs"})
    with pytest.raises(InvalidArgument, match=r"^'a b' is no broker name"):
        load_config(path, {"id": "a b"})


def test_a_file_that_is_absent_or_no_toml_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"none\.toml cannot be read: No such file or directory"):
        load_config(str(tmp_path / "none.toml"), {})
    with pytest.raises(InvalidConfig, match=r"broker\.toml is no TOML: .*line 1"):
        load_config(written(tmp_path, "id == 3"), {})
    (tmp_path / "bytes.toml").write_bytes(b'id = "\xff"')
    with pytest.raises(InvalidConfig, match="is no text in UTF-8"):
        load_config(str(tmp_path / "bytes.toml"), {})


def test_the_environment_counts_where_no_option_is_given(tmp_path: Path) -> None:
    """The broker is not started: a wrong value ends the command where the configuration is checked."""
    runner = CliRunner(env={"BRAID_STORAGE": "from-env", "BRAID_DATA": str(tmp_path)})
    assert "storage is 'from-env'" in str(runner.invoke(serve, []).exception)
    assert "storage is 'from-option'" in str(runner.invoke(serve, ["--storage", "from-option"]).exception)
    file = written(tmp_path, 'storage = "from-file"')
    assert "storage is 'from-env'" in str(runner.invoke(serve, ["--config", file]).exception)
    runner = CliRunner(env={"BRAID_CONFIG": file})
    assert "storage is 'from-file'" in str(runner.invoke(serve, []).exception)
