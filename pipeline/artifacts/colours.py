"""The two colours of a serving fleet, and the channels that they have of their own.

While a rollout is under way the two run different artifacts, and an instance that is replaced must get that of its
colour, whatever becomes of the fleet's channel meanwhile. So each colour has a channel, which rollouts move and nobody
else; until its first rollout a fleet has none, and its channel counts.
"""

from typing import Final

COLOURS: Final = ("blue", "green")


def other(colour: str) -> str:
    return COLOURS[1 - COLOURS.index(colour)]


def channel_of(fleet: str, colour: str) -> str:
    """No channel of nxpipe.toml is called so: a name there has no two hyphens in a row."""
    return f"{fleet}--{colour}"


def fleet_of(channel: str) -> str | None:
    """The fleet whose rollouts move the channel; None: people do."""
    fleet, apart, colour = channel.rpartition("--")
    return fleet if apart and colour in COLOURS else None


def colour_of(group: str | None, project: str, fleet: str) -> str | None:
    """That of an instance, by its Auto Scaling group; None outside of the two."""
    return next((colour for colour in COLOURS if group == f"{project}-{fleet}-{colour}"), None)
