"""What nxpipe.toml asks of a channel: the targets of its fleets, and whose signatures count."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.models.thresholds import Thresholds, evidence_shortfall
from nxpipe.pipeline.util.folders import expanded
from nxpipe.pipeline.util.suggest import did_you_mean

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.channel.change import Requirements
    from nxpipe.artifact_store.evidence import Evidence
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.pipeline.config import Config, Model


def requirements(store: "Store", config: "Config", folder: Path, channel: str) -> "Requirements":
    return replace(requirements_of_one(store, config, folder, channel), targets=targets_of(config, folder, channel))


def requirements_of_one(store: "Store", config: "Config", folder: Path, channel: str) -> "Requirements":
    """The same of an artifact by itself, whatever else the channel serves: signed if asked, and near enough by
    [verify] of today, not of whoever built it."""
    from nxpipe.artifact_store.channel.change import Requirements

    trust, allowed = trust_in(config, folder, store), Thresholds.of(config)

    def judge(manifest: "Manifest", evidence: "Sequence[Evidence]") -> str | None:
        return evidence_shortfall(manifest, evidence, allowed)

    policy = trust.policy
    if policy is None:
        return Requirements(judge=judge, trust=trust)
    from nxpipe.artifact_store.trust.testimony import believing

    return Requirements(
        doubt=policy.judge(store, channel),
        judge=judge,
        believe=believing(policy, store, channel),
        trust=trust,
    )


def targets_of(config: "Config", folder: Path, channel: str) -> dict[str, set[str]]:
    """For each model that the channel's fleets run, by its id in the store, the compiler targets of their instances."""
    ids = {model.name: model_id(model, folder) for model in config.models}
    targets: dict[str, set[str]] = {}
    for fleet in config.fleets:
        if fleet.channel == channel:
            wanted = (INSTANCES[name].compiler_target for name in fleet.instance_types)
            targets.setdefault(ids[fleet.model], set()).update(wanted)
    return targets


def model_id(model: "Model", folder: Path) -> str:
    """What artifacts of the model are published under: a folder goes by its last name."""
    return model.id or (folder / expanded(model.path or "")).resolve().name


def doubt(config: "Config", channel: str) -> str | None:
    """A word on a channel that no fleet runs, where there are fleets: most likely it is misspelt."""
    used = sorted({fleet.channel for fleet in config.fleets})
    if not used or channel in used:
        return None
    hint = did_you_mean(channel, used) or f"; they run {', '.join(used)}"
    return f"no fleet of nxpipe.toml runs channel {channel}{hint}"
