"""`nxpipe cost`: what a deployed fleet costs for a million tokens."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from nxpipe.pipeline.cli.completion import complete_fleets
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.cli.param_types import Choice, Count
from nxpipe.pipeline.config.prices import Purchase, load_prices
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import table

if TYPE_CHECKING:
    from nxpipe.pipeline.plan.fleet_cost import FleetCost

_COLUMNS: Final = ("instance type", "hours", "bought", "an hour", "price of", "dollars")
_LEFT_OUT: Final = "The sum leaves load balancers, storage and data transfer out."


@click.command(cls=Command)
@click.option("--fleet", required=True, metavar="NAME", shell_complete=complete_fleets, help="The serving fleet.")
@click.option("--hours", type=Count(1, 24 * 90), default=24, show_default=True, help="How far back, in whole hours.")
@click.option(
    "--purchase",
    type=Choice([each.value for each in Purchase]),
    help="How the instances are paid.  [default: as the fleet's capacity says]",
)
@click.option("--region", help="The region.  [default: the project's, then the SDK's]")
@config_option
@click.pass_obj
def cost(
    console: Console, /, fleet: str, hours: int, purchase: str | None, region: str | None, config_path: Path
) -> None:
    """Print what a deployed fleet costs for a million tokens.

    `nxpipe agent watch` reports the tokens that the servers of a fleet count and the time that its instances run; this
    command reads both from CloudWatch (cloudwatch:GetMetricData) and multiplies the hours with dated prices. A price
    that is not known is never counted as zero. A fleet whose way of buying has no known price is priced on demand.

    \b
    Example:
      nxpipe cost --fleet chat
      nxpipe cost --fleet chat --hours 168 --purchase savings-plan-1y --json
    """
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.config.root import serving_fleet
    from nxpipe.pipeline.plan.fleet_cost import measured_cost

    config = load_config(config_path, os.environ)
    chosen = serving_fleet(config, fleet, "--fleet")
    bought = Purchase(purchase) if purchase else None
    place = region or config.project.region
    found = measured_cost(config.project.name, chosen, place, hours, load_prices(), bought)
    if console.json:
        console.data(_document(found))
    else:
        console.page(_page(fleet, found))


def _document(found: "FleetCost") -> dict[str, Any]:
    types = [
        {"type": each.type, "hours": each.hours, "purchase": each.purchase.value, "dollars": each.dollars}
        | ({"hourly": each.price.hourly, "date": each.price.date.isoformat()} if each.price else {})
        for each in found.types
    ]
    return {
        "from": found.start.isoformat(),
        "to": found.stop.isoformat(),
        "types": types,
        "dollars": found.dollars,
        "generated_tokens": found.generated,
        "prompt_tokens": found.prompts,
        "dollars_per_million_generated": found.per_million(found.generated),
        "dollars_per_million": found.per_million(found.generated + found.prompts),
    }


def _page(name: str, found: "FleetCost") -> str:
    span = f"{found.start:%Y-%m-%d %H:%M} to {found.stop:%Y-%m-%d %H:%M} UTC"
    if not found.types:
        return f"Instances of {name} reported nothing from {span}."
    rows = [
        (
            each.type,
            f"{each.hours:,.1f}",
            each.purchase.value,
            f"${each.price.hourly:,.4f}" if each.price else "unknown",
            str(each.price.date) if each.price else "",
            "unknown" if each.dollars is None else f"${each.dollars:,.2f}",
        )
        for each in found.types
    ]
    lines = [f"Fleet {name}, {span}", table(_COLUMNS, rows), ""]
    for what, tokens in (("generated", found.generated), ("read and generated", found.generated + found.prompts)):
        price = found.per_million(tokens)
        cost = "unknown" if price is None else f"${price:,.2f} a million"
        lines.append(f"{tokens:,.0f} tokens {what}: {cost}")
    return "\n".join((*lines, _LEFT_OUT))
