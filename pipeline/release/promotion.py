"""Gates of a release that change what is served: sign, promote, rollout."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.channel import change
from nxpipe.artifact_store.channel.generation import Served
from nxpipe.artifact_store.evidence import DEVICE, INSTRUCTIONS
from nxpipe.artifact_store.names import SHOWN
from nxpipe.pipeline.artifacts.channels import ENVIRONMENTS, rehearsals_of
from nxpipe.pipeline.artifacts.requirements import (
    artifact_requirements,
    required_evidence,
    requirements,
    unserved_channel_warning,
)
from nxpipe.pipeline.artifacts.signing import author_signature, builder_id, chosen_signer
from nxpipe.pipeline.release.gates import AlreadyDone, GateOutcome
from nxpipe.pipeline.release.state import fleets_with_rollouts, rollout_slots

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published
    from nxpipe.artifact_store.trust.keys import Signer
    from nxpipe.artifact_store.trust.policy import Policy
    from nxpipe.pipeline.config import Config, ServingFleet
    from nxpipe.pipeline.release.options import ReleaseOptions
    from nxpipe.pipeline.release.state import ReleaseCandidate, ReleaseContext
    from nxpipe.pipeline.rollout.context import RolloutContext
    from nxpipe.pipeline.rollout.start import StartedRollout


class SignGate:
    """Signs with one key. If the policy requires more signatures, `promote` fails.

    Evidence of devices is not signed here: a release runs on none, so it cannot vouch for what it finds in the store.
    """

    name: Final = "sign"

    def settled(self, release: "ReleaseContext") -> AlreadyDone | None:
        channel, published = release.options.channel, _all_published(release)
        policy = release.trust.policy
        judge = policy.artifact_check(release.store, channel) if policy else None
        if policy is not None and judge is not None:
            trusted = published is not None and not any(judge(Served.of(artifact)) for artifact in published)
            trusted = trusted and all(_has_trusted_evidence(release, policy, artifact) for artifact in published or ())
            return AlreadyDone("done", f"channel {channel} trusts the existing signatures") if trusted else None
        if not (release.options.key or release.config.signing.key):
            return AlreadyDone("skipped", f"channel {channel} requires no signature, and no key is set")
        signer = _signer(release)
        if published is None or any(_unsigned(release, signer, artifact) for artifact in published):
            return None
        return AlreadyDone("done", f"already signed by key {signer.public.key_id[:SHOWN]}")

    def intention(self, release: "ReleaseContext") -> str:
        return f"sign {_names(release.candidates)}"

    def run(self, release: "ReleaseContext") -> GateOutcome:
        from nxpipe.artifact_store.trust.policy import sign_evidence
        from nxpipe.artifact_store.trust.signatures import Signatures

        signer, signatures, figures = _signer(release), Signatures(release.store), []
        for candidate in release.candidates:
            published = release.published(candidate)
            if _unsigned(release, signer, published):
                signatures.add(published, signer, builder_id())
                sign_evidence(release.store, published, signer, builder_id(), omitted=(DEVICE,))
            key, manifest = signer.public.key_id, published.manifest_digest
            figures.append({"artifact": candidate.name, "manifest": manifest, "key_id": key, "builder": builder_id()})
        return GateOutcome(f"{len(figures)} manifests signed by key {signer.public.key_id[:SHOWN]}", figures=figures)


class PromoteGate:
    """Promotes all candidates as one generation, except those that rollouts promote after shifting traffic."""

    name: Final = "promote"

    def settled(self, release: "ReleaseContext") -> AlreadyDone | None:
        direct, served = _direct(release), release.served()
        if not direct:
            return AlreadyDone("skipped", "left to the rollouts, which promote to the channel at their end")
        artifacts = [release.find(candidate) for candidate in direct]
        if not all(artifact is not None and _serves(served, artifact) for artifact in artifacts):
            return None
        tip = release.tip()
        return AlreadyDone(
            "done", f"channel {release.options.channel} already serves them, at generation {tip and tip.generation}"
        )

    def intention(self, release: "ReleaseContext") -> str:
        serve = f"serve {_names(_direct(release))} on channel {release.options.channel}"
        return "; ".join((serve, *_evidence_plan(release, _direct(release))))

    def run(self, release: "ReleaseContext") -> GateOutcome:
        options, store, config = release.options, release.store, release.config
        if release.tip() is None and (sentence := unserved_channel_warning(config, options.channel)):
            release.console.say(f"  Note: {sentence}")
        sign = author_signature(options.key, config, release.folder, options.channel, store)
        appended = change.promote(
            store,
            options.channel,
            [release.published(candidate) for candidate in _direct(release)],
            change.Author(options.actor, options.reason, sign),
            requirements(store, config, release.folder, options.channel),
            expected=release.seen,
            waiver=_waiver(release),
        )
        for notice in rehearsals_of(config, release.folder, options.channel):
            release.console.say(f"  Note: {notice}")
        generation = appended.generation
        figures = [served.model_dump() for served in generation.artifacts]
        return GateOutcome(f"channel {options.channel} is at generation {generation.generation}", figures=figures)


def _serves(served: "Mapping[tuple[str, str], Served]", artifact: "Published") -> bool:
    """True if the channel serves the artifact, with all its evidence or without some."""
    entry = served.get((artifact.model_id, artifact.target))
    return entry is not None and Served.of(artifact, entry.without) == entry


def requires_signature(config: "Config", options: "ReleaseOptions") -> bool:
    """True if the channel accepts only signed artifacts."""
    return options.channel in config.signing.require


def _waiver(release: "ReleaseContext") -> change.EvidenceWaiver | None:
    return change.EvidenceWaiver.of(release.options.without, release.options.reason)


def _evidence_plan(release: "ReleaseContext", candidates: "list[ReleaseCandidate]") -> Iterator[str]:
    """A sentence for each kind of evidence that a promotion of the candidates would lack now, signatures aside.

    An artifact that is not built yet gets evidence by its build; that of devices only afterwards.
    """
    options = release.options
    needs = artifact_requirements(release.store, release.config, release.folder, options.channel)
    for candidate in candidates:
        kinds = required_evidence(release.config, release.folder, options.channel, candidate.slot)
        if artifact := release.find(candidate):
            missing = change.evidence_faults(release.store, artifact.manifest, replace(needs, verify_evidence=None))
        else:
            missing = {kind: _AFTER_BUILD for kind in kinds if kind in (INSTRUCTIONS, DEVICE)}
        for kind, reason in missing.items():
            waived = f"allowed by --without-evidence {kind}" if kind in options.without else "refused"
            yield f"{candidate.name} lacks {kind} evidence ({reason}): {waived}"


_AFTER_BUILD: Final = "no build makes it"


def _direct(release: "ReleaseContext") -> "list[ReleaseCandidate]":
    left = rollout_slots(release)
    return [candidate for candidate in release.candidates if candidate.slot not in left]


def _all_published(release: "ReleaseContext") -> "list[Published] | None":
    artifacts = [release.find(candidate) for candidate in release.candidates]
    published = [artifact for artifact in artifacts if artifact is not None]
    return published if len(published) == len(artifacts) else None


def _signer(release: "ReleaseContext") -> "Signer":
    return chosen_signer(release.options.key, release.config, release.folder)


def _unsigned(release: "ReleaseContext", signer: "Signer", published: "Published") -> bool:
    from nxpipe.artifact_store.trust.policy import has_signed_evidence
    from nxpipe.artifact_store.trust.signatures import Signatures

    signed = Signatures(release.store).by(signer.public, published.manifest_digest) is not None
    return not (signed and has_signed_evidence(release.store, published, signer, omitted=(DEVICE,)))


def _has_trusted_evidence(release: "ReleaseContext", policy: "Policy", published: "Published") -> bool:
    from nxpipe.artifact_store.trust.policy import evidence_verifier

    trusts, channel = evidence_verifier(policy, release.store, release.options.channel), release.options.channel
    evidence = release.store.evidence(published.manifest_digest)
    trusted = {document.kind for document in evidence if trusts is None or trusts(document)}
    slot = published.manifest.model.id, published.manifest.target
    needed = set(required_evidence(release.config, release.folder, channel, slot)) - {DEVICE}
    return bool(trusted) and needed & {document.kind for document in evidence} <= trusted


def _names(candidates: "tuple[ReleaseCandidate, ...] | list[ReleaseCandidate]") -> str:
    return ", ".join(candidate.name for candidate in candidates)


_MINUTE: Final = 60  # seconds


@dataclass(frozen=True)
class _FleetResult:
    """Result of one fleet's rollout. `is_running`: the rollout runs, and the release does not wait for it."""

    sentence: str
    code: int
    figures: dict[str, Any]
    is_running: bool = False


class RolloutGate:
    """Rolls out one fleet after another: each promotion moves the channel that the next rollout starts from.

    It does what `nxpipe rollout start --wait` does.
    """

    name: Final = "rollout"

    def settled(self, release: "ReleaseContext") -> AlreadyDone | None:
        if "promote" in release.options.skipped:
            return AlreadyDone("skipped", "--skip promote leaves nothing new to serve")
        if fleets_with_rollouts(release):
            return None
        return AlreadyDone("skipped", f"no fleet has traffic to shift for channel {release.options.channel}")

    def intention(self, release: "ReleaseContext") -> str:
        pairs = [f"fleet {fleet.name} to {candidate.name}" for fleet, candidate in fleets_with_rollouts(release)]
        shift = f"shift the traffic of {', '.join(pairs)}, in steps of {_steps(release)} %"
        candidates = [candidate for _, candidate in fleets_with_rollouts(release)]
        return "; ".join((shift, *_evidence_plan(release, candidates)))

    def run(self, release: "ReleaseContext") -> GateOutcome:
        pairs = fleets_with_rollouts(release)
        contexts = [_context(release, fleet) for fleet, _ in pairs]
        _pin_later_fleets(contexts)
        results: list[_FleetResult] = []
        for context, (_, candidate) in zip(contexts, pairs, strict=True):
            results.append(_roll_out(release, context, release.published(candidate)))
            if results[-1].code or results[-1].is_running:
                break
        sentences = [result.sentence for result in results]
        if waiting := [fleet.name for fleet, _ in pairs[len(results) :]]:
            sentences.append(f"not started: fleet {', '.join(waiting)}; the same command continues with it")
        return GateOutcome("; ".join(sentences), results[-1].code, [result.figures for result in results])


def _context(release: "ReleaseContext", fleet: "ServingFleet") -> "RolloutContext":
    from nxpipe.pipeline.rollout.aws import StateMachine
    from nxpipe.pipeline.rollout.context import FleetArtifacts, RolloutContext

    options, config = release.options, release.config
    artifacts = FleetArtifacts(release.store, config, release.folder, fleet, options.actor, options.key)
    return RolloutContext(config, fleet, StateMachine(config, fleet), artifacts)


def _pin_later_fleets(contexts: "list[RolloutContext]") -> None:
    """Pins the environments of later fleets to the artifacts that they run.

    The first promotion moves the shared channel. A later fleet without channels of its own would fetch the candidate
    from it without a rollout.
    """
    for context in contexts[1:]:
        for colour in ENVIRONMENTS:
            context.artifacts.pin(colour, f"another fleet of channel {context.fleet.channel} is rolled out first")


def _roll_out(release: "ReleaseContext", context: "RolloutContext", artifact: "Published") -> _FleetResult:
    from nxpipe.pipeline.rollout.start import AlreadyServed, StartRequest, start_rollout

    request = StartRequest(
        artifact, None, again=False, minute=_MINUTE, reason=release.options.reason, without=release.options.without
    )
    started = start_rollout(release.console, context, request)
    if isinstance(started, AlreadyServed):
        fleet, candidate = context.fleet.name, started.candidate
        figures = {"fleet": fleet, "phase": "none", "artifact": vars(candidate)}
        return _FleetResult(f"fleet {fleet} already runs {candidate.name} on {started.colour}", 0, figures)
    return _wait(release, context, started)


def _wait(release: "ReleaseContext", context: "RolloutContext", started: "StartedRollout") -> _FleetResult:
    from nxpipe.pipeline.rollout.follow import exit_code, follow, move_fleet_channel
    from nxpipe.pipeline.rollout.render import status_line

    watcher, fleet = context.watcher, context.fleet.name
    if not release.options.wait and not started.is_over:
        status = watcher.status(started.arn)
        sentence = f"fleet {fleet}: started; follow it with: nxpipe rollout status {fleet} --wait"
        return _FleetResult(sentence, 0, status.as_json(), is_running=True)
    status = follow(release.console, fleet, lambda: watcher.status(started.arn))
    move_fleet_channel(context, status)
    return _FleetResult(f"fleet {fleet}: {status_line(status)}", exit_code(status), status.as_json())


def _steps(release: "ReleaseContext") -> str:
    return ", ".join(map(str, release.config.rollout.steps))
