"""`nxpipe check`."""

import json
import os
from pathlib import Path

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import ModelOptions, model_options
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.cli.param_types import Bytes, DurationType, Targets
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.console import Console


@click.command(cls=Command)
@model_options("check", target=Targets(), tp=None)
@click.option(
    "--sarif",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write the findings to FILE as SARIF 2.1.0, for annotations in a pull request.",
)
@click.option("--timeout", type=DurationType(), default="2h", show_default=True, help="The time limit per model.")
@click.option("--memory-limit", type=Bytes(), help="The memory limit per model.  [default: the machine's memory]")
@config_option
@click.pass_context
def check(
    ctx: click.Context,
    /,
    options: ModelOptions,
    sarif: Path | None,
    timeout: float,
    memory_limit: int | None,
    config_path: Path,
) -> None:
    """Check that models compile for a target and fit its memory; needs no weights.

    Captures and compiles every program of the model. Each finding names the operator, its line in the model's source,
    and a fix. Shows the memory per core for every tensor-parallel degree. Exits with code 0 if the model compiles and
    fits, else with the code of the most severe finding.

    \b
    Example:
      nxpipe check --model-id meta-llama/Llama-3.1-8B
      nxpipe check --model-id ./my-bert --target all --buckets 128,512
      nxpipe check --model-id ./encoder.onnx --axis batch=1 --axis sequence=128
      nxpipe check --sarif findings.sarif
    """
    from nxpipe.emulator.confinement import Limits, confined
    from nxpipe.pipeline.check.checker import check as check_model
    from nxpipe.pipeline.check.formats import as_text

    console: Console = ctx.obj
    options.require_applicable()
    config = load_config(config_path, os.environ, missing_ok=options.model_id is not None)
    reports = []
    for spec in options.specs(config, config_path.parent):
        with confined(Limits(memory_limit, timeout)):
            reports.append(check_model(spec, console.step))
        if not console.json:
            console.page(as_text(reports[-1]) + "\n")
    if console.json:
        console.data([report.as_json() for report in reports])
    if sarif is not None:
        from nxpipe.pipeline.check.formats import as_sarif

        sarif.write_text(json.dumps(as_sarif(reports, config_path.name), indent=2) + "\n", encoding="utf-8")
    failed = [report.exit_code for report in reports if report.exit_code is not exit_codes.OK]
    ctx.exit(failed[0].number if failed else exit_codes.OK.number)
