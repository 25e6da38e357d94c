"""`nxpipe release`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from nxpipe.pipeline.artifacts.signing import key_option
from nxpipe.pipeline.cli.build_options import means_options
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import ACTOR, REASON, Label, config_option, store_option
from nxpipe.pipeline.cli.parameters import Expectation, Percentage
from nxpipe.pipeline.cli.store.itself import open_the_store_itself
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.release.words import GATES, Words
from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from nxpipe.pipeline.config import Config
    from nxpipe.pipeline.release.course import Course
    from nxpipe.pipeline.release.state import Release

_OWN: Final = ("channel", "source", "expect", "names", "threshold", "wait", "reason", "key")
_PLACE: Final = (("store", "--store"), ("config_path", "--config"))


@click.command(cls=Command)
@click.option(
    "--channel", "--to", "channel", type=Label("channel"), default="staging", show_default=True, help="Where to."
)
@click.option("--from", "source", type=Label("channel"), help="Release what this channel serves, and build nothing.")
@click.option(
    "--expect",
    type=Expectation(),
    help="Of --from: release this generation only, as channel show --json tells it.",
)
@click.option("--only", "names", multiple=True, metavar="NAME", help="Release only this model; may be repeated.")
@click.option(
    "--threshold",
    type=Percentage(),
    default="5%",
    show_default=True,
    help="How much slower than what CHANNEL serves a program may be predicted to be.",
)
@click.option(
    "--skip", "skipped", multiple=True, type=click.Choice(GATES), help="Leave this gate out; may be repeated."
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Stay until rollouts have ended.")
@click.option("--dry-run", is_flag=True, help="Say of every gate what it would do, with the plan of the build.")
@means_options
@click.option("--reason", type=REASON, default="", help="Why, for whoever reads the log.")
@click.option("--actor", type=ACTOR, help="Who, for whoever reads the log.  [default: as for nxpipe promote]")
@key_option
@store_option
@config_option
@click.pass_context
def release(
    ctx: click.Context, /, config_path: Path, store: str | None, skipped: tuple[str, ...], dry_run: bool, **said: Any
) -> None:
    """Take models through all gates to a channel; resumes.

    The gates are check, build, verify, bench (against what the channel serves), sign, promote, and the rollouts of the
    channel's fleets. What a gate has done before is not done again: after a failure or a kill, say the same words. The
    first gate that fails ends it, with the exit code of its own command. The report is kept in .nxpipe/releases, and
    says how to undo it. Nothing is signed where the channel asks for no signature and no key is named.

    \b
    Example:
      nxpipe release --dry-run
      nxpipe release --channel staging --reason "$GITHUB_REF_NAME"
      nxpipe release --to production --from staging --threshold 2%
      nxpipe release --to production --from staging --expect "$GENERATION@$DIGEST"
    """
    from nxpipe.pipeline.release.state import Release

    console: Console = ctx.obj
    config = load_config(config_path, os.environ)
    words = _words(ctx, config, frozenset(skipped), said)
    opened = open_the_store_itself(store, config_path, console)
    one = Release(console, opened, config, config_path, words)
    ctx.exit(_foretell(one) if dry_run else _carry_out(one))


def _words(ctx: click.Context, config: "Config", skipped: frozenset[str], said: dict[str, Any]) -> Words:
    from nxpipe.pipeline.artifacts.actor import current_actor
    from nxpipe.pipeline.artifacts.colours import fleet_of
    from nxpipe.pipeline.release.serving import must_be_signed

    if fleet := fleet_of(said["channel"]):
        raise click.UsageError(
            f"channel {said['channel']} belongs to the rollouts of fleet {fleet}; release to the fleet's own channel",
            ctx,
        )
    typed = {name: ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name, _ in _PLACE}
    own = {name: said.pop(name) for name in _OWN}
    actor = said.pop("actor") or current_actor()
    place = {option: str(ctx.params[name]) for name, option in _PLACE if typed[name]}
    words = Words(**own, actor=actor, skipped=skipped, how=said, place=place)
    if words.source == words.channel:
        raise click.UsageError(f"channel {words.channel} serves that already; release --from another channel", ctx)
    if words.expect is not None and words.source is None:
        raise click.UsageError("--expect names what another channel serves; say which with --from", ctx)
    if "sign" in skipped and must_be_signed(config, words):
        raise click.UsageError(
            f"channel {words.channel} takes signed artifacts only, so --skip sign would be refused by promote", ctx
        )
    return words


def _foretell(one: "Release") -> int:
    """A dry run; of what cannot be built, the code is that of `nxpipe build --dry-run`."""
    from dataclasses import asdict

    from nxpipe.pipeline.build.report.plan_text import plan_json, plan_table
    from nxpipe.pipeline.release.course import foreseen
    from nxpipe.pipeline.release.document import about
    from nxpipe.pipeline.release.told import as_table

    passages, plan = foreseen(one), one.plan
    if one.console.json:
        gates = [asdict(each) for each in passages]
        one.console.data({**about(one), "gates": gates, "plan": plan_json(plan) if plan else None})
    else:
        parts = [as_table(passages), *([plan_table(plan)] if plan else [])]
        one.console.page("\n\n".join(parts))
    return plan.exit_code if plan else 0


def _carry_out(one: "Release") -> int:
    from nxpipe.pipeline.build.report.github import in_github, show_summary
    from nxpipe.pipeline.release.course import Course
    from nxpipe.pipeline.release.document import document
    from nxpipe.pipeline.release.keeping import keep
    from nxpipe.pipeline.release.told import as_line, as_text, write_summary

    console = one.console

    def tell(course: "Course") -> None:
        console.say(as_line(course.passages[-1]))
        report = document(one, course)
        kept = keep(report, one.kept)
        if not course.is_over:
            return
        if in_github(os.environ):
            show_summary(console, lambda: write_summary(report, os.environ))
        if console.json:
            console.data(report)
        else:
            console.page(as_text(report, course.all()))
        console.say(f"report: {kept}")

    course = Course(tell)
    code = course.run(one)
    if code:
        console.complain(f"{course.passages[-1].gate}: {course.passages[-1].sentence}")
    return code
