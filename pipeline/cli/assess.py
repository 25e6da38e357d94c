"""`nxpipe assess`: which models of a portfolio on GPUs should move to Neuron, which wait, and which stay."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import page_width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nxpipe.emulator.hardware import Instance
    from nxpipe.pipeline.plan.serve import ServingDemand, ServingPlan

_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
_WIDEST = 160


@click.command(cls=Command)
@click.argument("portfolio", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PORTFOLIO")
@click.option("--html", "html_path", type=_FILE, metavar="FILE", help="Write a page; it needs no network.")
@click.option("--markdown", "markdown_path", type=_FILE, metavar="FILE", help="Write Markdown, with blanks for owners.")
@click.pass_obj
def assess(console: Console, /, portfolio: Path, html_path: Path | None, markdown_path: Path | None) -> None:
    """Assess a migration from GPUs: which models move, wait or stay, and what that saves.

    PORTFOLIO is a TOML file of workloads: models, traffic, objectives, the GPU fleet and its bill;
    docs/guides/planning.md has an example. Each workload gets the cheapest Neuron fleet that meets its objectives. It
    moves if that is cheaper at the slow end of the predictions too, with the migration paid within the horizon; it
    waits where that is too close to call, or where a runtime or an operator is not proved; it stays where a GPU is the
    better choice. Reasons, phases and a checklist come with it.

    \b
    Example:
      nxpipe assess portfolio.toml
      nxpipe assess portfolio.toml --html assessment.html --markdown assessment.md
    """
    from nxpipe.pipeline.config.prices import load_prices
    from nxpipe.pipeline.plan.assessment import assess as assessed
    from nxpipe.pipeline.plan.assessment import portfolio_of
    from nxpipe.pipeline.plan.assessment_report import document, html, markdown, text_page
    from nxpipe.pipeline.plan.candidates import RUNTIMES, planned_model
    from nxpipe.pipeline.plan.schedulers import Scheduling
    from nxpipe.pipeline.plan.serve import plan_serving
    from nxpipe.pipeline.util.files import write_whole

    source, prices = portfolio_of(portfolio), load_prices()

    released = [each for each in RUNTIMES if each.scheduling is not Scheduling.NXPIPE]

    def plan(model: str, demand: "ServingDemand", types: "Sequence[Instance]", *, is_proved: bool) -> "ServingPlan":
        return plan_serving(planned_model(model), demand, types, prices, runtimes=released if is_proved else RUNTIMES)

    found = assessed(source, prices, plan, lambda what: console.say(f"  {what}"))
    if html_path is not None:
        write_whole(html_path, html(found))
    if markdown_path is not None:
        write_whole(markdown_path, markdown(found).encode())
    if console.json:
        console.data(document(found))
    else:
        console.page(text_page(found, page_width(_WIDEST, _WIDEST)))
