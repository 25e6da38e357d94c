"""What a word on the command line names: an artifact of the store, or a channel with all that it serves."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.errors import ChannelEmpty, NotFound
from nxpipe.pipeline.artifacts.channels import unknown_channel

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.channel.generation import Served
    from nxpipe.artifact_store.manifest import Manifest

_KEY: Final = re.compile("[0-9a-f]{6,64}")


def is_artifact(word: str) -> bool:
    """Whether it can be nothing else."""
    return "@" in word or _KEY.fullmatch(word) is not None


def artifact(word: str, store: "Store") -> "Manifest":
    """By a name, as `nxpipe store show` takes it, or by the digest of a manifest, which no record need name."""
    try:
        return store.resolve(word).manifest
    except NotFound:
        found = _by_digest(word, store)
        if found is None:
            raise
        return found


@dataclass(frozen=True)
class Match:
    """One artifact; or those of a channel, of each model and target one."""

    word: str
    is_channel: bool
    artifacts: "tuple[Manifest, ...]"

    def beside(self, other: "Manifest") -> "Manifest | None":
        """The one to compare another artifact with."""
        if not self.is_channel:
            return self.artifacts[0]
        return next((one for one in self.artifacts if _slot(one) == _slot(other)), None)


def find_match(word: str, store: "Store", config_path: Path) -> Match:
    """A channel that something was promoted to, or an artifact: a misspelt channel is neither."""
    from nxpipe.artifact_store.channel.log import channels

    if word in channels(store.backend):
        return Match(word, True, _served(word, store, config_path))
    if is_artifact(word):
        return Match(word, False, (artifact(word, store),))
    raise unknown_channel(store, word)


def empty_channel(channel: str) -> Match:
    """A channel that may well be empty: with it, nothing can be compared."""
    return Match(channel, True, ())


def pair(words: Sequence[str], store: "Store", config_path: Path) -> "tuple[Manifest, Manifest]":
    """Two artifacts; of a channel the one of the same model and target as the other word's."""
    before, after = (_either(word, store, config_path) for word in words)
    found = [
        (old, new)
        for old in before.artifacts
        for new in after.artifacts
        if not (before.is_channel or after.is_channel) or _slot(old) == _slot(new)
    ]
    if len(found) == 1:
        return found[0]
    both = ", ".join(f"{new.model.id} for {new.target}" for _, new in found) or "nothing of one model and target"
    raise NotFound(f"{before.word} and {after.word} have in common: {both}; name an artifact, as MODEL@KEY")


def _either(word: str, store: "Store", config_path: Path) -> Match:
    """Of a word that is no channel, a model's id has the last say."""
    try:
        found = find_match(word, store, config_path)
    except ChannelEmpty as no_channel:
        try:
            return Match(word, False, (artifact(word, store),))
        except NotFound as no_artifact:
            raise NotFound(f"{no_artifact}; and {no_channel}") from no_artifact
    return found


def _served(channel: str, store: "Store", config_path: Path) -> "tuple[Manifest, ...]":
    """What is served now, by a generation and signatures that may be believed."""
    from nxpipe.pipeline.artifacts.signing import trust_in
    from nxpipe.pipeline.config import load_config

    config = load_config(config_path, os.environ, missing_ok=True)
    served = trust_in(config, config_path.parent, store).served(store, channel)
    return tuple(_promoted(one, channel, store) for one in served or ())


def _promoted(served: "Served", channel: str, store: "Store") -> "Manifest":
    found = _by_digest(served.manifest.sha256, store)
    if found is None:
        raise NotFound(f"channel {channel} serves {served.name}, whose manifest is not in {store.url}; build it again")
    return found


def _slot(manifest: "Manifest") -> tuple[str, str]:
    return manifest.model.id, manifest.target


def _by_digest(digest: str, store: "Store") -> "Manifest | None":
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.layout import digest_path, is_key

    stat = store.backend.stat(digest_path(digest)) if is_key(digest) else None
    return store.manifest(Blob(sha256=digest, size=stat.size)) if stat else None
