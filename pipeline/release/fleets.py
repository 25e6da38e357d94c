"""The fleets of a channel, and what of a release is theirs: a channel follows the traffic of whoever serves from it."""

from typing import TYPE_CHECKING

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.artifacts.colours import COLOURS, channel_of
from nxpipe.pipeline.artifacts.promotion import model_id
from nxpipe.pipeline.config.fleets import serving_fleets

if TYPE_CHECKING:
    from nxpipe.pipeline.config import ServingFleet
    from nxpipe.pipeline.release.candidate import Candidate
    from nxpipe.pipeline.release.state import Release


def rolled_out(release: "Release") -> "list[tuple[ServingFleet, Candidate]]":
    """In the order of nxpipe.toml. A fleet that nothing was ever served to has no traffic to move."""
    if "rollout" in release.words.skipped:
        return []
    served, slots = release.served(), {one.slot: one for one in release.candidates}
    ids = {model.name: model_id(model, release.folder) for model in release.config.models}
    found = []
    for fleet in serving_fleets(release.config).values():
        one = slots.get((ids[fleet.model], INSTANCES[fleet.instance_types[0]].compiler_target))
        if fleet.channel != release.words.channel or one is None:
            continue
        old = served.get(one.slot)
        if _has_colours(release, fleet) or (old is not None and old.request_key != one.request_key):
            found.append((fleet, one))
    return found


def left_to_rollouts(release: "Release") -> set[tuple[str, str]]:
    return {one.slot for _, one in rolled_out(release)}


def _has_colours(release: "Release", fleet: "ServingFleet") -> bool:
    """It has been through a rollout, and does not run what its channel serves unless by one."""
    return any(release.tip(channel_of(fleet.name, colour)) for colour in COLOURS)
