"""Lookup of artifacts and channels by the names on the command line."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.errors import ChannelEmpty, NotFound

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.channel.generation import Served
    from nxpipe.artifact_store.fetch.offline_index import OfflineIndex
    from nxpipe.artifact_store.fetch.selection import Selection
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.pipeline.config import Config

_KEY: Final = re.compile("[0-9a-f]{6,64}")


def is_artifact(word: str) -> bool:
    """True if the word can name an artifact only."""
    return "@" in word or _KEY.fullmatch(word) is not None


def artifact(word: str, store: "Store") -> "Manifest":
    """The artifact of a name, as in `nxpipe store show`, or of a manifest's digest, even if it is not published."""
    try:
        return store.resolve(word).manifest
    except NotFound:
        manifest = _by_digest(word, store)
        if manifest is None:
            raise
        return manifest


@dataclass(frozen=True)
class Match:
    """One artifact, or the artifacts of a channel."""

    word: str
    is_channel: bool
    artifacts: "tuple[Manifest, ...]"

    def beside(self, other: "Manifest") -> "Manifest | None":
        """The artifact to compare `other` with: for a channel, that of the same model and target."""
        if not self.is_channel:
            return self.artifacts[0]
        return next((manifest for manifest in self.artifacts if _slot(manifest) == _slot(other)), None)


def find_match(word: str, store: "Store", config_path: Path) -> Match:
    """The channel or artifact of a word; ChannelEmpty for a channel without generations."""
    from nxpipe.artifact_store.channel.log import channels
    from nxpipe.pipeline.artifacts.channels import unknown_channel

    if word in channels(store.backend):
        return Match(word, True, _served(word, store, config_path))
    if is_artifact(word):
        return Match(word, False, (artifact(word, store),))
    raise unknown_channel(store, word, _config(config_path))


def served_by(
    channel: str,
    model: str | None,
    target: str | None,
    store: "Store",
    config_path: Path,
    notice: Callable[[str], None],
    index: "OfflineIndex | None" = None,
) -> "Selection":
    """What a channel serves for a model and a target, under the rules of [signing]."""
    from nxpipe.artifact_store.fetch.selection import by_channel
    from nxpipe.pipeline.artifacts.channels import unknown_channel
    from nxpipe.pipeline.artifacts.signing import trust_in
    from nxpipe.pipeline.config import load_config

    config = load_config(config_path, os.environ, missing_ok=True)
    trust = trust_in(config, config_path.parent, store, notice)
    try:
        return by_channel(store, channel, model, target, trust, index)
    except ChannelEmpty as empty:
        raise unknown_channel(store, channel, config) from empty


def _config(path: Path) -> "Config | None":
    """The configuration, for a suggestion; None if it is invalid: the error is another."""
    from nxpipe.pipeline.config import ConfigInvalid, load_config

    try:
        return load_config(path, os.environ, missing_ok=True)
    except ConfigInvalid:
        return None


def empty_channel(channel: str) -> Match:
    """The match of a channel without artifacts."""
    return Match(channel, True, ())


def pair(words: Sequence[str], store: "Store", config_path: Path) -> "tuple[Manifest, Manifest]":
    """The artifacts of two words; for a channel, that of the same model and target as the other word's artifact."""
    before, after = (_either(word, store, config_path) for word in words)
    pairs = [
        (old, new)
        for old in before.artifacts
        for new in after.artifacts
        if not (before.is_channel or after.is_channel) or _slot(old) == _slot(new)
    ]
    if len(pairs) == 1:
        return pairs[0]
    common = ", ".join(f"{new.model.id} for {new.target}" for _, new in pairs) or "nothing of one model and target"
    raise NotFound(f"{before.word} and {after.word} have in common: {common}; name an artifact, as MODEL@KEY")


def _either(word: str, store: "Store", config_path: Path) -> Match:
    """The match of a word, which is a model id if it names no channel."""
    try:
        match = find_match(word, store, config_path)
    except ChannelEmpty as no_channel:
        try:
            return Match(word, False, (artifact(word, store),))
        except NotFound as no_artifact:
            raise NotFound(f"{no_artifact}; and {no_channel}") from no_artifact
    return match


def _served(channel: str, store: "Store", config_path: Path) -> "tuple[Manifest, ...]":
    """The artifacts of a channel's current generation, which must be trusted."""
    from nxpipe.pipeline.artifacts.signing import trust_in
    from nxpipe.pipeline.config import load_config

    config = load_config(config_path, os.environ, missing_ok=True)
    served = trust_in(config, config_path.parent, store).served(store, channel)
    return tuple(_promoted(artifact, channel, store) for artifact in served or ())


def _promoted(served: "Served", channel: str, store: "Store") -> "Manifest":
    manifest = _by_digest(served.manifest.sha256, store)
    if manifest is None:
        raise NotFound(f"channel {channel} serves {served.name}, whose manifest is not in {store.url}; build it again")
    return manifest


def _slot(manifest: "Manifest") -> tuple[str, str]:
    return manifest.model.id, manifest.target


def _by_digest(digest: str, store: "Store") -> "Manifest | None":
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.layout import digest_path, is_key

    stat = store.backend.stat(digest_path(digest)) if is_key(digest) else None
    return store.manifest(Blob(sha256=digest, size=stat.size)) if stat else None
