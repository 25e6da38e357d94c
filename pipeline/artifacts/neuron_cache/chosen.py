"""Which artifacts are meant, and what of them a cache has a use for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.errors import NotFound
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.names import choose
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.artifacts.channels import model_id, unknown_channel
from nxpipe.pipeline.compile.neuronx.cache_entry import CacheEntry, entries_of

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier
    from nxpipe.pipeline.config import Config

_BACKEND: Final = "neuronx"
_NO_DEVICE: Final = "no Neuron device runs the emulator's programs"
_BUILD_IT: Final = "build with --backend neuronx"
_TRACED: Final = (
    "AWS documents that torch_neuronx.trace uses no cache; `nxpipe agent run` and `nxpipe store fetch` bring them"
)


class NothingToExport(NotFound):
    """No artifact that was asked for has an entry that a cache could hold."""


@dataclass(frozen=True)
class Chosen:
    manifest: Manifest
    entries: Sequence[CacheEntry]

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def without(self) -> list[str]:
        """Programs that came with no entry."""
        having = {entry.program for entry in self.entries}
        return sorted(executable.name for executable in self.manifest.executables if executable.name not in having)

    @property
    def doubt(self) -> str | None:
        """A word on what the cache will not have of it."""
        if self.manifest.backend != _BACKEND:
            return f"{self.name}: {_NO_DEVICE}"
        if not self.without:
            return None
        return (
            f"{self.name}: {len(self.without)} of {len(self.manifest.executables)} programs came with no cache entry "
            f"({', '.join(self.without)}); {_TRACED}"
        )


def named(store: "Store", names: Sequence[str]) -> list[Chosen]:
    """Each one was meant, so one that is of no use is an error."""
    published = store.list()
    found = {one.request_key: one for one in (choose(name, published, store.url) for name in names)}
    chosen = [_chosen(one.manifest) for one in found.values()]
    for one in chosen:
        if one.manifest.backend != _BACKEND:
            raise NothingToExport(f"{one.name} cannot be exported: {_NO_DEVICE}; {_BUILD_IT}")
    return chosen


def served(store: "Store", channel: str, trust: "ChannelVerifier") -> list[Chosen]:
    """What a channel serves now."""
    artifacts = trust.served(store, channel)
    if artifacts is None:
        raise unknown_channel(store, channel)
    return [_chosen(store.manifest(one.manifest)) for one in artifacts]


def configured(store: "Store", config: "Config", folder: Path, say: Callable[[str], None]) -> list[Chosen]:
    """Of each model of nxpipe.toml the newest artifact for its target that AWS's compiler made."""
    published, chosen = store.list(), {}
    for model in config.models:
        wanted = (model_id(model, folder), INSTANCES[model.target].compiler_target)
        fitting = (one.manifest for one in published if (one.model_id, one.target) == wanted)
        newest = next((manifest for manifest in fitting if manifest.backend == _BACKEND), None)
        if newest is None:
            say(f"  {wanted[0]} for {wanted[1]}: the store holds no artifact by AWS's compiler, and {_NO_DEVICE}")
        else:
            chosen[newest.request_key] = _chosen(newest)
    if not chosen:
        raise NothingToExport(
            f"{store.url} holds nothing by AWS's compiler of the models of nxpipe.toml ({len(config.models)}); "
            f"{_BUILD_IT}, or name other artifacts"
        )
    return list(chosen.values())


def refuse_nothing(chosen: Sequence[Chosen]) -> None:
    if not any(one.entries for one in chosen):
        doubts = "; ".join(one.doubt for one in chosen if one.doubt)
        raise NothingToExport(f"nothing can be exported: {doubts}")


def _chosen(manifest: Manifest) -> Chosen:
    return Chosen(manifest, entries_of(manifest) if manifest.backend == _BACKEND else [])
