"""The `nxpipe` command: lazy subcommands, common options, and errors as one sentence and an exit code."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

from nxpipe.pipeline import VERSION
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import sentence_of
from nxpipe.pipeline.util.process import exit_quietly, handle_signals

# name -> (module:attribute, one line for `nxpipe --help`). A listing imports no command.
COMMANDS = {
    "agent": ("nxpipe.pipeline.cli.agent:agent", "Prepare an instance of a fleet and start its model server."),
    "ami": ("nxpipe.pipeline.cli.ami:ami", "Pin the AMIs of instances."),
    "assess": (
        "nxpipe.pipeline.cli.assess:assess",
        "Assess a migration from GPUs: which models move, wait or stay, and what that saves.",
    ),
    "bench": (
        "nxpipe.pipeline.cli.bench:bench",
        "Show the predicted latency of programs and compare it with a baseline.",
    ),
    "build": (
        "nxpipe.pipeline.cli.build:build",
        "Compile models on the emulator, verify them, publish the artifacts.",
    ),
    "calibrate": (
        "nxpipe.pipeline.cli.calibrate:calibrate",
        "Compare predicted times with those that devices measured.",
    ),
    "channel": ("nxpipe.pipeline.cli.channel:channel", "Show the artifacts and the history of channels."),
    "check": (
        "nxpipe.pipeline.cli.check:check",
        "Check that models compile for a target and fit its memory; needs no weights.",
    ),
    "claim": (
        "nxpipe.pipeline.cli.claim:claim",
        "Say whether a published claim about speed and cost can be true, with the arithmetic.",
    ),
    "completion": ("nxpipe.pipeline.cli.completion:completion", "Print a shell completion script."),
    "config": ("nxpipe.pipeline.cli.config:config", "Validate, show or describe nxpipe.toml."),
    "cost": ("nxpipe.pipeline.cli.cost:cost", "Print what a deployed fleet costs for a million tokens."),
    "device": (
        "nxpipe.pipeline.cli.device:device",
        "Show Neuron devices and their use, of this machine or of the emulator.",
    ),
    "diff": (
        "nxpipe.pipeline.cli.diff:diff",
        "Compare two artifacts: key inputs, programs, graphs, weights, files, evidence.",
    ),
    "dis": ("nxpipe.pipeline.cli.dis:dis", "Print an executable's program as text, or its totals."),
    "doctor": (
        "nxpipe.pipeline.cli.doctor:doctor",
        "Report installed and missing software, with the commands that require it.",
    ),
    "explain": (
        "nxpipe.pipeline.cli.explain:explain",
        "Explain cache hits and misses of a build, field by field.",
    ),
    "generate": (
        "nxpipe.pipeline.cli.generate:generate",
        "Generate text with an artifact's programs, or chat with it.",
    ),
    "infra": (
        "nxpipe.pipeline.cli.infra.group:infra",
        "Check the AWS account, lint templates, plan deployments, write the manifests of a cluster.",
    ),
    "init": (
        "nxpipe.pipeline.cli.init:init",
        "Write nxpipe.toml, a release workflow and the files of the CDK CLI into a repository.",
    ),
    "monitor": (
        "nxpipe.pipeline.cli.monitor:monitor",
        "Report the use, errors and cost of devices, to stdout, Prometheus or CloudWatch.",
    ),
    "plan": (
        "nxpipe.pipeline.cli.plan:plan",
        "Plan which instances, how many and at what cost, with intervals; needs no AWS account and no weights.",
    ),
    "prices": (
        "nxpipe.pipeline.cli.prices:prices",
        "Show the prices that estimates and plans use, or ask AWS for today's.",
    ),
    "profile": (
        "nxpipe.pipeline.cli.profile:profile",
        "Show where the predicted time of programs goes: operators, modules, engines, gaps, and what would help most.",
    ),
    "promote": ("nxpipe.pipeline.cli.promote:promote", "Promote artifacts to a channel."),
    "prove": (
        "nxpipe.pipeline.cli.prove:prove",
        "Run an artifact on this machine's Neuron devices, and store the evidence.",
    ),
    "release": (
        "nxpipe.pipeline.cli.release:release",
        "Run models through all release gates and promote them to a channel; resumable.",
    ),
    "rollback": ("nxpipe.pipeline.cli.rollback:rollback", "Restore the artifacts that a channel served before."),
    "rollout": (
        "nxpipe.pipeline.cli.rollout.group:rollout",
        "Roll out new versions by canary: traffic moves in steps, as evidence allows.",
    ),
    "run": (
        "nxpipe.pipeline.cli.run:run",
        "Run a model's programs on the emulator, or an artifact's on Neuron devices, and show their outputs.",
    ),
    "serve": ("nxpipe.pipeline.cli.serve:serve", "Serve an artifact over HTTP, by OpenAI's API and SageMaker's."),
    "stats": (
        "nxpipe.pipeline.cli.explain:stats",
        "Show the hits and misses of the build cache, and the time that hits saved, by model and by week.",
    ),
    "store": (
        "nxpipe.pipeline.cli.store.group:store",
        "Manage artifacts: list, compare, fetch, sign, collect garbage.",
    ),
    "ui": (
        "nxpipe.pipeline.cli.ui:ui",
        "Show a store in a browser: artifacts, channels with their history, build reports, rollouts.",
    ),
    "verify": (
        "nxpipe.pipeline.cli.verify:verify",
        "Compare the emulated model with PyTorch; with --layers, layer by layer.",
    ),
    "version": (
        "nxpipe.pipeline.cli.version:version",
        "Print the versions of nxpipe, its backends and libraries.",
    ),
    "worker": ("nxpipe.pipeline.cli.worker:worker", "Run one job of a build on the build farm."),
}


COMPLETE = "_NXPIPE_COMPLETE"  # the variable by which shells ask for completions


def _set_flag(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and param.name is not None:
        setattr(ctx.ensure_object(Console), param.name, True)


def _common_options() -> list[click.Option]:
    """--json, --quiet and --verbose, which every command accepts."""
    return [
        click.Option([*names], is_flag=True, expose_value=False, is_eager=True, callback=_set_flag, help=text)
        for names, text in (
            (("--json",), "Print the result as one JSON document."),
            (("--quiet", "-q"), "Print only errors on stderr."),
            (("--verbose", "-v"), "Print more on stderr, with tracebacks."),
        )
    ]


class _Context(click.Context):
    def make_formatter(self) -> click.HelpFormatter:
        from nxpipe.pipeline.cli.help import HelpFormatter

        return HelpFormatter(width=self.terminal_width, max_width=self.max_content_width)


class _ShortHelp(click.Command):
    """A command with -h as well as --help."""

    context_class = _Context

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return ["-h", "--help"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from nxpipe.pipeline.cli.help import write_options

        write_options(formatter, ctx, self.get_params(ctx))
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)


class Command(_ShortHelp):
    """A command with the common options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(_common_options())

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command with model files confined to a separate process."""
        from nxpipe.emulator.confinement import confined

        with confined():
            return super().invoke(ctx)


class Group(_ShortHelp, click.Group):
    """A group that suggests the nearest command for an unknown one."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(f"unknown command {args[0]!r}{self.hint(ctx, args[0])}", ctx)
        return super().resolve_command(ctx, args)

    def hint(self, ctx: click.Context, word: str) -> str:
        """What to type in place of an unknown command."""
        from nxpipe.pipeline.util.text import did_you_mean

        known = self.list_commands(ctx)
        return did_you_mean(word, known) or f"; the commands are {', '.join(known)}"


# Words for commands in other tools and in talk.
_OTHER_WORDS = {
    "compile": "build",
    "publish": "build",
    "push": "build",
    "test": "verify",
    "validate": "check",
    "lint": "infra lint",
    "synth": "infra plan",
    "deploy": "rollout start",
    "status": "rollout status",
    "list": "store ls",
    "cache": "store ls",
    "inspect": "store show",
    "pull": "store fetch",
    "download": "store fetch",
    "rm": "store gc",
    "delete": "store gc",
    "clean": "store gc",
    "prune": "store gc",
    "history": "channel log",
    "chat": "generate",
    "infer": "run",
    "predict": "run",
    "benchmark": "bench",
    "perf": "profile",
    "trace": "profile",
    "new": "init",
    "create": "init",
    "price": "prices ls",
    "estimate": "plan serve",
}
_GROUPS = ("store", "channel", "rollout", "infra", "plan", "config", "ami", "device", "prices", "agent")


class LazyGroup(Group):
    """A group that imports a subcommand when it runs. `homes` maps each name to module:attribute and help line."""

    def __init__(self, *args: Any, homes: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._homes = homes

    def hint(self, ctx: click.Context, word: str) -> str:
        """Of the whole command: also the words of other tools, and commands of its groups."""
        if ctx.parent is not None:
            return super().hint(ctx, word)
        from nxpipe.pipeline.util.text import nearest

        own, below = nearest(word, self.list_commands(ctx)), self._in_groups(ctx)
        close = nearest(word, below)
        meant = _OTHER_WORDS.get(word.lower()) or below.get(word) or own or (close and below[close])
        return f"; did you mean 'nxpipe {meant}'?" if meant else ""

    def _in_groups(self, ctx: click.Context) -> dict[str, str]:
        """The commands of groups by their own names: `gc` is `store gc`."""
        below: dict[str, str] = {}
        for name in _GROUPS:
            group = self.get_command(ctx, name)
            if isinstance(group, click.Group):
                below |= {each: f"{name} {each}" for each in group.list_commands(ctx) if each not in below}
        return below

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
        from nxpipe.pipeline.cli.help import write_commands

        lines = {name: text for name, (_, text) in sorted(self._homes.items())}
        if ctx.parent is None:
            write_commands(formatter, lines)
            return
        with formatter.section("Commands"):
            formatter.write_dl(list(lines.items()))


@click.group(cls=LazyGroup, homes=COMMANDS, context_settings={"max_content_width": 120})
@click.version_option(VERSION, "--version", "-V", message="nxpipe %(version)s", help="Print the version and exit.")
def cli() -> None:
    """Compile, verify and ship models for AWS Inferentia2 and Trainium, without an accelerator.

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
        code = _pipe_closed()
    except SystemExit as ended:
        if ended.code == exit_codes.TERMINATED.number:
            console.trace("Terminated; no partial files remain.")
            exit_quietly(exit_codes.TERMINATED.number)
        if sys.stdout is stdout:
            raise
        code = _pipe_closed()  # click replaced stdout and the exit code
    except (click.Abort, KeyboardInterrupt):
        console.trace("Interrupted; no partial files remain.")
        code = exit_codes.INTERRUPTED.number
        exit_quietly(code)
    except click.exceptions.NoArgsIsHelpError as bare:
        console.trace(bare.format_message())
        code = exit_codes.USAGE.number
    except Exception as error:
        code = _translate(error, console)
    sys.exit(code if isinstance(code, int) else 0)


def _translate(error: Exception, console: Console) -> int:
    """Print the error as one sentence; return its exit code. A completion is silent: the user is typing."""
    if COMPLETE in os.environ:
        return exit_codes.USAGE.number
    row = exit_codes.exit_code_of(error)
    console.json = console.json or _asks_for_json(sys.argv[1:])
    if console.verbose:
        import traceback

        console.trace("".join(traceback.format_exception(error)))
    if row is None:
        from nxpipe.pipeline.util.process import report_crash

        row = exit_codes.INTERNAL
        console.complain(report_crash(error), code=row)
        return row.number
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "nxpipe"
        message = " ".join(error.format_message().split()).rstrip(".")
        console.complain(message + _option_hint(error), code=row, see=f"{where} -h")
    else:
        console.complain(*_lines(error), code=row)
    return row.number


def _option_hint(error: click.UsageError) -> str:
    """The option that shares a word with an unknown one, where none is spelt alike: --key, --public-key."""
    if not isinstance(error, click.NoSuchOption) or error.possibilities or error.ctx is None:
        return ""
    wanted = set(error.option_name.strip("-").split("-"))
    names = [name for param in error.ctx.command.params for name in param.opts if name.startswith("--")]
    alike = [name for name in names if wanted & set(name.strip("-").split("-"))]
    return f"; did you mean {' or '.join(map(repr, alike[:2]))}?" if alike else ""


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """True if --json was given: click stops at the first error, which may be before it."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in own


def _lines(error: Exception) -> Sequence[str]:
    """The lines to print: one, or one per fault of a configuration."""
    lines: Sequence[str] = getattr(error, "lines", ())
    return lines or [sentence_of(error)]


def _pipe_closed() -> int:
    """Redirect stdout to /dev/null, because Python flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_codes.PIPE_CLOSED.number
