"""Requirements of a channel: signatures, kinds of evidence, and the targets of the fleets that fetch from it.

Promotions, releases, rollouts, the preflight and the agent of an instance read them here.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.artifact_store.evidence import DEVICE, EMULATED
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.artifacts.channels import fleet_of_channel, hosts_of_channel, model_ids, program_check
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.models.thresholds import Thresholds, missing_evidence
from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.channel.change import Requirements
    from nxpipe.artifact_store.evidence import Evidence
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.pipeline.config import Config


def requirements(store: "Store", config: "Config", folder: Path, channel: str) -> "Requirements":
    """Requirements of a promotion: of the artifact, of the channel as a whole, and of the fleets that run it."""
    return replace(
        artifact_requirements(store, config, folder, channel),
        targets=targets_of(config, folder, channel),
        check_programs=program_check(config, folder, channel),
    )


def artifact_requirements(store: "Store", config: "Config", folder: Path, channel: str) -> "Requirements":
    """Requirements of a single artifact, independent of the channel's others: signatures, and evidence of the
    kinds that the channel requires, within the current thresholds of [verify], not those of its build.
    """
    from nxpipe.artifact_store.channel.change import Requirements

    trust, allowed = trust_in(config, folder, store), Thresholds.of(config)

    def judge(manifest: "Manifest", evidence: "Sequence[Evidence]") -> dict[str, str]:
        kinds = required_evidence(config, folder, channel, (manifest.model.id, manifest.target))
        return missing_evidence(manifest, evidence, allowed, kinds)

    policy = trust.policy
    if policy is None:
        return Requirements(check_evidence=judge, trust=trust)
    from nxpipe.artifact_store.trust.policy import evidence_verifier

    return Requirements(
        check_artifact=policy.artifact_check(store, channel),
        check_evidence=judge,
        verify_evidence=evidence_verifier(policy, store, channel),
        trust=trust,
    )


def targets_of(config: "Config", folder: Path, channel: str) -> dict[str, set[str]]:
    """Compiler targets of the channel's fleets, by model id."""
    ids = model_ids(config, folder)
    targets: dict[str, set[str]] = {}
    for fleet in config.fleets:
        if fleet.channel == channel:
            needed = (INSTANCES[name].compiler_target for name in fleet.instance_types)
            targets.setdefault(ids[fleet.model], set()).update(needed)
    return targets


def unserved_channel_warning(config: "Config", channel: str) -> str | None:
    """A warning about a channel that no fleet uses although there are fleets: it may be misspelt."""
    used = sorted({fleet.channel for fleet in config.fleets})
    if not used or channel in used:
        return None
    hint = did_you_mean(channel, used) or f"; they run {', '.join(used)}"
    return f"no fleet of nxpipe.toml runs channel {channel}{hint}"


def required_evidence(
    config: "Config", folder: Path, channel: str, slot: tuple[str, str] | None = None
) -> tuple[str, ...]:
    """The kinds of evidence that a promotion to the channel requires; with `slot`, of an artifact of this model id and
    target.

    The only place that decides it. The rules of a fleet's channel apply to its environments too. Without rules, what
    devices may fetch needs evidence of devices: a channel of several fleets excepts only what just rehearsals run.
    """
    named = _base_channel(config, channel)
    if rules := config.channels.get(named):
        return rules.require
    hosts = hosts_of_channel(config, folder, channel)
    concerned = hosts.get(slot) if slot else None
    if all(host.rehearsal for host in concerned or [host for some in hosts.values() for host in some]):
        return (EMULATED,)
    return EMULATED, DEVICE


def _base_channel(config: "Config", channel: str) -> str:
    """The channel of nxpipe.toml whose rules apply: for an environment's channel, that of its fleet."""
    fleet = fleet_of_channel(channel)
    return next((entry.channel for entry in config.fleets if entry.name == fleet), channel)
