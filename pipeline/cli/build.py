"""`nxpipe build`: plan, build and publish artifacts, or rerun the arguments of the last unfinished build."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.build.jobs import BuildOptions
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import ModelOptions, executor_options, model_options
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.param_types import Choice, Numbers, TargetList
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.sections import Backend, Build
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.files import state_folder

if TYPE_CHECKING:
    from nxpipe.pipeline.build.run import UnfinishedBuild

_ARGUMENTS = "nxpipe.arguments"


class _Build(Command):
    """Keeps its arguments, for --resume."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


@click.command(cls=_Build)
@model_options("build", target=TargetList(), tp="1", degrees=Numbers(64))
@click.option("--dry-run", is_flag=True, help="Print the plan with reasons and time estimates; build nothing.")
@click.option(
    "--force",
    is_flag=True,
    help="Build cached cells again, which must give the same bytes, and cells that are known failures.",
)
@click.option("--resume", is_flag=True, help="Rerun the arguments of the last unfinished build.")
@executor_options
@click.option(
    "--backend",
    type=Choice(get_args(Backend)),
    help=f"{Build.model_fields['backend'].description}  [default: [build] backend of nxpipe.toml, else emulator]",
)
@click.option("--no-verify", is_flag=True, help="Publish without comparing the emulated outputs with PyTorch's.")
@store_option
@config_option
@click.pass_context
def build(
    ctx: click.Context,
    /,
    options: ModelOptions,
    build_options: BuildOptions,
    backend: Backend | None,
    no_verify: bool,
    dry_run: bool,
    force: bool,
    resume: bool,
    store: str | None,
    config_path: Path,
) -> None:
    """Compile models on the emulator, verify them, publish the artifacts.

    Without --model-id, builds every model of nxpipe.toml. Each target and degree gives one artifact; each batch, bucket
    and phase gives one program in it. Cached programs and known deterministic failures are not built again. Prints a
    table of each artifact's programs: predicted latency and its bound, HBM traffic, utilisation, accuracy. A .pt2 or
    .onnx file is built from its own graph and weights.

    \b
    Example:
      nxpipe build --model-id bert-base-uncased --weights random:0
      nxpipe build --model-id ./my-llama --target inf2.48xlarge,trn2.48xlarge --tp 2,8 --buckets 128,512 --dry-run
      nxpipe build --model-id ./encoder.onnx --axis batch=1
    """
    from nxpipe.pipeline.build.run import BuildRun, UnfinishedBuild
    from nxpipe.pipeline.models.spec import specs_of_options
    from nxpipe.pipeline.models.thresholds import Thresholds

    console: Console = ctx.obj
    state = state_folder(config_path)
    unfinished = UnfinishedBuild(state)
    if resume:
        _rerun(ctx, unfinished)
        return
    config = load_config(config_path, os.environ, missing_ok=options.model_id is not None)
    options.require_applicable()
    specs = specs_of_options(options.build_values(backend, no_verify), config, options.names, config_path.parent)
    if specs and specs[0].backend == "neuronx" and specs[0].verified:
        console.say("  The emulator's program and the HLO module are verified here; the NEFF runs on devices only.")
    opened = open_uncached_store(store, config_path, console)
    run = BuildRun(console, opened, config, Thresholds.of(config), state, replace(build_options, force=force))
    plan = run.plan(specs)
    if dry_run:
        ctx.exit(run.show(plan))
    unfinished.begin(ctx.meta[_ARGUMENTS])
    code = run.finish(run.execute(plan))
    if code == 0:
        unfinished.end()
    ctx.exit(code)


def _rerun(ctx: click.Context, unfinished: "UnfinishedBuild") -> None:
    others = [argument for argument in ctx.meta[_ARGUMENTS] if argument != "--resume"]
    if others:
        raise click.UsageError(
            f"--resume cannot be combined with {others[0]}; it reruns the last build's arguments", ctx
        )
    arguments = unfinished.arguments()
    ctx.obj.say(f"  nxpipe build {' '.join(arguments)}")
    with build.make_context("build", arguments, parent=ctx.parent) as context:
        build.invoke(context)
