"""Promotion and rollback: the two operations that append a generation, and their preconditions."""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from nxpipe.artifact_store.channel.generation import Generation, Served, Signature, merged
from nxpipe.artifact_store.channel.log import Appended, ChannelLog
from nxpipe.artifact_store.documents import as_time
from nxpipe.artifact_store.errors import Corrupt, NotFound, Refused
from nxpipe.artifact_store.evidence import Evidence, is_covered
from nxpipe.artifact_store.layout import action_path
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.pins import Pins
from nxpipe.artifact_store.records import ActionRecord, Published
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.trust.channel_trust import ALL, ChannelVerifier

_LONGEST_REASON: Final = 4096  # characters of a document's text

Sign = Callable[[bytes], Signature]
Judge = Callable[[Manifest, Sequence[Evidence]], str | None]  # what the evidence lacks; None when it is enough
Believe = Callable[[Evidence], bool]
Doubt = Callable[[Served], str | None]  # why the channel's policy does not let it serve this; None when it does


@dataclass(frozen=True)
class Author:
    """Who changes a channel and why; `sign` vouches for it."""

    actor: str
    reason: str
    sign: Sign | None = None


@dataclass(frozen=True)
class Requirements:
    """What an artifact needs before a channel may serve it.

    `targets`: for each model, those that the channel's fleets run on. `judge`: whether what was found out is enough.
    `doubt`, `believe`: of artifacts and of evidence; None where the policy asks for no signature. `trust`: what is
    believed of the log that it is added to.
    """

    targets: Mapping[str, Collection[str]] = field(default_factory=dict)
    doubt: Doubt | None = None
    trust: ChannelVerifier = ALL
    judge: Judge = is_covered
    believe: Believe | None = None


def promote(
    store: Store,
    channel: str,
    wanted: Sequence[Published],
    author: Author,
    requirements: Requirements,
    *,
    expected: int | None = None,
) -> Appended:
    """Serve these artifacts from now on, in place of those of the same model and target."""
    trust = requirements.trust
    log = trust.log(store.backend, channel)
    news = [Served.of(one) for one in wanted]
    manifests = [one.record.manifest for one in wanted]
    with Pins(store.backend).held(manifests, actor=author.actor, reason=f"promotion to {channel}"):
        for one in wanted:
            _insist_on_artifact(store, one, channel, requirements)

        def follow(tip: Generation | None) -> Generation | None:
            _insist_on_tip(tip, expected, channel)
            state = merged(tip.artifacts if tip else (), news)
            _insist_on_targets(state, news, channel, requirements)
            fault = trust.fault(store.backend, tip) if tip else None
            if tip is not None and fault:
                _insist_on_what_stays(log, tip, news, trust, store, fault)
            elif tip is not None and state == tip.artifacts:
                return None
            return _believable(_next(store, channel, tip, author, state, restores=None), trust)

        return _marked(log.append(follow), trust)


def rollback(
    store: Store,
    channel: str,
    author: Author,
    *,
    to: int | None = None,
    expected: int | None = None,
    doubt: Doubt | None = None,
    despite: str | None = None,
    trust: ChannelVerifier = ALL,
) -> Appended:
    """Bring back the state of an earlier generation: `to`, or the newest one that differs from what is served.

    What it brings back is chosen once: of two rollbacks at the same moment the slower one finds its work done.
    Of that, what is not served now needs the signatures that a promotion would need; `despite` is why not this time.
    """
    log = trust.log(store.backend, channel)
    seen = log.tip()
    if seen is None:
        raise NotFound(f"channel {channel} of {store.url} is empty; promote an artifact on it first")
    _insist_on_tip(seen, expected, channel)
    target = _chosen(log, seen, to, store.url) if to is not None else _before(log, seen, store.url)
    for served in target.artifacts:
        if not _will_stay(store, served):
            raise Refused(
                f"generation {target.generation} of channel {channel} serves {served.name}, whose manifest "
                f"{served.manifest.sha256} is gone or damaged; roll back to another generation with --to"
            )

    def follow(tip: Generation | None) -> Generation | None:
        _insist_on_tip(tip, expected, channel)
        served_now = tip.artifacts if tip and not trust.fault(store.backend, tip) else ()
        if served_now == target.artifacts:
            return None
        news = [served for served in target.artifacts if served not in served_now] if doubt else []
        doubts = [sentence for served in news if (sentence := _doubt(doubt, served, despite))]
        if fault := trust.fault(store.backend, target):
            doubts.append(f"generation {target.generation}, which is to be brought back, {fault}; choose one with --to")
        by = _vouching(author, doubts, despite)
        return _believable(_next(store, channel, tip, by, target.artifacts, restores=target.origin), trust)

    return _marked(log.append(follow), trust)


def _believable(new: Generation, trust: ChannelVerifier) -> Generation:
    """Nothing is written that its own author would refuse: such as by a key that has expired by the date of the tip."""
    fault = trust.policy.fault(new) if trust.policy else None
    if fault:
        raise Refused(
            f"generation {new.generation} of channel {new.channel} would not be believed: dated {new.at}, which is not "
            f"before the one that it follows, it {fault}; sign it with a key that counts then"
        )
    return new


def _marked(appended: Appended, trust: ChannelVerifier) -> Appended:
    """Whoever has written a generation has seen it."""
    trust.mark(appended.generation)
    return appended


def _doubt(doubt: Doubt | None, served: Served, despite: str | None) -> str | None:
    """A damaged signature is reported, unless somebody has answered for it."""
    try:
        return doubt(served) if doubt else None
    except Corrupt as error:
        if despite is None:
            raise
        return str(error)


def _vouching(author: Author, doubts: Sequence[str], despite: str | None) -> Author:
    """Whoever brings something back despite the policy says so in the log, where the policy really stood against it."""
    if not doubts:
        return author
    if despite is None:
        raise Refused(f"{doubts[0]}, or roll back all the same with --despite-policy REASON, which the log will tell")
    others = f", and {len(doubts) - 1} more are in doubt" if len(doubts) > 1 else ""
    words = f"despite the signing policy, because {despite} ({doubts[0]}{others})"
    both = f"{words}; {author.reason}" if author.reason else words
    return replace(author, reason=both[:_LONGEST_REASON])


def _will_stay(store: Store, served: Served) -> bool:
    """What is published is taken back with a grace. What was taken back, a collection may be at: it is made young."""
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
    """Dated by the store's clock, and never before the last one: whether a key had expired is asked of this date."""
    plain = Generation(
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
    return plain.model_copy(update={"signatures": (author.sign(plain.signed_bytes()),)}) if author.sign else plain


def _chosen(log: ChannelLog, tip: Generation, to: int, url: str) -> Generation:
    found = log.read(to)
    if found is None:
        raise NotFound(f"channel {log.channel} of {url} has no generation {to}; it has 1 to {tip.generation}")
    return found


def _before(log: ChannelLog, tip: Generation, url: str) -> Generation:
    """Two rollbacks in a row go back two states, and do not undo each other."""
    for earlier in log.back_from(tip):
        if earlier.generation < tip.origin and earlier.artifacts != tip.artifacts:
            return earlier
    raise NotFound(
        f"channel {log.channel} of {url} has no state before that of generation {tip.origin}; "
        "choose one with --to, or promote an artifact"
    )


def _insist_on_tip(tip: Generation | None, expected: int | None, channel: str) -> None:
    current = tip.generation if tip else 0
    if expected is not None and current != expected:
        raise Refused(f"channel {channel} is at generation {current}, not {expected}; look at it, then decide again")


def _insist_on_artifact(store: Store, one: Published, channel: str, requirements: Requirements) -> None:
    for blob, fault in store.blobs.settle(one.manifest.blobs()):
        raise Refused(
            f"{one.name} is incomplete: blob {blob.sha256} of {blob.size} bytes {fault} in {store.url}; "
            "publish it again"
        )
    if requirements.doubt is not None and (sentence := requirements.doubt(Served.of(one))):
        raise Refused(sentence)
    if sentence := requirements.judge(one.manifest, _believed(store, one, requirements)):
        raise Refused(f"{one.name} cannot be served on channel {channel}: {sentence}")


def _insist_on_what_stays(
    log: ChannelLog, tip: Generation, news: Sequence[Served], trust: ChannelVerifier, store: Store, fault: str
) -> None:
    """A signature is for the whole state: what only a generation says that is not believed must be named as well."""
    believed = next((one for one in log.back_from(tip) if not trust.fault(store.backend, one)), None)
    vouched = {*news, *(believed.artifacts if believed else ())}
    named = {one.slot for one in news}
    strangers = [one for one in tip.artifacts if one.slot not in named and one not in vouched]
    if strangers:
        raise Refused(
            f"generation {tip.generation} of channel {log.channel} {fault}, and nothing else says that it should serve "
            f"{' and '.join(one.name for one in strangers)}; name all that it should serve in one command, or roll back"
        )


def _believed(store: Store, one: Published, requirements: Requirements) -> Sequence[Evidence]:
    evidence = store.evidence(one.manifest_digest)
    believed = [each for each in evidence if requirements.believe is None or requirements.believe(each)]
    if evidence and not believed:
        raise Refused(
            f"the evidence of {one.name} is not signed by the keys that its channel trusts; "
            f"sign it with: nxpipe store sign {one.name}"
        )
    return believed


def _insist_on_targets(
    state: Sequence[Served], news: Sequence[Served], channel: str, requirements: Requirements
) -> None:
    for model in sorted({served.model_id for served in news}):
        served = {each.target for each in state if each.model_id == model}
        missing = sorted(set(requirements.targets.get(model, ())) - served)
        if missing:
            raise Refused(
                f"the fleets of channel {channel} run {model} on {' and '.join(missing)} too, and no artifact for that "
                "is served or promoted; build it, and promote all of them in one command"
            )
