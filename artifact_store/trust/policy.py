"""Signing policy: which keys may sign artifacts, evidence and generations of which channel.

Figures lie beside a manifest, outside its signature: the signer of an artifact also signs each evidence document by its
digest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.channel.change import Believe, Doubt, Sign
from nxpipe.artifact_store.channel.generation import Generation, Served, Signature
from nxpipe.artifact_store.documents import seconds_since_1970
from nxpipe.artifact_store.errors import Corrupt, StoreUnavailable
from nxpipe.artifact_store.fetch.cached_store import sources_of
from nxpipe.artifact_store.layout import signature_folder
from nxpipe.artifact_store.records import Published
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.trust.envelope import (
    Resource,
    Sha256,
    sign,
    statement_of,
)
from nxpipe.artifact_store.trust.keys import PublicKey, Signer, as_base64, from_base64
from nxpipe.artifact_store.trust.signatures import Signatures

# When a store took a generation, in seconds since 1970 by its own clock.
Taken = Callable[[Generation], float]
_UNDER_WAY: Final = 60.0  # seconds from the date that is signed to the object in the store


def not_known(_: Generation) -> float:
    """For those who have nothing but the generation itself."""
    return 0.0


Duty: TypeAlias = Literal["artifacts", "channels"]


@dataclass(frozen=True)
class TrustedKey:
    """A key under the name that people know it by; `channels` of None are all, `expires` of None is never, `signs` of
    None is both: artifacts, and the generations of channels.
    """

    name: str
    key: PublicKey
    channels: frozenset[str] | None = None
    expires: float | None = None  # seconds since 1970
    signs: Duty | None = None

    def may_sign(self, channel: str, what: Duty) -> bool:
        return (self.channels is None or channel in self.channels) and self.signs in (None, what)

    def counts(self, channel: str, at: float, what: Duty) -> bool:
        return self.may_sign(channel, what) and (self.expires is None or at < self.expires)

    def had_not_expired(self, generation: Generation, taken: Taken) -> bool:
        """When the store took the generation, by the store's own clock."""
        return self.expires is None or taken(generation) - _UNDER_WAY < self.expires


@dataclass(frozen=True)
class Policy:
    """The channels that ask for signatures, the keys that they trust, and how many of those must agree."""

    trusted: tuple[TrustedKey, ...] = ()
    required: frozenset[str] = frozenset()
    threshold: int = 1

    def trusts(self, key: PublicKey, channel: str, at: float) -> bool:
        return key in {each.key for each in self._counting(channel, at, "channels")}

    def signers(self, store: Store, manifest_digest: str, channel: str, now: float) -> list[str]:
        """The names of those who have signed a manifest, of all whose word counts.

        One that is damaged or cannot be read is reported only where the good ones do not suffice without it: whoever
        can add an object must not be able to take an artifact away.
        """
        good: list[str] = []
        faults: list[Corrupt | StoreUnavailable] = []
        for each in self._counting(channel, now, "artifacts"):
            try:
                if Signatures(store).by(each.key, manifest_digest) is not None:
                    good.append(each.name)
            except (Corrupt, StoreUnavailable) as error:
                faults.append(error)
        if faults and len(good) < self.threshold:
            raise faults[0]
        return good

    def judge(self, store: Store, channel: str) -> Doubt | None:
        """What is asked of each artifact before a channel serves it; None for one that takes unsigned ones too."""
        if channel not in self.required:
            return None

        def doubt(one: Served) -> str | None:
            names = self.signers(store, one.manifest.sha256, channel, clock_of(store))
            if len(names) >= self.threshold:
                return None
            if names:
                return (
                    f"channel {channel} asks for {self.threshold} signatures, and {one.name} has that of "
                    f"{', '.join(names)} only; have it signed by one more"
                )
            return (
                f"channel {channel} takes signed artifacts only, and no key that it trusts has signed {one.name}; "
                f"sign it with: nxpipe store sign {one.name}"
            )

        return doubt

    def authors(self, generation: Generation, taken: Taken = not_known) -> list[str]:
        """The names of those who have signed a generation while their word counted.

        That is judged by its own date, and for a key that expires also by the date at which the store took it: the
        chain holds the first above the date before, and nobody chooses the second but the store.
        """
        message = generation.signed_bytes()
        by_key = {signature.key_id: from_base64(signature.signature) for signature in generation.signatures}
        authors = []
        for each in self._counting(generation.channel, seconds_since_1970(generation.at), "channels"):
            signature = by_key.get(each.key.key_id)
            if signature and each.key.proves(signature, message) and each.had_not_expired(generation, taken):
                authors.append(each.name)
        return authors

    def fault(self, generation: Generation, taken: Taken = not_known) -> str | None:
        """Why nobody should believe a generation, if its channel asks for a signature and has no good one."""
        if generation.channel not in self.required or self.authors(generation, taken):
            return None
        if not generation.signatures:
            return "is not signed"
        known = {each.key.key_id: each for each in self.trusted}
        names = [known[each.key_id].name for each in generation.signatures if each.key_id in known]
        if not names:
            return "is signed by no key that the policy knows"
        return f"has no valid signature: that of {', '.join(names)} is wrong, expired, or not for this channel"

    def envelopes(self, store: Store, manifest_digest: str, channel: str) -> Iterator[tuple[str, bytes]]:
        """What the channel's keys have signed of a manifest, as it lies in the store: by path."""
        for each in self.trusted:
            if each.may_sign(channel, "artifacts"):
                found = Signatures(store).envelope(each.key, manifest_digest)
                if found is not None:
                    yield found

    def _counting(self, channel: str, at: float, what: Duty) -> list[TrustedKey]:
        """Each key once: one that is listed under two names is still one signer."""
        by_id = {each.key.key_id: each for each in self.trusted if each.counts(channel, at, what)}
        return list(by_id.values())


def clock_of(store: Store) -> float:
    """Of the first place that answers."""
    return sources_of(store).first("the clock", lambda place: place.now()) or 0.0


def signing_with(signer: Signer) -> Sign:
    """How an author signs a generation."""
    return lambda message: Signature(key_id=signer.public.key_id, signature=as_base64(signer.sign(message)))


def vouch(store: Store, published: Published, signer: Signer, builder: str) -> int:
    """Sign all evidence of an artifact that this key has not signed; how many documents that were."""
    unsigned = [
        each for each in store.evidence(published.manifest_digest) if not _has_signed(store, signer, each.digest)
    ]
    if not unsigned:
        return 0
    said = statement_of(published.manifest, store.key_inputs(published.manifest), builder)
    for each in unsigned:
        subject = Resource(name=f"evidence of {published.model_id}", digest=Sha256(sha256=each.digest))
        envelope = sign(said.model_copy(update={"subject": (subject,)}), signer)
        envelope.statement(signer.public, each.digest)
        store.backend.create(signature_folder(each.digest) + envelope.key_id, Payload.of(envelope.to_bytes()))
    return len(unsigned)


def is_vouched(store: Store, published: Published, signer: Signer) -> bool:
    """Whether this key has signed all that was found out about an artifact."""
    return all(_has_signed(store, signer, each.digest) for each in store.evidence(published.manifest_digest))


def believing(policy: Policy, store: Store, channel: str) -> Believe | None:
    """Which evidence counts for a channel: of one that asks for signatures, what enough of its keys have signed."""
    if channel not in policy.required:
        return None
    return lambda each: len(policy.signers(store, each.digest, channel, store.backend.now())) >= policy.threshold


def _has_signed(store: Store, signer: Signer, digest: str) -> bool:
    return Signatures(store).by(signer.public, digest) is not None
