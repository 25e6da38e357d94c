"""Promotion and rollback: the two operations that append a generation, and their preconditions."""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from nxpipe.artifact_store.channel.generation import Generation, Served, Signature, merged
from nxpipe.artifact_store.channel.log import Appended, ChannelLog
from nxpipe.artifact_store.documents import as_time
from nxpipe.artifact_store.errors import Corrupt, NotFound, Refused
from nxpipe.artifact_store.evidence import Evidence, missing_kinds
from nxpipe.artifact_store.layout import action_path
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.pins import Pins
from nxpipe.artifact_store.records import ActionRecord, Published
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.trust.channel_trust import ALL, ChannelVerifier

_LONGEST_REASON: Final = 4096  # characters of a document's text

Sign = Callable[[bytes], Signature]
EvidenceCheck = Callable[
    [Manifest, Sequence[Evidence]], Mapping[str, str]
]  # the required kinds of evidence that are missing, each with the reason
EvidenceVerifier = Callable[[Evidence], bool]
ProgramCheck = Callable[[Manifest], str | None]  # why a fleet of the channel cannot run the programs; None if all can
ArtifactCheck = Callable[[Served], str | None]  # why the channel's policy refuses the artifact; None if it accepts it


@dataclass(frozen=True)
class Author:
    """The identity that changes a channel, its reason, and its signing function if generations are signed."""

    actor: str
    reason: str
    sign: Sign | None = None


@dataclass(frozen=True)
class EvidenceWaiver:
    """Kinds of evidence that one promotion does without, and why: the log records both."""

    kinds: frozenset[str]
    because: str

    @classmethod
    def of(cls, kinds: Collection[str], because: str) -> "EvidenceWaiver | None":
        return cls(frozenset(kinds), because) if kinds else None


@dataclass(frozen=True)
class Requirements:
    """Preconditions of a promotion.

    `targets`: the targets of the channel's fleets, by model. `check_programs`: decides whether the fleets can run the
    programs; None for an artifact that runs there already. `check_evidence`: returns the missing kinds of evidence.
    `check_artifact`, `verify_evidence`: verify the signatures of artifacts and of evidence; None if the policy requires
    no signature. `trust`: verifies the channel's log.
    """

    targets: Mapping[str, Collection[str]] = field(default_factory=dict)
    check_artifact: ArtifactCheck | None = None
    trust: ChannelVerifier = ALL
    check_evidence: EvidenceCheck = missing_kinds
    verify_evidence: EvidenceVerifier | None = None
    check_programs: ProgramCheck | None = None


def promote(
    store: Store,
    channel: str,
    artifacts: Sequence[Published],
    author: Author,
    requirements: Requirements,
    *,
    expected: int | None = None,
    waiver: EvidenceWaiver | None = None,
) -> Appended:
    """Append a generation with these artifacts, each in place of the artifact of the same model and target.

    `waiver` allows missing evidence of some kinds. If any was missing, the generation names the kinds beside the
    artifact, and its reason says why.
    """
    trust = requirements.trust
    log = trust.log(store.backend, channel)
    manifests = [artifact.record.manifest for artifact in artifacts]
    with Pins(store.backend).pinned(manifests, actor=author.actor, reason=f"promotion to {channel}"):
        news, missing = [], []
        for artifact in artifacts:
            _check_artifact(store, artifact, channel, requirements)
            faults = _missing_evidence(store, artifact, channel, requirements, waiver)
            news.append(Served.of(artifact, without=faults))
            missing += [(kind, f"{artifact.name}: {reason}") for kind, reason in faults.items()]
        by = _without_evidence(author, waiver, missing)

        def follow(tip: Generation | None) -> Generation | None:
            _require_tip(tip, expected, channel)
            state = merged(tip.artifacts if tip else (), news)
            _require_targets(state, news, channel, requirements)
            fault = trust.fault(store.backend, tip) if tip else None
            if tip is not None and fault:
                _require_trusted_remainder(log, tip, news, trust, store, fault)
            elif tip is not None and state == tip.artifacts:
                return None
            return _trusted(_next(store, channel, tip, by, state, restores=None), trust)

        return _marked(log.append(follow), trust)


def rollback(
    store: Store,
    channel: str,
    author: Author,
    *,
    to: int | None = None,
    expected: int | None = None,
    check_artifact: ArtifactCheck | None = None,
    check_programs: ProgramCheck | None = None,
    despite: str | None = None,
    trust: ChannelVerifier = ALL,
) -> Appended:
    """Append a generation that restores the state of an earlier one: `to`, or the newest with a different state.

    The target is chosen once: of two concurrent rollbacks the slower one changes nothing. Restored artifacts that are
    not served now need the same signatures as for a promotion, unless `despite` gives a reason to override the policy,
    and programs that the channel's fleets can run.
    """
    log = trust.log(store.backend, channel)
    current = log.tip()
    if current is None:
        raise NotFound(f"channel {channel} of {store.url} is empty; promote an artifact on it first")
    _require_tip(current, expected, channel)
    target = _generation(log, current, to, store.url) if to is not None else _previous_state(log, current, store.url)
    for served in target.artifacts:
        if not _is_available(store, served):
            raise Refused(
                f"generation {target.generation} of channel {channel} serves {served.name}, whose manifest "
                f"{served.manifest.sha256} is gone or damaged; roll back to another generation with --to"
            )

    def follow(tip: Generation | None) -> Generation | None:
        _require_tip(tip, expected, channel)
        served_now = tip.artifacts if tip and not trust.fault(store.backend, tip) else ()
        if served_now == target.artifacts:
            return None
        news = [served for served in target.artifacts if served not in served_now]
        for served in news if check_programs else ():
            if check_programs and (reason := check_programs(store.manifest(served.manifest))):
                raise Refused(f"generation {target.generation} of channel {channel} cannot be restored: {reason}")
        faults = [fault for served in news if (fault := _policy_fault(check_artifact, served, despite))]
        if fault := trust.fault(store.backend, target):
            faults.append(
                f"generation {target.generation}, the target of the rollback, {fault}; choose another with --to"
            )
        by = _with_override(author, faults, despite)
        return _trusted(_next(store, channel, tip, by, target.artifacts, restores=target.origin), trust)

    return _marked(log.append(follow), trust)


def _trusted(new: Generation, trust: ChannelVerifier) -> Generation:
    """Refuse a generation that fails its own policy, such as one whose key has expired by the date of the tip."""
    fault = trust.policy.fault(new) if trust.policy else None
    if fault:
        raise Refused(
            f"generation {new.generation} of channel {new.channel} would not be trusted: dated {new.at}, which is not "
            f"before its predecessor, it {fault}; sign it with a key that is valid at that time"
        )
    return new


def _marked(appended: Appended, trust: ChannelVerifier) -> Appended:
    """Record the generation that this machine has written in its watermark."""
    trust.mark(appended.generation)
    return appended


def _policy_fault(check_artifact: ArtifactCheck | None, served: Served, despite: str | None) -> str | None:
    """The policy's fault of an artifact. A damaged signature raises Corrupt, unless `despite` overrides the policy."""
    try:
        return check_artifact(served) if check_artifact else None
    except Corrupt as error:
        if despite is None:
            raise
        return str(error)


def _with_override(author: Author, faults: Sequence[str], despite: str | None) -> Author:
    """The author, with the override in the reason that the log records, if the policy has a fault to override."""
    if not faults:
        return author
    if despite is None:
        raise Refused(f"{faults[0]}, or override the policy with --despite-policy REASON, which the log records")
    others = f", and {len(faults) - 1} more are in doubt" if len(faults) > 1 else ""
    return _noting(author, f"despite the signing policy, because {despite} ({faults[0]}{others})")


def _without_evidence(author: Author, waiver: EvidenceWaiver | None, missing: Sequence[tuple[str, str]]) -> Author:
    """The author, with the missing kinds of evidence in the reason that the log records, if there are any."""
    if waiver is None or not missing:
        return author
    kinds, faults = sorted({kind for kind, _ in missing}), [fault for _, fault in missing]
    note = f"without {' and '.join(kinds)} evidence, because {waiver.because} ({'; '.join(faults)})"
    return replace(author, reason=note[:_LONGEST_REASON]) if author.reason == waiver.because else _noting(author, note)


def _noting(author: Author, note: str) -> Author:
    reason = f"{note}; {author.reason}" if author.reason else note
    return replace(author, reason=reason[:_LONGEST_REASON])


def _is_available(store: Store, served: Served) -> bool:
    """True if the artifact is intact and will not be collected soon.

    A published artifact is retired with a grace period. A retired one may be under collection: its blobs are refreshed.
    """
    if not store.blobs.is_intact(served.manifest):
        return False
    record = store.records.read(ActionRecord, action_path(served.request_key))
    if record is not None and record.manifest == served.manifest:
        return True
    return not any(store.blobs.settle((served.manifest, *store.manifest(served.manifest).blobs())))


def _next(
    store: Store,
    channel: str,
    tip: Generation | None,
    author: Author,
    state: tuple[Served, ...],
    restores: int | None,
) -> Generation:
    """The next generation, dated by the store's clock and never before `tip`: keys must be valid at that date."""
    unsigned = Generation(
        channel=channel,
        generation=tip.generation + 1 if tip else 1,
        previous=tip.digest if tip else None,
        action="promote" if restores is None else "rollback",
        artifacts=state,
        restores=restores,
        actor=author.actor,
        reason=author.reason,
        at=max(as_time(store.backend.now()), tip.at if tip else ""),
        write_id=secrets.token_hex(16),
        signatures=(),
    )
    if author.sign is None:
        return unsigned
    return unsigned.model_copy(update={"signatures": (author.sign(unsigned.signed_bytes()),)})


def _generation(log: ChannelLog, tip: Generation, to: int, url: str) -> Generation:
    generation = log.read(to)
    if generation is None:
        raise NotFound(f"channel {log.channel} of {url} has no generation {to}; it has 1 to {tip.generation}")
    return generation


def _previous_state(log: ChannelLog, tip: Generation, url: str) -> Generation:
    """The newest earlier generation with a different state. Two rollbacks in a row go back two states."""
    for earlier in log.back_from(tip):
        if earlier.generation < tip.origin and earlier.artifacts != tip.artifacts:
            return earlier
    raise NotFound(
        f"channel {log.channel} of {url} has no earlier state than that of generation {tip.origin}; "
        "choose one with --to, or promote an artifact"
    )


def _require_tip(tip: Generation | None, expected: int | None, channel: str) -> None:
    current = tip.generation if tip else 0
    if expected is not None and current != expected:
        by = f" ({tip.actor}, {tip.reason!r}, {tip.at[:16]})" if tip else ""
        raise Refused(
            f"channel {channel} has moved: it is at generation {current}, not {expected}{by}; see: nxpipe channel log "
            f"{channel}"
        )


def _check_artifact(store: Store, artifact: Published, channel: str, requirements: Requirements) -> None:
    if requirements.check_programs is not None and (reason := requirements.check_programs(artifact.manifest)):
        raise Refused(reason)
    for blob, fault in store.blobs.settle(artifact.manifest.blobs()):
        raise Refused(
            f"{artifact.name} is incomplete: blob {blob.sha256} of {blob.size} bytes {fault} in {store.url}; "
            "publish it again"
        )
    if requirements.check_artifact is not None and (reason := requirements.check_artifact(Served.of(artifact))):
        raise Refused(reason)


def _missing_evidence(
    store: Store, artifact: Published, channel: str, requirements: Requirements, waiver: EvidenceWaiver | None
) -> dict[str, str]:
    """The missing kinds of evidence that the waiver allows, each with the reason; another one is refused."""
    missing = evidence_faults(store, artifact.manifest, requirements)
    waived = waiver.kinds if waiver else frozenset()
    for kind, reason in missing.items():
        if kind not in waived:
            raise Refused(f"{artifact.name} cannot be served on channel {channel}: {reason}")
    return missing


def evidence_faults(store: Store, manifest: Manifest, requirements: Requirements) -> dict[str, str]:
    """The required kinds of evidence that an artifact lacks, each with the reason. Unsigned evidence does not count, if
    a signature is required."""
    evidence, verify = store.evidence(manifest.digest), requirements.verify_evidence
    verified = [document for document in evidence if verify is None or verify(document)]
    unsigned = {document.kind for document in evidence} - {document.kind for document in verified}
    return {
        kind: _UNSIGNED.format(kind=kind, name=manifest.name) if kind in unsigned else reason
        for kind, reason in requirements.check_evidence(manifest, verified).items()
    }


_UNSIGNED: Final = (
    "its {kind} evidence is not signed by the keys that its channel trusts; sign it with: nxpipe store sign {name}"
)


def _require_trusted_remainder(
    log: ChannelLog, tip: Generation, news: Sequence[Served], trust: ChannelVerifier, store: Store, fault: str
) -> None:
    """A signature covers the whole state: artifacts that only an untrusted generation serves must be promoted too."""
    trusted = next(
        (generation for generation in log.back_from(tip) if not trust.fault(store.backend, generation)), None
    )
    trusted_artifacts = {*news, *(trusted.artifacts if trusted else ())}
    replaced = {served.slot for served in news}
    untrusted = [served for served in tip.artifacts if served.slot not in replaced and served not in trusted_artifacts]
    if untrusted:
        raise Refused(
            f"generation {tip.generation} of channel {log.channel} {fault}, and no trusted generation serves "
            f"{' and '.join(served.name for served in untrusted)}; promote all artifacts in one command, or roll back"
        )


def _require_targets(state: Sequence[Served], news: Sequence[Served], channel: str, requirements: Requirements) -> None:
    for model in sorted({served.model_id for served in news}):
        targets = {served.target for served in state if served.model_id == model}
        missing = sorted(set(requirements.targets.get(model, ())) - targets)
        if missing:
            raise Refused(
                f"the fleets of channel {channel} also run {model} on {' and '.join(missing)}, and no artifact for "
                "that is served or promoted; build it, and promote all of them in one command"
            )
