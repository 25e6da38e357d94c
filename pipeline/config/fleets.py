"""The tables [[fleets]]: their kinds, and the serving fleets by name."""

from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from nxpipe.pipeline.config.serving_fleet import ServingFleet
from nxpipe.pipeline.config.training_fleet import TrainingFleet
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from nxpipe.pipeline.config.root import Config

Fleet: TypeAlias = Annotated[ServingFleet | TrainingFleet, Field(discriminator="kind")]


def serving_fleets(config: "Config") -> dict[str, ServingFleet]:
    return {fleet.name: fleet for fleet in config.fleets if isinstance(fleet, ServingFleet)}


def serving_fleet(config: "Config", name: str, option: str) -> ServingFleet:
    """The fleet of that name; `option` is the option or argument that holds it."""
    fleets = serving_fleets(config)
    if name not in fleets:
        hint = did_you_mean(name, fleets) or f"; there are {', '.join(fleets) or 'none'}"
        raise InputInvalid(f"{option}: nxpipe.toml has no serving fleet {name!r}{hint}")
    return fleets[name]
