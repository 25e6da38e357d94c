"""The commands that undo a release, read off the channel's own log. Nothing is compiled by any of them."""

import shlex
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.channel.generation import Generation
from nxpipe.pipeline.artifacts.channels import COLOURS, channel_of
from nxpipe.pipeline.release.fleets import left_to_rollouts, rolled_out
from nxpipe.pipeline.util.exit_codes import UNDECIDED

if TYPE_CHECKING:
    from nxpipe.pipeline.config import ServingFleet
    from nxpipe.pipeline.release.candidate import Candidate
    from nxpipe.pipeline.release.gate import Passage
    from nxpipe.pipeline.release.state import Release

_FAR: Final = 100  # generations to look through for the one before


def way_back(release: "Release", passages: "Sequence[Passage]") -> list[str]:
    """Traffic first, which a channel follows."""
    told = next((one for one in passages if one.gate == "rollout" and one.code in (0, UNDECIDED.number)), None)
    begun = {each["fleet"] for each in told.figures} if told else set()
    words = [_fleet(release, fleet, one) for fleet, one in rolled_out(release) if fleet.name in begun]
    return [_command(release, each) for each in [*words, _promotion(release)] if each]


def _fleet(release: "Release", fleet: "ServingFleet", one: "Candidate") -> list[str]:
    if not release.is_served(one):
        return ["rollout", "abort", fleet.name]
    for colour in COLOURS:
        tip = release.tip(channel_of(fleet.name, colour))
        for served in tip.artifacts if tip else ():
            if served.slot == one.slot and served.request_key != one.request_key:
                return ["rollout", "start", fleet.name, served.name, "--wait"]
    return []


def _promotion(release: "Release") -> list[str]:
    """The whole state of before while nobody has added to it; else what was served in these places."""
    left = left_to_rollouts(release)
    direct = [one for one in release.candidates if one.slot not in left]
    tip = release.tip()
    if tip is None or not direct or not all(_serves(tip, one) for one in direct):
        return []
    first, before = _change(_history(release), direct)
    if before is None:
        return []
    channel = release.words.channel
    if first == tip:
        return ["rollback", "--channel", channel, "--to", str(before.generation), "--expect", str(tip.generation)]
    slots = {one.slot for one in direct}
    names = [each.name for each in before.artifacts if each.slot in slots and each not in tip.artifacts]
    return ["promote", *names, "--channel", channel] if names else []


def _history(release: "Release") -> Iterator[Generation]:
    return islice(release.trust.history(release.store, release.words.channel), _FAR)


def _change(history: Iterator[Generation], direct: "list[Candidate]") -> tuple[Generation | None, Generation | None]:
    """The generation that has served all of them since, and the one before it, if there is one near enough."""
    first = None
    for one in history:
        if not all(_serves(one, candidate) for candidate in direct):
            return first, one
        first = one
    return first, None


def _serves(generation: Generation, one: "Candidate") -> bool:
    return any(each.request_key == one.request_key and each.slot == one.slot for each in generation.artifacts)


def _command(release: "Release", words: list[str]) -> str:
    # What a person says to a rollout is heard by its machine, which knows the store.
    known = ("--config",) if words[:2] == ["rollout", "abort"] else ("--store", "--config")
    typed = [word for option, value in release.words.place.items() if option in known for word in (option, value)]
    return shlex.join(["nxpipe", *words, *typed])
