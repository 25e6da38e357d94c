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
class Wanted:
    """`seen_ago` is None where the store itself has answered, else the seconds since it was seen to be so."""

    manifest: Manifest
    digest: str
    seen_ago: float | None


def by_name(store: Store, name: str, remember: OfflineIndex | None = None) -> Wanted:
    """`MODEL`, `MODEL@KEYPREFIX` or `KEYPREFIX`; a whole key needs no listing."""
    key = name.rpartition("@")[2]
    found = store.find(key) if is_key(key) else None
    published = found or store.resolve(name)
    if remember:
        remember.keep(published.record)
    seen = store.backend
    ago = seen.age_of_artifact(published.request_key) if isinstance(seen, OfflineIndex) else None
    return Wanted(published.manifest, published.manifest_digest, ago)


def by_channel(
    store: Store,
    channel: str,
    model: str | None,
    target: str | None,
    trust: ChannelVerifier,
    remember: OfflineIndex | None = None,
) -> Wanted:
    """What a channel serves for this model and target, either of which may be left out where there is one.

    Only what is believed is remembered, and with the signatures that it was believed for: offline it is asked again.
    """
    tip = trust.tip(store, channel)
    if tip is None:
        raise ChannelEmpty(f"channel {channel} of {store.url} is empty; promote an artifact to it")
    chosen = _choose(tip, model, target, store.url)
    trust.insist_on_signatures(store, channel, chosen)
    if remember:
        if trust.policy:
            remember.keep_objects(trust.policy.envelopes(store, chosen.manifest.sha256, channel))
        remember.keep_channel(tip)
    seen = store.backend
    ago = seen.age_of_channel(channel) if isinstance(seen, OfflineIndex) else None
    return Wanted(_manifest(store, chosen.manifest), chosen.manifest.sha256, ago)


def _choose(tip: Generation, model: str | None, target: str | None, url: str) -> Served:
    found = [one for one in tip.artifacts if model in (None, one.model_id) and target in (None, one.target)]
    if len(found) == 1:
        return found[0]
    serves = ", ".join(f"{one.model_id} for {one.target}" for one in tip.artifacts[:8]) or "nothing"
    what = f"{len(found)} artifacts" if found else "no such artifact"
    raise NotFound(
        f"channel {tip.channel} of {url} has {what} in generation {tip.generation}, which serves {serves}; "
        "name one model and one target"
    )


def _manifest(store: Store, blob: Blob) -> Manifest:
    try:
        return store.manifest(blob)
    except InvalidDocument as fault:
        raise Corrupt(f"manifest {blob.sha256} in {store.url}", str(fault), _OTHER_VERSION) from fault
