"""`nxpipe build`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxpipe.pipeline.cli.build_options import build_options
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import axis_option, check_model_options, model_options
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.parameters import Numbers, TargetList
from nxpipe.pipeline.cli.store.itself import open_the_store_itself
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.state_folder import state_folder

if TYPE_CHECKING:
    from nxpipe.pipeline.build.unfinished import Unfinished


class _Build(Command):
    """Remembers its words, for a build that is cut short and resumed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["nxpipe.words"] = list(args)
        return super().parse_args(ctx, args)


@click.command(cls=_Build)
@model_options("build", target=TargetList(), tp="1", degrees=Numbers(64))
@build_options
@axis_option
@store_option
@config_option
@click.pass_context
def build(
    ctx: click.Context, /, config_path: Path, store: str | None, resume: bool, dry_run: bool, **said: Any
) -> None:
    """Compile a model on the emulator, verify it, publish the artifact.

    Without --model-id, every model of nxpipe.toml is built, as described there. Targets and degrees make artifacts;
    batches, buckets and phases make the programs in each. What the store holds is not made again, nor what failed for a
    reason of its own. Prints one line for each artifact, how near each output is to PyTorch, and how each program uses
    the cores. A .pt2 or .onnx file is built from its own graph and weights.

    \b
    Example:
      nxpipe build --model-id bert-base-uncased --weights random:0
      nxpipe build --model-id ./my-llama --target inf2.48xlarge,trn2.48xlarge --tp 2,8 --buckets 128,512 --dry-run
      nxpipe build --model-id ./encoder.onnx --axis batch=1
    """
    from nxpipe.pipeline.build.matrix import specs_of_options
    from nxpipe.pipeline.build.run import Run, finish
    from nxpipe.pipeline.build.unfinished import Unfinished
    from nxpipe.pipeline.models.thresholds import Thresholds

    console: Console = ctx.obj
    state = state_folder(config_path)
    unfinished = Unfinished(state)
    if resume:
        _say_again(ctx, unfinished)
        return
    described = load_config(config_path, os.environ, missing_ok=said["model_id"] is not None)
    check_model_options(ctx, said["model_id"], said)
    asked = specs_of_options(said, described, said["names"], config_path.parent)
    if asked and asked[0].backend == "neuronx":
        console.say("  A NEFF runs on a Neuron device only, so nothing is verified here.")
    opened = open_the_store_itself(store, config_path, console)
    run = Run(console, opened, described, Thresholds.of(described), state, said)
    plan = run.plan(asked)
    if dry_run:
        ctx.exit(run.show(plan))
    unfinished.begin(ctx.meta["nxpipe.words"])
    results = run.carry_out(plan)
    code = finish(run, results)
    if code == 0:
        unfinished.end()
    ctx.exit(code)


def _say_again(ctx: click.Context, unfinished: "Unfinished") -> None:
    typed = [word for word in ctx.meta["nxpipe.words"] if word != "--resume"]
    if typed:
        raise click.UsageError(
            f"--resume says the words of the last build again, so {typed[0]} has no place beside it", ctx
        )
    words = unfinished.words()
    ctx.obj.say(f"  nxpipe build {' '.join(words)}")
    with build.make_context("build", words, parent=ctx.parent) as again:
        build.invoke(again)
