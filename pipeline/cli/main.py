"""The `nxpipe` command: finds the asked-for subcommand, and turns every error into a sentence and an exit code."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import sentence_of
from nxpipe.pipeline.util.process import exit_quietly, handle_signals

# name -> (where it lives, one line for `nxpipe --help`). The line is here so that a listing imports no command.
COMMANDS = {
    "agent": ("nxpipe.pipeline.cli.agent:agent", "Make an instance of a fleet ready, and start its server."),
    "ami": ("nxpipe.pipeline.cli.ami:ami", "Choose the machine images that instances start from."),
    "bench": (
        "nxpipe.pipeline.cli.bench:bench",
        "Show how fast programs are predicted to be, and hold that against a channel.",
    ),
    "build": (
        "nxpipe.pipeline.cli.build:build",
        "Compile a model on the emulator, verify it, publish the artifact.",
    ),
    "cache": ("nxpipe.pipeline.cli.cache:cache", "Fill the compile cache that Neuron instances look into."),
    "channel": ("nxpipe.pipeline.cli.channel:channel", "Show what channels serve, and their history."),
    "check": (
        "nxpipe.pipeline.cli.check:check",
        "Say all that stands between a model and a target, without weights.",
    ),
    "completion": ("nxpipe.pipeline.cli.completion:completion", "Print a shell completion script."),
    "config": ("nxpipe.pipeline.cli.config:config", "Check, show or describe nxpipe.toml."),
    "diff": (
        "nxpipe.pipeline.cli.diff:diff",
        "Compare two artifacts: key inputs, programs, graphs, weights, files, evidence.",
    ),
    "dis": ("nxpipe.pipeline.cli.dis:dis", "Print an executable's program as text, or what it adds up to."),
    "doctor": ("nxpipe.pipeline.cli.doctor:doctor", "Say what is installed, what is missing for which command."),
    "explain": (
        "nxpipe.pipeline.cli.explain:explain",
        "Say why a build is answered by the store or not, field by field.",
    ),
    "infra": (
        "nxpipe.pipeline.cli.infra:infra",
        "Check templates, plan deployments, write the manifests of a cluster.",
    ),
    "init": ("nxpipe.pipeline.cli.init:init", "Write nxpipe.toml and a release workflow into a repository."),
    "promote": ("nxpipe.pipeline.cli.promote:promote", "Serve artifacts on a channel from now on."),
    "release": ("nxpipe.pipeline.cli.release:release", "Take models through all gates to a channel; resumes."),
    "rollback": ("nxpipe.pipeline.cli.rollback:rollback", "Serve again what a channel served before."),
    "rollout": (
        "nxpipe.pipeline.cli.rollout.group:rollout",
        "Give a new version traffic step by step, as evidence allows.",
    ),
    "run": ("nxpipe.pipeline.cli.run:run", "Run a model's programs on the emulator, and show what they answer."),
    "store": (
        "nxpipe.pipeline.cli.store.group:store",
        "Look after artifacts: list, compare, fetch, sign, collect.",
    ),
    "verify": (
        "nxpipe.pipeline.cli.verify:verify",
        "Compare the emulated model with PyTorch, layer by layer if asked.",
    ),
    "version": (
        "nxpipe.pipeline.cli.version:version",
        "Print the versions of nxpipe, its backends and libraries.",
    ),
    "worker": ("nxpipe.pipeline.cli.worker:worker", "Carry out items of a build on a build farm."),
}


def _set_flag(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and param.name is not None:
        setattr(ctx.ensure_object(Console), param.name, True)


def _common_options() -> list[click.Option]:
    """`--json`, `--quiet` and `--verbose` stand after any command as well as before it."""
    return [
        click.Option([*names], is_flag=True, expose_value=False, is_eager=True, callback=_set_flag, help=text)
        for names, text in (
            (("--json",), "Print the result as one JSON document."),
            (("--quiet", "-q"), "Say nothing on stderr but errors."),
            (("--verbose", "-v"), "Say more on stderr, with tracebacks."),
        )
    ]


class _ShortHelp(click.Command):
    """`-h` helps as `--help` does."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return ["-h", "--help"]


class Command(_ShortHelp):
    """A click command with the options that every command has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(_common_options())

    def invoke(self, ctx: click.Context) -> Any:
        """Whatever a command reads of a model, a confined process reads for it."""
        from nxpipe.emulator.confinement import confined

        with confined():
            return super().invoke(ctx)


class Group(_ShortHelp, click.Group):
    """A click group whose wrong words are answered with the nearest right one."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from nxpipe.pipeline.util.text import did_you_mean

            known = self.list_commands(ctx)
            hint = did_you_mean(args[0], known) or f"; there are {', '.join(known)}"
            raise click.UsageError(f"there is no command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """Imports a subcommand when it is asked for, so that the others cost nothing."""

    def __init__(self, *args: Any, homes: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._homes = homes

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._homes)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._homes:
            return None
        module, _, attribute = self._homes[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(self._homes.items())])


@click.group(cls=LazyGroup, homes=COMMANDS)
def cli() -> None:
    """Ship models to AWS Inferentia2 and Trainium without renting one to find out.

    \b
    Example:
      nxpipe build --model-id bert-base-uncased --weights random:0
      nxpipe store ls
    """


cli.params.extend(_common_options())


def main() -> NoReturn:
    """The console script."""
    handle_signals()
    console, stdout = Console(), sys.stdout
    try:
        code = cli.main(prog_name="nxpipe", obj=console, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        code = _reader_left()
    except SystemExit as ended:
        if ended.code == exit_codes.TERMINATED.number:
            console.trace("Terminated; nothing half-written is left behind.")
            exit_quietly(exit_codes.TERMINATED.number)
        if sys.stdout is stdout:
            raise
        code = _reader_left()  # for which click has put another in its place, and exit code 1
    except (click.Abort, KeyboardInterrupt):
        console.trace("Interrupted; nothing half-written is left behind.")
        code = exit_codes.INTERRUPTED.number
        exit_quietly(code)
    except click.exceptions.NoArgsIsHelpError as bare:
        console.trace(bare.format_message())
        code = exit_codes.USAGE.number
    except Exception as error:
        code = _translate(error, console)
    sys.exit(code if isinstance(code, int) else 0)


def _translate(error: Exception, console: Console) -> int:
    """Say the error in one sentence, and give its exit code."""
    row = exit_codes.exit_code_of(error)
    if console.verbose:
        import traceback

        console.trace("".join(traceback.format_exception(error)))
    if row is None:
        from nxpipe.pipeline.util.process import report_crash

        console.complain(report_crash(error))
        return exit_codes.INTERNAL.number
    console.complain(*_lines(error))
    return row.number


def _lines(error: Exception) -> Sequence[str]:
    """One sentence, but for what finds several faults at once. Whatever else breaks lines in a message is foreign."""
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "nxpipe"
        return [f"{' '.join(error.format_message().split()).rstrip('.')} (see {where} -h)"]
    lines: Sequence[str] = getattr(error, "lines", ())
    return lines or [sentence_of(error)]


def _reader_left() -> int:
    """Python flushes stdout at exit; let that go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_codes.PIPE_CLOSED.number
