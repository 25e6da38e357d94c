"""Whose word evidence is. Figures lie beside a manifest, so that its signature does not cover them: whoever signs the
artifact signs what was found out about it, each document by its digest.
"""

from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.channel.change import Believe
from nxpipe.artifact_store.layout import signature_folder
from nxpipe.artifact_store.record import Published
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.trust.envelope import sign
from nxpipe.artifact_store.trust.keys import Signer
from nxpipe.artifact_store.trust.policy import Policy
from nxpipe.artifact_store.trust.signatures import Signatures
from nxpipe.artifact_store.trust.statement import Resource, Sha256, statement_of


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
