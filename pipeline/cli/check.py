"""`nxpipe check`."""

import json
import os
from pathlib import Path
from typing import Any

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import order_options, orders, refuse_words_without_effect
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.cli.param_types import Bytes, Seconds, Targets
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.saved import axis_option, saved_program
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.console import Console


@click.command(cls=Command)
@order_options("check", target=Targets(), tp=None)
@click.option(
    "--sarif",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the findings there as SARIF 2.1.0 as well, for annotations in a pull request.",
)
@axis_option
@click.option("--timeout", type=Seconds(), default="2h", show_default=True, help="When reading one model is given up.")
@click.option("--memory-limit", type=Bytes(), help="How much memory reading may take.  [default: what the machine has]")
@config_option
@click.pass_context
def check(
    ctx: click.Context,
    /,
    config_path: Path,
    model_id: str | None,
    names: tuple[str, ...],
    sarif: Path | None,
    axes: tuple[tuple[str, int], ...],
    timeout: float,
    memory_limit: int | None,
    **flags: Any,
) -> None:
    """Say all that stands between a model and a target, without weights.

    Every program of the model is captured and compiled; what cannot be is said with its line in the model's source
    and the way out. Memory of each core is shown for every tensor-parallel degree. The exit code is 0 when the model
    lowers and fits, else that of the gravest finding.

    \b
    Example:
      nxpipe check --model-id meta-llama/Llama-3.1-8B
      nxpipe check --model-id ./my-bert --target all --buckets 128,512
      nxpipe check --model-id ./encoder.onnx --axis batch=1 --axis sequence=128
      nxpipe check --sarif findings.sarif
    """
    from nxpipe.emulator.confinement import Limits, confined
    from nxpipe.pipeline.check import check as carry_out
    from nxpipe.pipeline.check import check_file
    from nxpipe.pipeline.check.text import as_text

    console: Console = ctx.obj
    refuse_words_without_effect(ctx, model_id, flags)
    file = saved_program(ctx, model_id, flags, axes)
    described = load_config(config_path, os.environ, missing_ok=model_id is not None)
    reports = []
    for order in orders(model_id, flags, described, names, config_path.parent):
        with confined(Limits(memory_limit, timeout)):
            reports.append(check_file(file, order, console.step) if file else carry_out(order, console.step))
        if not console.json:
            console.page(as_text(reports[-1]) + "\n")
    if console.json:
        console.data([report.as_json() for report in reports])
    if sarif is not None:
        from nxpipe.pipeline.check.sarif import as_sarif

        sarif.write_text(json.dumps(as_sarif(reports, config_path.name), indent=2) + "\n", encoding="utf-8")
    failed = [report.exit_code for report in reports if report.exit_code is not exit_codes.OK]
    ctx.exit(failed[0].number if failed else exit_codes.OK.number)
