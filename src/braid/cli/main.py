"""`braid`: the command, and how its errors look.

Each command has its own module, which is imported on use: `braid produce` in a pipe must not wait for the imports of
`braid serve`, and `braid --help` must wait for none. An error is one line on stderr, `braid: …`, with exit code 1.
Wrong usage is one line, too, with exit code 2; this includes a value that can never work (`InvalidArgument`), whether
we or a broker found it. Only our own bugs show a traceback.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import click

import braid as package
from braid.cli.target import Target, remember_target, target_parameters
from braid.cli.terminal.output import print_error
from braid.model.errors import BraidError, InvalidArgument

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
"""The exit code of a program that Ctrl-C ended, as shells report it."""


class Lazy(NamedTuple):
    """A command that is imported on use."""

    where: str
    """`module:attribute`"""
    help: str


class LazyGroup(click.Group):
    """A group that knows the name and one line of help of each command, and imports the command on use."""

    def __init__(self, *args: Any, lazy: Mapping[str, Lazy], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (click's signature)
        lazy = self.lazy.get(cmd_name)
        if lazy is None:
            return None
        module, _, attribute = lazy.where.partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise click.ClickException(f"braid {cmd_name} is not in this version yet") from None
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.lazy and not name.startswith("-"):
            close = difflib.get_close_matches(name, self.lazy, n=1)
            meant = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(self.lazy)}"
            raise click.UsageError(f"there is no command {name!r}; {meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's signature)
        # Click would import every command to get its line.
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in self.lazy.items()])


COMMANDS: Final = {
    "serve": Lazy("braid.cli.commands.serve:serve", "Run a broker."),
    "up": Lazy("braid.cli.commands.up:up", "Run a cluster of brokers on this machine, until Ctrl-C."),
    "console": Lazy("braid.cli.console:console", "Show a cluster in the browser."),
    "topic": Lazy("braid.cli.commands.topic:topic", "Create, look at, change and delete topics."),
    "subscription": Lazy(
        "braid.cli.commands.subscription:subscription", "Create, look at, move and delete subscriptions."
    ),
    "broker": Lazy("braid.cli.commands.broker:broker", "Look at brokers; take one out of service and back."),
    "produce": Lazy("braid.cli.commands.produce:produce", "Publish lines of stdin, one record each."),
    "consume": Lazy("braid.cli.commands.consume:consume", "Print the records of a topic, one per line."),
    "token": Lazy("braid.cli.commands.tokens:token", "Make tokens for brokers that ask for them."),
    "pipeline": Lazy("braid.cli.pipeline.commands:pipeline", "Spark jobs over the history of topics."),
    "doctor": Lazy("braid.cli.doctor.commands:doctor", "Check a machine and a cluster, and say what to change."),
    "backup": Lazy("braid.cli.backup.commands:backup", "Write all metadata of a cluster into a file."),
    "restore": Lazy("braid.cli.backup.commands:restore", "Restore a cluster's metadata from a backup."),
    "bench": Lazy("braid.cli.bench.commands:bench", "Measure publishing, consuming, latency and moves."),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with `braid serve`, then `braid topic create orders`. `braid COMMAND --help` has examples.",
)
@click.version_option(package.__version__, message="braid %(version)s")
@target_parameters(at_root=True)
@click.pass_context
def braid(ctx: click.Context, /, **options: str | None) -> None:
    """Braid, a durable message broker."""
    ctx.obj = remember_target(Target(), options)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and end the process: the entry point."""
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    try:
        code = braid.main(args=args, prog_name="braid", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.UsageError as error:
        print_error(_usage_line(error))
        return EXIT_USAGE
    except click.ClickException as error:
        print_error(error.format_message())
        return EXIT_ERROR
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output closed the pipe, which is no error. Python would complain again at its end, when it
        # flushes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except InvalidArgument as error:
        print_error(str(error))
        return EXIT_USAGE
    except BraidError as error:
        print_error(str(error))
        return EXIT_ERROR
    except OSError as error:
        # Our own files and sockets raise `BraidError`. This error comes from the terminal, pipe or file of our output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print_error(f"the output cannot be written: {error.strerror or error}")
        return EXIT_ERROR
    return code if isinstance(code, int) else 0


def _usage_line(error: click.UsageError) -> str:
    message = error.format_message().replace("\n", " ").strip().removesuffix(".")
    where = error.ctx.command_path if error.ctx is not None else "braid"
    return f"{message[:1].lower()}{message[1:]} (see {where} --help)"


if __name__ == "__main__":
    main()
