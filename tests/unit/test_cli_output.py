"""What people and programs see of the command line, without a broker."""

from __future__ import annotations

import json
import os
import pty
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click
import jwt
import pytest
from click.testing import CliRunner

from braid.cli import main, target
from braid.cli.commands.subscription import parse_offsets, parse_timestamp_ms
from braid.cli.commands.tokens import token
from braid.cli.commands.up import how_it_ended, next_pause
from braid.cli.main import COMMANDS
from braid.cli.target import Target, with_target
from braid.cli.terminal.output import (
    Column,
    backlog_text,
    bytes_text,
    count_text,
    duration_text,
    print_table,
    print_undrained,
    print_unreadable,
    range_text,
    time_text,
)
from braid.cli.terminal.param_types import DURATION, SIZE
from braid.model.errors import TimedOut
from braid.wire.address import DEFAULT_URL
from tests.kits.commands import environment, run_to_end

BRAID = (sys.executable, "-m", "braid.cli.main")
PLAIN: Final = {"NO_COLOR": "", "TERM": "xterm", "COLUMNS": ""}


def clean_environment(**more: str) -> dict[str, str]:
    return environment(**{**PLAIN, **more})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in an interpreter of its own."""
    return subprocess.run([*BRAID, *arguments], capture_output=True, text=True, env=clean_environment(), timeout=60)


def run_forked(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = run_to_end("", *arguments, more=PLAIN)
    return subprocess.CompletedProcess(arguments, done.returncode, done.stdout.decode(), done.stderr.decode())


def run_on_terminal(code: str, **environment: str) -> str:
    """What a program prints on a terminal."""
    parent, child = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=child, stdout=child, stderr=child, env=clean_environment(**environment)
    ) as process:
        os.close(child)
        printed = b""
        while True:
            try:
                block = os.read(parent, 1 << 16)
            except OSError:  # what Linux says when the other side is closed
                break
            printed += block
        assert process.wait() == 0, printed
    os.close(parent)
    return printed.decode()


# Values.


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (102_400, "100 KiB"),
        (1_023_949, "1.0 MiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 70, "1024 EiB"),
    ],
)
def test_sizes_have_three_digits_and_a_unit(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_numbers_times_and_ranges_are_readable() -> None:
    assert count_text(1_234_567) == "1,234,567"
    assert (count_text(None), bytes_text(None)) == ("-", "-")
    assert time_text(1_700_000_000_000_000) == "2023-11-14 22:13:20 UTC"
    assert time_text(1 << 62) == "-"
    assert range_text({"start": 0, "end": 0x7FFF}) == "0000-7fff"
    assert [duration_text(seconds) for seconds in (0.26, 61, 3_725)] == ["0.3 s", "1 min 1 s", "1 h 2 min"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000)])
def test_a_time_has_a_unit(text: str, seconds: int) -> None:
    assert DURATION.convert(text, None, None) == seconds
    assert DURATION.convert(DURATION.text(seconds), None, None) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "0s", "1.5h", "1w"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no time: write 90s, 15m"):
        DURATION.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("4K", 4096), ("10GiB", 10 << 30), ("10GB", 10**10), ("3 MiB", 3 << 20)]
)
def test_a_size_may_have_a_unit(text: str, size: int) -> None:
    assert SIZE.convert(text, None, None) == size


def test_offsets_of_a_seek_name_each_segment_once() -> None:
    assert parse_offsets(("0:1500", "12:0")) == {0: 1500, 12: 0}
    for wrong in (("0",), ("0:",), ("a:1",), ("0:-1",), ("0:1", "0:2")):
        with pytest.raises(click.BadParameter):
            parse_offsets(wrong)


def test_a_time_to_seek_to_is_iso_or_milliseconds() -> None:
    assert parse_timestamp_ms("1700000000000") == 1_700_000_000_000
    assert parse_timestamp_ms("2023-11-14T22:13:20Z") == 1_700_000_000_000
    assert parse_timestamp_ms("2023-11-14T23:13:20+01:00") == 1_700_000_000_000
    assert parse_timestamp_ms("2023-11-14 22:13:20") == 1_700_000_000_000
    with pytest.raises(click.BadParameter, match="is no time"):
        parse_timestamp_ms("yesterday")


# Tables.

TABLE = """
from braid.cli.terminal.output import Column, print_table
print_table([Column("TOPIC"), Column("RECORDS", right=True)], [("orders", "1,200"), ("x" * 100, "7")], empty="none")
"""


def test_a_table_in_a_pipe_has_no_colours_and_is_never_folded(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [Column("TOPIC"), Column("RECORDS", right=True), Column("STATE")]
    print_table(columns, [("orders", "1,200", "ACTIVE"), ("x" * 300, "7", "SEALED")], empty="none")
    header, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["TOPIC", "RECORDS", "STATE"]
    assert first == ["orders", "1,200", "ACTIVE"]
    assert second == ["x" * 300, "7", "SEALED"]


def test_numbers_stand_on_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([Column("N", right=True), Column("NAME")], [("5", "a"), ("12,345", "b")], empty="none")
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.index("5") == second.index("5")


def test_nothing_to_show_is_nothing_in_a_pipe_and_is_said_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([Column("TOPIC")], [], empty="No topics.")
    assert capsys.readouterr() == ("", "No topics.\n")


def test_markup_in_a_name_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([Column("NAME")], [("[red]not markup[/red]",)], empty="")
    assert "[red]not markup[/red]" in capsys.readouterr().out


def test_colours_are_for_terminals_and_not_with_no_color() -> None:
    code = TABLE + "from braid.cli.terminal.output import paint\nprint(paint('word', '31'))\n"
    assert "\x1b[31mword" in run_on_terminal(code)
    assert "\x1b[31m" not in run_on_terminal(code, NO_COLOR="1")
    assert "\x1b[31m" not in run_on_terminal(code, TERM="dumb")
    assert "\x1b" not in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout


# Errors and exit codes.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("topik",), "there is no command 'topik'; did you mean 'topic'? (see braid --help)"),
        (("topic", "create"), "missing argument 'NAME' (see braid topic create --help)"),
        (("topic", "create", "x", "--segments", "many"), "'many' is not a valid integer"),
        (("consume", "orders", "--queue"), "--queue shares a subscription; name it with -s"),
        (("consume", "orders", "-s", "s", "--from", "-1h"), "with -s, --from is earliest or latest"),
        (("consume", "orders", "-s", "s", "--segment", "0"), "--segment is for a look without -s"),
        (("consume", "orders", "--from", "noon"), "'noon' is no place to begin: write earliest, latest, -1h"),
        (("produce", "orders", "--json", "--key-separator", ":"), "two formats; choose one"),
        (("produce", "orders", "-H", "trace"), "'trace' must be NAME=VALUE"),
        (("subscription", "seek", "t", "s"), "exactly one of --to, --offset and --timestamp"),
        (("subscription", "skip", "t", "s", "--count", "1"), "--segment and --count belong together"),
        (("subscription", "create", "t", "s", "--ack-timeout", "5s"), "need --kind queue"),
        (("subscription", "create", "t", "s", "--kind", "queue", "--max-deliveries", "5"), "belong together"),
        (("subscription", "create", "t", "s", "--kind", "queue", "--ack-timeout", "5"), "'5' is no time"),
        (("subscription", "redrive", "t", "s", "--count", "0"), "0 is not in the range"),
        (("token", "create", "--role", "r"), "exactly one of --secret-file and --private-key-file"),
        (("topic", "split", "t", "0", "--at", "zz"), "'zz' is no hash: write 1 to 4 hexadecimal digits"),
        (("up", "--port", "65535"), "65535 + 2 is above 65535"),
        (("consume", "t", "-s", "s", "--json", "--key-separator", ":"), "two formats; choose one"),
        (("topic", "list", "--url", "http://x"), "'http://x' is no broker URL"),
        (("topic", "list", "--tls-ca", "/none.pem"), "/none.pem"),
        (("topic", "create", "a b"), "'a b' is no topic name"),
        (("serve", "--config", "/none.toml"), "the configuration /none.toml cannot be read"),
        (("serve", "--listen", "nowhere"), "listen is 'nowhere', which has no port"),
        (("serve", "--admin", "localhost:http"), "admin: "),
        (("serve", "--id", "a b"), "'a b' is no broker name"),
        (("serve", "--metadata", "mysql:x"), "write sqlite:PATH or etcd://HOST:PORT"),
        (("serve", "--storage", "nfs"), "storage is 'nfs'"),
        (("token", "create", "--role", "r", "--secret-file", "/none"), "'/none' cannot be read"),
        (("token", "create", "--role", "r", "--expires", "soon", "--secret-file", "/none"), "'soon' is no time"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: Sequence[str], said: str) -> None:
    done = run_forked(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("braid: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("token", "keygen", "/none/secret"), "/none/secret cannot be written"),
        (("token", "keygen", "/"), "/ exists"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(arguments: Sequence[str], said: str) -> None:
    done = run_forked(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("braid: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_second_signal_ends_a_broker_at_once() -> None:
    code = """
import asyncio, signal
from braid.cli.commands.serve import _on_signal
stop = asyncio.Event()
_on_signal(stop, signal.SIGTERM)
assert stop.is_set()
print("stopping", flush=True)
_on_signal(stop, signal.SIGTERM)
print("never said")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (128 + 15, "stopping\n")


def test_braid_alone_shows_its_help_as_wrong_usage() -> None:
    done = run_forked()
    assert done.returncode == 2
    assert "Commands:" in done.stderr


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench"])
def test_every_command_explains_itself(name: str) -> None:
    command = main.braid.get_command(click.Context(main.braid), name)
    assert command is not None
    result = CliRunner().invoke(command, ["--help"])
    assert result.exit_code == 0
    listed = COMMANDS[name].help.rstrip(".")
    assert command.help is not None
    assert command.help.startswith(listed.split(";")[0].split(",")[0][:20]), (command.help, listed)
    if isinstance(command, click.Group):
        for each in command.commands.values():
            assert CliRunner().invoke(each, ["--help"]).exit_code == 0


def leaves(command: click.Command) -> Iterator[click.Command]:
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from leaves(each)
    else:
        yield command


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench"])
def test_every_command_can_answer_in_json(name: str) -> None:
    command = main.braid.get_command(click.Context(main.braid), name)
    assert command is not None
    for each in leaves(command):
        assert any("--json" in option.opts for option in each.params), each.name


def test_a_secret_is_written_once_and_said_in_json(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    done = run_forked("token", "keygen", str(secret), "--json")
    assert json.loads(done.stdout) == {"file": str(secret), "algorithm": "HS256"}
    assert secret.stat().st_mode & 0o777 == 0o600
    before = secret.read_bytes()
    assert run_forked("token", "keygen", str(secret), "--json").returncode == 1
    assert secret.read_bytes() == before


def test_the_version_is_printed() -> None:
    import braid

    assert run("--version").stdout == f"braid {braid.__version__}\n"


# What is not needed is not imported.


def modules_after(*arguments: str) -> set[str]:
    code = (
        "import sys\nfrom braid.cli.main import run\n"
        f"run({list(arguments)!r})\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment())
    return set(done.stderr.split())


def test_help_imports_no_command_and_nothing_heavy() -> None:
    loaded = modules_after("--help")
    assert "braid.cli.main" in loaded
    assert not loaded & {
        "rich",
        "asyncio",
        "ssl",
        "pyarrow",
        "numpy",
        "fastapi",
        "jwt",
        "braid.cli.commands.topic",
        "braid.broker.broker",
    }


def test_help_of_produce_imports_neither_rich_nor_arrow() -> None:
    loaded = modules_after("produce", "--help")
    assert "braid.cli.commands.produce" in loaded
    assert not loaded & {"rich", "pyarrow", "numpy", "fastapi"}


def test_help_is_there_at_once() -> None:
    """0.08 s on an idle machine. Processor time, the least of some runs: what others do there does not count."""

    def spent_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    best = 10.0
    for _ in range(5):
        before = spent_s()
        assert run("--help").returncode == 0
        best = min(best, spent_s() - before)
    assert best < 0.25


# Which broker.


def targets(*arguments: str, **environment: str) -> Target:
    found: list[Target] = []

    @click.command()
    @with_target
    def probe(target: Target) -> None:
        found.append(target)

    @click.group()
    @target.target_parameters(at_root=True)
    @click.pass_context
    def root(ctx: click.Context, /, **options: str | None) -> None:
        ctx.obj = target.remember_target(Target(), options)

    root.add_command(probe)
    result = CliRunner(env=environment).invoke(root, arguments)
    assert result.exit_code == 0, result.output
    return found[0]


def test_the_default_url_is_the_clients() -> None:
    assert Target().url == DEFAULT_URL


def test_options_behind_the_command_win_then_before_it_then_the_environment() -> None:
    environment = {"BRAID_URL": "braid://env:1", "BRAID_TOKEN": "t-env"}
    assert targets("probe", **environment) == Target(url="braid://env:1", token="t-env")
    assert targets("--url", "braid://root:1", "probe", **environment).url == "braid://root:1"
    assert targets("--url", "braid://root:1", "probe", "--url", "braid://own:1", **environment).url == "braid://own:1"
    assert targets("probe", "--token", "t-own", **environment) == Target(url="braid://env:1", token="t-own")
    assert targets("probe", BRAID_TLS_CA="ca.pem", BRAID_ADMIN_URL="http://a").tls_ca == "ca.pem"


# Tokens.


def test_a_token_carries_who_and_what_and_for_how_long(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    assert CliRunner().invoke(token, ["keygen", str(secret)]).exit_code == 0
    assert secret.stat().st_mode & 0o777 == 0o600
    arguments = [
        "--role",
        "billing",
        "--role",
        "audit",
        "--name",
        "billing-1",
        "--expires",
        "30d",
        "--audience",
        "prod",
    ]
    result = CliRunner().invoke(token, ["create", *arguments, "--secret-file", str(secret)])
    claims = jwt.decode(
        result.output.strip(), secret.read_text().strip(), algorithms=["HS256"], audience="prod", leeway=60
    )
    assert (claims["sub"], claims["roles"]) == ("billing-1", ["billing", "audit"])
    assert claims["exp"] - claims["iat"] == 30 * 86_400


def test_a_token_from_a_private_key_takes_the_keys_algorithm(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    path = tmp_path / "key.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    result = CliRunner().invoke(token, ["create", "--role", "ops", "--private-key-file", str(path), "--json"])
    made = json.loads(result.output)
    assert made["algorithm"] == "EdDSA"
    assert jwt.decode(made["token"], key.public_key(), algorithms=["EdDSA"])["sub"] == "ops"


def test_a_secret_is_not_overwritten_and_a_short_one_not_taken(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short")
    assert "exists" in str(CliRunner().invoke(token, ["keygen", str(secret)]).exception)
    assert secret.read_text() == "short"
    made = CliRunner().invoke(token, ["create", "--role", "r", "--secret-file", str(secret)])
    assert "HS256 needs at least 32" in str(made.exception)


def test_a_backlog_of_which_a_part_is_not_known_says_so() -> None:
    assert backlog_text({"backlog": 1_700, "unavailable": {}}) == "1,700"
    assert backlog_text({"backlog": 1_700, "unavailable": {"3": {"owner": "b", "reason": "it is gone"}}}) == "1,700+"


def test_a_subscription_that_cannot_be_read_is_named_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    print_unreadable("billing", {"unreadable": None})
    print_unreadable("billing", {})
    assert capsys.readouterr().out == ""
    print_unreadable("billing", {"unreadable": "the Subscription at /x cannot be read"})
    assert "takes no consumers: the Subscription at /x cannot be read." in capsys.readouterr().out
    assert time_text(None) == "-"


def test_a_subscription_that_nobody_reads_and_that_keeps_sealed_segments_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reader = {"worker": {"segments": [0], "connected": True}}
    gone = {"worker": {"segments": [0], "connected": False}}
    print_undrained("billing", {"undrained": [], "consumers": {}})
    print_undrained("billing", {"undrained": [0, 3], "consumers": reader})
    assert capsys.readouterr().out == ""
    print_undrained("billing", {"undrained": [0, 3], "consumers": gone})
    assert "billing has no consumer" in (said := capsys.readouterr().out)
    assert "segment 0, 3. Consume, skip or delete it" in said


def test_a_timeout_is_reported_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def give_up(**_: object) -> None:
        raise TimedOut("segment 0 did not arrive within 60 s")

    monkeypatch.setattr(main.braid, "main", give_up)
    assert main.run([]) == 1
    assert capsys.readouterr().err == "braid: segment 0 did not arrive within 60 s\n"


def test_a_broker_that_dies_again_and_again_is_started_after_pauses_that_double_up_to_a_limit() -> None:
    pauses = [0.0]
    for _ in range(10):
        pauses.append(next_pause(pauses[-1], lived_s=1.0))
    assert pauses[1:] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert next_pause(30.0, lived_s=60.0) == 0.5


def test_the_end_of_a_process_is_described() -> None:
    assert how_it_ended(1) == "has ended with exit code 1"
    assert how_it_ended(-9) == "was ended by SIGKILL"
    assert how_it_ended(-250) == "was ended by signal 250"
