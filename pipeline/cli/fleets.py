"""Which fleet a command means."""

from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from nxpipe.pipeline.config import Config, ServingFleet


def serving_fleets(config: "Config") -> "dict[str, ServingFleet]":
    from nxpipe.pipeline.config import ServingFleet

    return {each.name: each for each in config.fleets if isinstance(each, ServingFleet)}


def serving_fleet(config: "Config", name: str, option: str) -> "ServingFleet":
    """`option` is where the name was typed."""
    fleets = serving_fleets(config)
    if name not in fleets:
        hint = did_you_mean(name, fleets) or f"; there are {', '.join(fleets) or 'none'}"
        raise click.BadParameter(f"nxpipe.toml has no serving fleet {name!r}{hint}", param_hint=option)
    return fleets[name]
