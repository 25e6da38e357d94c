"""Selection of the artifact that a name or channel refers to, online or from the offline index."""

from dataclasses import dataclass

from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import ChannelEmpty, Corrupt, InvalidDocument, NotFound
from nxpipe.artifact_store.fetch.offline_index import OfflineIndex
from nxpipe.artifact_store.layout import is_key
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.store import Store
from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier

_OTHER_VERSION = "read it with the version of nxpipe that wrote it"


@dataclass(frozen=True)
class Selection:
    """A selected artifact. `seen_ago` is its age in seconds in the offline index; None if read from the store.

    `without`: the kinds of evidence that its channel does without.
    """

    manifest: Manifest
    digest: str
    seen_ago: float | None
    without: tuple[str, ...] = ()
    generation: int | None = None  # of the channel that was followed


def by_name(store: Store, name: str, index: OfflineIndex | None = None) -> Selection:
    """The artifact named `MODEL`, `MODEL@KEYPREFIX` or `KEYPREFIX`, stored in `index`; a whole key needs no listing."""
    key = name.rpartition("@")[2]
    published = (store.find(key) if is_key(key) else None) or store.resolve(name)
    if index:
        index.keep(published.record)
    backend = store.backend
    ago = backend.age_of_artifact(published.request_key) if isinstance(backend, OfflineIndex) else None
    return Selection(published.manifest, published.manifest_digest, ago)


def by_channel(
    store: Store,
    channel: str,
    model: str | None,
    target: str | None,
    trust: ChannelVerifier,
    index: OfflineIndex | None = None,
) -> Selection:
    """The artifact that a channel serves for a model and target; either may be None if the channel serves only one.

    Only a verified state is stored in `index`, with its signatures, which are verified again offline.
    """
    tip = trust.tip(store, channel)
    if tip is None:
        raise ChannelEmpty(f"channel {channel} of {store.url} is empty; promote an artifact to it")
    chosen = _choose(tip, model, target, store.url)
    trust.require_signatures(store, channel, chosen)
    if index:
        if trust.policy:
            index.keep_objects(trust.policy.envelopes(store, chosen.manifest.sha256, channel))
        index.keep_channel(tip)
    backend = store.backend
    ago = backend.age_of_channel(channel) if isinstance(backend, OfflineIndex) else None
    return Selection(_manifest(store, chosen.manifest), chosen.manifest.sha256, ago, chosen.without, tip.generation)


def _choose(tip: Generation, model: str | None, target: str | None, url: str) -> Served:
    matches = [
        served for served in tip.artifacts if model in (None, served.model_id) and target in (None, served.target)
    ]
    if len(matches) == 1:
        return matches[0]
    serves = ", ".join(f"{served.model_id} for {served.target}" for served in tip.artifacts[:8]) or "nothing"
    what = f"{len(matches)} artifacts" if matches else "no such artifact"
    named = model is not None and target is not None
    remedy = f"promote an artifact of {model} for {target} to it" if named else "name one model and one target"
    raise NotFound(
        f"channel {tip.channel} of {url} has {what} in generation {tip.generation}, which serves {serves}; {remedy}"
    )


def _manifest(store: Store, blob: Blob) -> Manifest:
    try:
        return store.manifest(blob)
    except InvalidDocument as fault:
        raise Corrupt(f"manifest {blob.sha256} in {store.url}", str(fault), _OTHER_VERSION) from fault
