"""`nxpipe prices`: the prices that estimates and plans use, and today's from AWS."""

import os
from pathlib import Path

import click

from nxpipe.pipeline.cli.completion import complete_instances
from nxpipe.pipeline.cli.main import Command, Group
from nxpipe.pipeline.cli.param_types import Choice
from nxpipe.pipeline.config.prices import OWN_TABLE, Purchase, load_prices
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.text import did_you_mean, table

_COLUMNS = ("region", "what", "bought", "dollars", "date")


@click.group(cls=Group)
def prices() -> None:
    """Show the prices that estimates and plans use, or ask AWS for today's.

    \b
    Example:
      nxpipe prices ls inf2.xlarge
      nxpipe prices refresh --region us-west-2
    """


@prices.command(cls=Command)
@click.argument("what", nargs=-1, metavar="[INSTANCE_TYPE]...", shell_complete=complete_instances)
@click.option("--region", "regions", multiple=True, metavar="REGION", help="Only prices of this region; repeatable.")
@click.option("--purchase", type=Choice([each.value for each in Purchase]), help="Only prices of this way of buying.")
@click.option("--sources", is_flag=True, help="Print the source of each price instead of a table.")
@click.pass_obj
def ls(console: Console, what: tuple[str, ...], regions: tuple[str, ...], purchase: str | None, sources: bool) -> None:
    """List prices with their dates: dollars an hour, or for the unit that is named.

    A price that is not listed is unknown: no estimate counts it as zero. The environment variable NXPIPE_PRICES names a
    file whose prices come before those that nxpipe ships.

    \b
    Example:
      nxpipe prices ls inf2.xlarge trn2.48xlarge
      nxpipe prices ls --region us-east-2 --purchase spot --sources
    """
    known = load_prices().known
    _require_known(what, {name for _, name, _ in known}, "no price known of", "")
    _require_known(regions, {region for region, _, _ in known}, "no price known in the region", " --region")
    found = [
        (key, price)
        for key, price in sorted(known.items())
        if (not what or key[1] in what) and (not regions or key[0] in regions) and purchase in (None, key[2].value)
    ]
    if console.json:
        console.data(
            [
                {"region": region, "what": name, "purchase": bought.value, "dollars": price.hourly}
                | {"date": price.date.isoformat(), "source": price.source}
                for (region, name, bought), price in found
            ]
        )
    elif not found:
        console.page("no price known")
    elif sources:
        console.page(
            "\n".join(
                f"{name} in {region}, {bought}: ${price.hourly:,.4f}, {price.date}, {price.source}"
                for (region, name, bought), price in found
            )
        )
    else:
        rows = [(key[0], key[1], key[2].value, f"{price.hourly:,.4f}", str(price.date)) for key, price in found]
        console.page(table(_COLUMNS, rows))


def _require_known(given: tuple[str, ...], names: set[str], sentence: str, option: str) -> None:
    for name in given:
        if name not in names:
            scope = f"{option} {name}" if option else ""
            raise InputInvalid(
                f"{sentence} {name}; ask AWS with `nxpipe prices refresh{scope}`{did_you_mean(name, names)}"
            )


@prices.command(cls=Command)
@click.option(
    "--region",
    "regions",
    multiple=True,
    metavar="REGION",
    default=["us-east-1"],
    show_default=True,
    help="A region to ask for; repeatable.",
)
@click.option("--instance-type", "types", multiple=True, metavar="TYPE", help="Only this instance type; repeatable.")
@click.option(
    "-o",
    "--out",
    "output",
    type=click.Path(dir_okay=False, path_type=Path),
    default="prices.toml",
    show_default=True,
    metavar="FILE",
    help="The file to write, in place of an older one.",
)
@click.pass_obj
def refresh(console: Console, regions: tuple[str, ...], types: tuple[str, ...], output: Path) -> None:
    """Ask AWS for today's prices and write them to a file.

    Instances on demand, reserved, with savings plans, on the spot market, and in capacity blocks. The identity needs
    pricing:GetProducts, savingsplans:DescribeSavingsPlansOfferingRates, ec2:DescribeSpotPriceHistory and
    ec2:DescribeCapacityBlockOfferings; without one of them its prices are left out, with a message. NXPIPE_PRICES=FILE
    puts the file before the prices that nxpipe ships.

    \b
    Example:
      nxpipe prices refresh --region us-east-1 --region us-west-2
      NXPIPE_PRICES=prices.toml nxpipe infra plan
    """
    from nxpipe.pipeline.plan.price_api import ask
    from nxpipe.pipeline.util.files import write_whole

    wanted = types or sorted({what for _, what, _ in load_prices().known if "." in what and " " not in what})
    fresh = ask(regions, wanted, lambda what: console.say(f"  {what}"))
    write_whole(output, fresh.toml().encode())
    for fault in fresh.faults:
        console.say(f"  {fault}")
    if console.json:
        found = {purchase.value: places for purchase, places in fresh.found.items()}
        console.data({"date": fresh.date, "file": str(output), "found": found, "faults": fresh.faults})
    console.say(f"  {output}: {fresh.count} prices of {fresh.date}")
    if os.environ.get(OWN_TABLE) != str(output):
        console.say(f"  set {OWN_TABLE}={output} to use them")
