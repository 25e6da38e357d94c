"""Whose word counts for which channel."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from artifact_store.channel.change import Doubt, Sign
from artifact_store.channel.generation import Generation, Served, Signature
from artifact_store.documents import seconds_since_1970
from artifact_store.store import Store
from artifact_store.trust.keys import PublicKey, Signer, as_base64, from_base64
from artifact_store.trust.signatures import Signatures

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

    def counts(self, channel: str, at: float, what: Duty) -> bool:
        here = self.channels is None or channel in self.channels
        return here and (self.expires is None or at < self.expires) and self.signs in (None, what)


@dataclass(frozen=True)
class Policy:
    """The channels that ask for signatures, the keys that they trust, and how many of those must agree."""

    trusted: tuple[TrustedKey, ...] = ()
    required: frozenset[str] = frozenset()
    threshold: int = 1

    def trusts(self, key: PublicKey, channel: str, at: float) -> bool:
        return key.key_id in {each.key_id for each in self._keys(channel, at, "channels").values()}

    def signers(self, store: Store, manifest_digest: str, channel: str, now: float) -> list[str]:
        """The names of those who have signed a manifest, of all whose word counts."""
        keys = self._keys(channel, now, "artifacts")
        signed = Signatures(store)
        return [name for name, key in keys.items() if signed.by(key, manifest_digest) is not None]

    def judge(self, store: Store, channel: str) -> Doubt | None:
        """What is asked of each artifact before a channel serves it; None for one that takes unsigned ones too."""
        if channel not in self.required:
            return None

        def doubt(one: Served) -> str | None:
            names = self.signers(store, one.manifest.sha256, channel, store.backend.now())
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

    def authors(self, generation: Generation) -> list[str]:
        """The names of those who have signed a generation while their word counted."""
        keys = self._keys(generation.channel, seconds_since_1970(generation.at), "channels")
        message = generation.signed_bytes()
        by_key = {signature.key_id: from_base64(signature.signature) for signature in generation.signatures}
        found = {name: by_key.get(key.key_id) for name, key in keys.items()}
        return [name for name, signature in found.items() if signature and keys[name].proves(signature, message)]

    def fault(self, generation: Generation) -> str | None:
        """Why nobody should believe a generation, if its channel asks for a signature and has no good one."""
        if generation.channel not in self.required or self.authors(generation):
            return None
        if not generation.signatures:
            return "is not signed"
        known = {each.key.key_id: each for each in self.trusted}
        names = [known[each.key_id].name for each in generation.signatures if each.key_id in known]
        if not names:
            return "is signed by no key that the policy knows"
        return f"has no valid signature: that of {', '.join(names)} is wrong, expired, or not for this channel"

    def _keys(self, channel: str, at: float, what: Duty) -> dict[str, PublicKey]:
        """Each key once: one that is listed under two names is still one signer."""
        counting = (each for each in self.trusted if each.counts(channel, at, what))
        by_id = {each.key.key_id: each for each in counting}
        return {each.name: each.key for each in by_id.values()}


def signing_with(signer: Signer) -> Sign:
    """How an author signs a generation."""
    return lambda message: Signature(key_id=signer.public.key_id, signature=as_base64(signer.sign(message)))
