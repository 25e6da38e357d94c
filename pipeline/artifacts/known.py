"""Channels that somebody names: one that nothing was ever promoted to is most likely misspelt."""

from typing import TYPE_CHECKING

from nxpipe.artifact_store.errors import ChannelEmpty
from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.pipeline.config import Config


def unknown_channel(store: "Store", name: str) -> ChannelEmpty:
    """What to raise where a channel is only read: of nothing there can be nothing to compare, fetch or release."""
    from nxpipe.artifact_store.channel.log import channels

    known = channels(store.backend)
    others = f"; it has {', '.join(known)}" if known else ", which has none yet; nxpipe promote makes one"
    return ChannelEmpty(f"there is no channel {name!r} in {store.url}{did_you_mean(name, known) or others}")


def declared(config: "Config") -> set[str]:
    """Channels that nxpipe.toml speaks of, be it that nothing was promoted to them yet."""
    named = {channel for key in config.signing.trusted for channel in key.channels or ()}
    return named | {fleet.channel for fleet in config.fleets} | set(config.signing.require)
