"""`nxpipe release`: all gates from check to rollout, in order."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from click.core import ParameterSource

from nxpipe.pipeline.artifacts.store_url import open_uncached_store, require_lasting_store, store_url
from nxpipe.pipeline.build.jobs import BuildOptions
from nxpipe.pipeline.cli.completion import complete_channels
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import executor_options
from nxpipe.pipeline.cli.options import (
    ACTOR,
    REASON,
    Label,
    config_option,
    key_option,
    require_reason,
    store_option,
    without_evidence_option,
)
from nxpipe.pipeline.cli.param_types import Choice, Expectation, Share
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.release.options import GATES, ExpectedGeneration, ReleaseOptions
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.exit_codes import row_of

if TYPE_CHECKING:
    from nxpipe.pipeline.config import Config
    from nxpipe.pipeline.release.run import ReleaseRun
    from nxpipe.pipeline.release.state import ReleaseContext

_LOCATION_OPTIONS: Final = (("store", "--store"), ("config_path", "--config"))


@click.command(cls=Command)
@click.option(
    "--channel",
    "--to",
    "channel",
    type=Label("channel"),
    default="staging",
    show_default=True,
    shell_complete=complete_channels,
    help="The channel.",
)
@click.option("--from", "source", type=Label("channel"), help="Release this channel's artifacts; build nothing.")
@click.option(
    "--expect",
    type=Expectation(),
    help="Require this generation of the --from channel, as in nxpipe channel show --json.",
)
@click.option("--only", "names", multiple=True, metavar="NAME", help="Release only this model; repeatable.")
@click.option(
    "--threshold",
    type=Share(100.0),
    default="5%",
    show_default=True,
    help="The largest predicted slowdown of a program against the one that the channel serves.",
)
@click.option("--skip", "skipped", multiple=True, type=Choice(GATES), help="Skip this gate; repeatable.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait for the rollouts to end.")
@click.option("--dry-run", is_flag=True, help="Print what each gate would do and the build plan; change nothing.")
@executor_options
@click.option("--reason", type=REASON, default="", help="The reason, for the channel's log.")
@without_evidence_option
@click.option("--actor", type=ACTOR, help="The identity in the channel's log.  [default: as for nxpipe promote]")
@key_option("artifacts and promotions")
@store_option
@config_option
@click.pass_context
def release(
    ctx: click.Context,
    /,
    channel: str,
    source: str | None,
    expect: ExpectedGeneration | None,
    names: tuple[str, ...],
    threshold: float,
    skipped: tuple[str, ...],
    wait: bool,
    dry_run: bool,
    build_options: BuildOptions,
    reason: str,
    without: tuple[str, ...],
    actor: str | None,
    key: str | None,
    store: str | None,
    config_path: Path,
) -> None:
    """Run models through all release gates and promote them to a channel; resumable.

    The gates are check, build, verify, bench (against the channel's current artifacts), sign, promote, and the rollouts
    of the channel's fleets. Finished gates are skipped: after a failure or a kill, run the same command again. The
    first failing gate ends the release with the exit code of its own command. The report in .nxpipe/releases lists the
    commands that undo the release. Artifacts are signed if the channel requires signatures or a key is given. In GitHub
    Actions, a store in a folder of the job is refused.

    \b
    Example:
      nxpipe release --dry-run
      nxpipe release --channel staging --reason "$GITHUB_REF_NAME"
      nxpipe release --to production --from staging --threshold 2%
      nxpipe release --to production --from staging --expect "$GENERATION@$DIGEST"
    """
    from nxpipe.pipeline.artifacts.identity import current_identity
    from nxpipe.pipeline.build.report.github import in_github
    from nxpipe.pipeline.release.state import ReleaseContext

    console: Console = ctx.obj
    require_reason(without, reason)
    config = load_config(config_path, os.environ)
    options = ReleaseOptions(
        channel=channel,
        source=source,
        expect=expect,
        names=names,
        threshold=threshold,
        skipped=frozenset(skipped),
        wait=wait,
        actor=actor or current_identity(),
        reason=reason,
        without=without,
        key=key,
        how=build_options,
        place=_location(ctx),
    )
    _require_valid(ctx, config, options)
    if in_github(os.environ) and not dry_run:
        require_lasting_store(store_url(store, config_path), os.environ)
    opened = open_uncached_store(store, config_path, console)
    release_context = ReleaseContext(console, opened, config, config_path, options)
    ctx.exit(_show_plan(release_context) if dry_run else _run(release_context))


def _location(ctx: click.Context) -> dict[str, str]:
    """The options for store and configuration on the command line; the undo commands repeat them."""
    command_line = ParameterSource.COMMANDLINE
    return {
        option: str(ctx.params[name])
        for name, option in _LOCATION_OPTIONS
        if ctx.get_parameter_source(name) is command_line
    }


def _require_valid(ctx: click.Context, config: "Config", options: ReleaseOptions) -> None:
    from nxpipe.pipeline.artifacts.channels import fleet_of_channel
    from nxpipe.pipeline.release.promotion import requires_signature

    channel, message = options.channel, None
    if fleet := fleet_of_channel(channel):
        message = f"rollouts of fleet {fleet} manage channel {channel}; release to the channel of the fleet"
    elif options.source == channel:
        message = f"--from and --channel name the same channel, {channel}; pass another channel with --from"
    elif options.expect is not None and options.source is None:
        message = "--expect names a generation of the --from channel; pass --from CHANNEL too"
    elif "sign" in options.skipped and requires_signature(config, options):
        message = f"channel {channel} accepts signed artifacts only; remove --skip sign"
    if message:
        raise click.UsageError(message, ctx)


def _show_plan(release_context: "ReleaseContext") -> int:
    """A dry run; the exit code is that of `nxpipe build --dry-run`."""
    from dataclasses import asdict

    from nxpipe.pipeline.build.report.plan_text import plan_json, plan_table
    from nxpipe.pipeline.release.report import report_header, result_table
    from nxpipe.pipeline.release.run import preview

    results, plan = preview(release_context), release_context.plan
    if release_context.console.json:
        gates = [asdict(result) for result in results]
        document = {**report_header(release_context), "gates": gates, "plan": plan_json(plan) if plan else None}
        release_context.console.data(document)
    else:
        parts = [result_table(results), *([plan_table(plan)] if plan else [])]
        release_context.console.page("\n\n".join(parts))
    return plan.exit_code if plan else 0


def _run(release_context: "ReleaseContext") -> int:
    from nxpipe.pipeline.build.report.github import in_github, show_summary
    from nxpipe.pipeline.release.report import report_document, report_text, result_line, write_report, write_summary
    from nxpipe.pipeline.release.run import ReleaseRun

    console = release_context.console

    def report_gate(run: "ReleaseRun") -> None:
        console.say(result_line(run.results[-1]))
        report = report_document(release_context, run)
        path = write_report(report, release_context.kept)
        if not run.is_over:
            return
        if in_github(os.environ):
            show_summary(console, lambda: write_summary(report, os.environ))
        if console.json:
            console.data(report)
        else:
            console.page(report_text(report, run.all()))
        console.say(f"report: {path}")

    run = ReleaseRun(report_gate)
    code = run.run(release_context)
    if code:
        console.complain(f"{run.results[-1].gate}: {run.results[-1].sentence}", code=row_of(code))
    return code
