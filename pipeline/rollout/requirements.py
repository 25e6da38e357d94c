"""Requirements of a promotion to a channel, by nxpipe.toml: targets of its fleets, signatures, thresholds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.artifacts.channels import model_id
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.models.thresholds import Thresholds, evidence_shortfall
from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.channel.change import Requirements
    from nxpipe.artifact_store.evidence import Evidence
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.pipeline.config import Config


def requirements(store: "Store", config: "Config", folder: Path, channel: str) -> "Requirements":
    return replace(artifact_requirements(store, config, folder, channel), targets=targets_of(config, folder, channel))


def artifact_requirements(store: "Store", config: "Config", folder: Path, channel: str) -> "Requirements":
    """Requirements of a single artifact, independent of the channel's others: signatures, and evidence within the
    current thresholds of [verify], not those of its build.
    """
    from nxpipe.artifact_store.channel.change import Requirements

    trust, allowed = trust_in(config, folder, store), Thresholds.of(config)

    def judge(manifest: "Manifest", evidence: "Sequence[Evidence]") -> str | None:
        return evidence_shortfall(manifest, evidence, allowed)

    policy = trust.policy
    if policy is None:
        return Requirements(judge=judge, trust=trust)
    from nxpipe.artifact_store.trust.policy import believing

    return Requirements(
        doubt=policy.judge(store, channel),
        judge=judge,
        believe=believing(policy, store, channel),
        trust=trust,
    )


def targets_of(config: "Config", folder: Path, channel: str) -> dict[str, set[str]]:
    """Compiler targets of the channel's fleets, by model id."""
    ids = {model.name: model_id(model, folder) for model in config.models}
    targets: dict[str, set[str]] = {}
    for fleet in config.fleets:
        if fleet.channel == channel:
            needed = (INSTANCES[name].compiler_target for name in fleet.instance_types)
            targets.setdefault(ids[fleet.model], set()).update(needed)
    return targets


def unserved_channel_warning(config: "Config", channel: str) -> str | None:
    """A warning of a channel that no fleet runs although there are fleets: most likely it is misspelt."""
    used = sorted({fleet.channel for fleet in config.fleets})
    if not used or channel in used:
        return None
    hint = did_you_mean(channel, used) or f"; they run {', '.join(used)}"
    return f"no fleet of nxpipe.toml runs channel {channel}{hint}"
