"""The gates that vouch for artifacts and serve them: `sign` and `promote`."""

from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.channel import change
from nxpipe.artifact_store.channel.generation import Served
from nxpipe.artifact_store.names import SHOWN
from nxpipe.pipeline.artifacts.promotion import doubt, requirements
from nxpipe.pipeline.artifacts.signing import author_signature, builder_id, chosen_signer
from nxpipe.pipeline.release.fleets import left_to_rollouts
from nxpipe.pipeline.release.gate import Outcome, Settled

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published
    from nxpipe.artifact_store.trust.keys import Signer
    from nxpipe.artifact_store.trust.policy import Policy
    from nxpipe.pipeline.config import Config
    from nxpipe.pipeline.release.candidate import Candidate
    from nxpipe.pipeline.release.state import Release
    from nxpipe.pipeline.release.words import Words


class Sign:
    """With one key. A policy that asks for more hears of it from `promote`."""

    name: Final = "sign"

    def settled(self, release: "Release") -> Settled | None:
        channel, published = release.words.channel, _all_published(release)
        policy = release.trust.policy
        judge = policy.judge(release.store, channel) if policy else None
        if policy is not None and judge is not None:
            content = published is not None and not any(judge(Served.of(one)) for one in published)
            content = content and all(_is_believed(release, policy, one) for one in published or ())
            return Settled("done", f"channel {channel} trusts the signatures that are there") if content else None
        if not (release.words.key or release.config.signing.key):
            return Settled("skipped", f"channel {channel} asks for no signature, and no key is named")
        signer = _signer(release)
        if published is None or any(_unsigned(release, signer, one) for one in published):
            return None
        return Settled("done", f"key {signer.public.key_id[:SHOWN]} has signed before")

    def intention(self, release: "Release") -> str:
        return f"sign {_names(release.candidates)}"

    def run(self, release: "Release") -> Outcome:
        from nxpipe.artifact_store.trust.policy import vouch
        from nxpipe.artifact_store.trust.signatures import Signatures

        signer, signatures, figures = _signer(release), Signatures(release.store), []
        for one in release.candidates:
            published = release.published(one)
            if _unsigned(release, signer, published):
                signatures.add(published, signer, builder_id())
                vouch(release.store, published, signer, builder_id())
            key, manifest = signer.public.key_id, published.manifest_digest
            figures.append({"artifact": one.name, "manifest": manifest, "key_id": key, "builder": builder_id()})
        return Outcome(f"{len(figures)} manifests by key {signer.public.key_id[:SHOWN]}", figures=figures)


class Promote:
    """All at once, as one generation; what a fleet's traffic has to come to first is left to that."""

    name: Final = "promote"

    def settled(self, release: "Release") -> Settled | None:
        direct, served = _direct(release), release.served()
        if not direct:
            return Settled("skipped", "left to the rollouts, which move the channel when they have promoted")
        found = [release.found(one) for one in direct]
        wanted = [Served.of(one) for one in found if one is not None]
        if len(wanted) < len(direct) or any(served.get(one.slot) != one for one in wanted):
            return None
        tip = release.tip()
        return Settled("done", f"channel {release.words.channel} serves them, at generation {tip and tip.generation}")

    def intention(self, release: "Release") -> str:
        return f"serve {_names(_direct(release))} on channel {release.words.channel}"

    def run(self, release: "Release") -> Outcome:
        words, store, config = release.words, release.store, release.config
        if release.tip() is None and (sentence := doubt(config, words.channel)):
            release.console.say(f"  Note: {sentence}")
        sign = author_signature(words.key, config, release.folder, words.channel, store)
        appended = change.promote(
            store,
            words.channel,
            [release.published(one) for one in _direct(release)],
            change.Author(words.actor, words.reason, sign),
            requirements(store, config, release.folder, words.channel),
            expected=release.seen,
        )
        generation = appended.generation
        figures = [each.model_dump() for each in generation.artifacts]
        return Outcome(f"channel {words.channel} is at generation {generation.generation}", figures=figures)


def must_be_signed(config: "Config", words: "Words") -> bool:
    """Whether a promotion would be refused without."""
    return words.channel in config.signing.require


def _direct(release: "Release") -> "list[Candidate]":
    left = left_to_rollouts(release)
    return [one for one in release.candidates if one.slot not in left]


def _all_published(release: "Release") -> "list[Published] | None":
    found = [release.found(one) for one in release.candidates]
    there = [one for one in found if one is not None]
    return there if len(there) == len(found) else None


def _signer(release: "Release") -> "Signer":
    return chosen_signer(release.words.key, release.config, release.folder)


def _unsigned(release: "Release", signer: "Signer", published: "Published") -> bool:
    from nxpipe.artifact_store.trust.policy import is_vouched
    from nxpipe.artifact_store.trust.signatures import Signatures

    signed = Signatures(release.store).by(signer.public, published.manifest_digest) is not None
    return not (signed and is_vouched(release.store, published, signer))


def _is_believed(release: "Release", policy: "Policy", published: "Published") -> bool:
    from nxpipe.artifact_store.trust.policy import believing

    believe = believing(policy, release.store, release.words.channel)
    return any(believe is None or believe(each) for each in release.store.evidence(published.manifest_digest))


def _names(candidates: "tuple[Candidate, ...] | list[Candidate]") -> str:
    return ", ".join(one.name for one in candidates)
