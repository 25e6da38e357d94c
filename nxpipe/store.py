"""Stores of the Python API: artifacts with readable attributes, and the channels from which fleets fetch them.

`Store` wraps the store that the commands open, with its cache and replicas. `Artifact` knows its store, so that it can
be loaded, verified and promoted without naming one.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store import Store as ArtifactStore
from nxpipe.artifact_store.evidence import EMULATED
from nxpipe.pipeline.util.display import BarsPart, Displayed, Part, TablePart
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published
    from nxpipe.artifact_store.evidence import Evidence
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.pipeline.artifacts.channel_log import ChannelEntry
    from nxpipe.pipeline.artifacts.promotion import ChannelChange
    from nxpipe.pipeline.serving.inference import LoadedModel

CONFIG: Final = "nxpipe.toml"


@dataclass(frozen=True)
class ArtifactProgram:
    """A program of an artifact: its fixed shapes, and the time that is predicted for it on a device."""

    name: str
    phase: str
    batch: int
    bucket: int
    tp: int
    predicted_ms: float | None
    outputs: tuple[str, ...]


class Artifact(Displayed):
    """A published artifact of a store. Its manifest is read and verified on first use."""

    def __init__(self, published: "Published", store: "Store") -> None:
        self.published, self.store = published, store

    @property
    def name(self) -> str:
        """MODEL@KEY, by which commands and `load` find it."""
        return self.published.name

    @property
    def model_id(self) -> str:
        return self.published.model_id

    @property
    def target(self) -> str:
        """The compiler's target: inf2, trn1 or trn2."""
        return self.published.target

    @property
    def request_key(self) -> str:
        return self.published.request_key

    @property
    def manifest_digest(self) -> str:
        return self.published.manifest_digest

    @property
    def published_at(self) -> str:
        return self.published.published_at

    @property
    def size_bytes(self) -> int:
        return self.published.size_bytes

    @property
    def manifest(self) -> "Manifest":
        return self.published.manifest

    @property
    def task(self) -> str:
        return self.manifest.model.task

    @property
    def backend(self) -> str:
        """The compiler of its programs: emulator or neuronx."""
        return self.manifest.backend

    @property
    def tp(self) -> int:
        """The tensor-parallel degree."""
        return max((program.tensor_parallel for program in self.manifest.executables), default=1)

    @property
    def buckets(self) -> tuple[int, ...]:
        """The sequence lengths of its programs."""
        return tuple(sorted({program.sequence for program in self.manifest.executables}))

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({program.batch for program in self.manifest.executables}))

    @cached_property
    def programs(self) -> tuple[ArtifactProgram, ...]:
        from nxpipe.pipeline.artifacts.bench import predicted_times

        times = {time.name: time.ns for time in predicted_times(self.manifest, self.store.stored).values()}
        return tuple(
            ArtifactProgram(
                program.name, program.phase, program.batch, program.sequence, program.tensor_parallel,
                None if (ns := times.get(program.name)) is None else ns / 1e6, program.outputs,
            )
            for program in self.manifest.executables
        )  # fmt: skip

    @property
    def files(self) -> dict[str, int]:
        """The sizes of its files by path: configuration, tokenizer, graphs."""
        return {file.path: file.blob.size for file in self.manifest.files}

    @property
    def evidence(self) -> tuple["Evidence", ...]:
        """Its verifications, on the emulator and on devices."""
        return tuple(self.store.stored.evidence(self.manifest_digest))

    def read_file(self, path: str) -> bytes:
        """The bytes of a file, verified."""
        from nxpipe.pipeline.util.errors import InputInvalid
        from nxpipe.pipeline.util.text import did_you_mean

        blobs = {file.path: file.blob for file in self.manifest.files}
        if path not in blobs:
            raise InputInvalid(f"{self.name} has no file {path!r}{did_you_mean(path, blobs)}")
        return self.store.stored.read_blob(blobs[path])

    def load(self, *, device: str = "emulator", mode: str = "fast", rows: int | None = None) -> "LoadedModel":
        """Load its programs in this process, as `nxpipe.load` does."""
        from nxpipe.pipeline.serving.text import require_serving_libraries

        require_serving_libraries()
        from nxpipe.pipeline.serving.inference import load_artifact

        return load_artifact(self.published, self.store.stored, device=device, mode=mode, rows=rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Artifact) and self.manifest_digest == other.manifest_digest

    def __hash__(self) -> int:
        return hash(self.manifest_digest)

    def __repr__(self) -> str:
        count = self.published.executables
        programs = f"{count} program{'' if count == 1 else 's'}"
        return f"<Artifact {self.name}, {self.target}, {programs}, {human_bytes(self.size_bytes)}>"

    def display(self) -> Iterator[Part]:
        moment = f"{self.published_at[:19].replace('T', ' ')} UTC"
        size = human_bytes(self.size_bytes)
        yield f"{self.name}: {self.task} for {self.target}, tp {self.tp}, {size}, published {moment}"
        found = _worst(self.evidence)
        rows = [
            (
                program.name,
                str(program.batch),
                str(program.bucket),
                _ms(program.predicted_ms),
                *found.get(program.name, ("-", "-")),
            )
            for program in self.programs
        ]
        header = ("program", "batch", "bucket", "predicted", "cosine", "max relative error")
        yield TablePart("Programs", header, rows)
        timed = [(each.name, each.predicted_ms, _ms(each.predicted_ms)) for each in self.programs if each.predicted_ms]
        if len(timed) > 1:
            yield BarsPart("Predicted latency on a device", timed, in_table=True)


def _worst(evidence: "Sequence[Evidence]") -> dict[str, tuple[str, str]]:
    """The least cosine and the largest relative error of each program in its emulated evidence."""
    return {
        compared.program: (
            f"{min(output.cosine for output in compared.outputs):.7f}",
            f"{max(output.max_relative for output in compared.outputs):.3g}",
        )
        for document in evidence
        if document.kind == EMULATED
        for compared in document.programs
    }


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.3f} ms"


class Store(Displayed):
    """An artifact store: its artifacts, newest first, and its channels. `store[NAME]` is `resolve`.

    `Store("s3://BUCKET/PREFIX")` is `open_store`. `stored` is the store underneath; reads go through this machine's
    cache, and changes to the store itself.
    """

    def __init__(self, stored: ArtifactStore | str | None = None, config_path: str | Path = CONFIG) -> None:
        self.config_path = Path(config_path)
        self.stored: ArtifactStore = stored if isinstance(stored, ArtifactStore) else opened(stored, config_path).stored

    @property
    def url(self) -> str:
        return self.stored.url

    def list(self) -> "list[Artifact]":
        """Every artifact, the newest first."""
        return [Artifact(published, self) for published in self.stored.list()]

    def resolve(self, name: str) -> Artifact:
        """The only artifact that matches MODEL, MODEL@KEY or the beginning of a key; NotFound without one."""
        return Artifact(self.stored.resolve(name), self)

    def find(self, request_key: str) -> Artifact | None:
        published = self.stored.find(request_key)
        return None if published is None else Artifact(published, self)

    def channels(self) -> "tuple[Channel, ...]":
        """The channels that serve something."""
        from nxpipe.artifact_store.channel.log import channels

        return tuple(Channel(name, self) for name in channels(self.stored.backend))

    def channel(self, name: str) -> "Channel":
        """A channel by its name; it may be empty, and its first promotion creates it."""
        return Channel(name, self)

    def __iter__(self) -> Iterator[Artifact]:
        return iter(self.list())

    def __getitem__(self, name: str) -> Artifact:
        return self.resolve(name)

    def __repr__(self) -> str:
        return f"<Store {self.url}>"

    def display(self) -> Iterator[Part]:
        artifacts, serving = self.list(), self._serving()
        yield f"{self.url}: {len(artifacts)} artifact{'' if len(artifacts) == 1 else 's'}"
        header = ("artifact", "target", "programs", "size", "published", "channels")
        rows = [
            (
                each.name,
                each.target,
                str(each.published.executables),
                human_bytes(each.size_bytes),
                each.published_at[:16].replace("T", " "),
                ", ".join(serving.get(each.manifest_digest, ())) or "-",
            )
            for each in artifacts
        ]
        if rows:
            yield TablePart("", header, rows)

    def _serving(self) -> dict[str, tuple[str, ...]]:
        """The channels by the digests of the manifests that they serve."""
        serving: dict[str, tuple[str, ...]] = {}
        for channel in self.channels():
            for served in channel.served:
                serving[served] = (*serving.get(served, ()), channel.name)
        return serving


@dataclass(frozen=True)
class ChannelGeneration:
    """One entry of a channel's log: the artifacts that it served from then on. `fault` says why it is not trusted."""

    number: int
    action: str
    at: str
    actor: str
    reason: str
    artifacts: tuple[str, ...]
    digest: str
    signed_by: tuple[str, ...]
    fault: str | None

    @classmethod
    def of(cls, entry: "ChannelEntry") -> "ChannelGeneration":
        made = entry.generation
        action = "promote" if made.restores is None else f"rollback to {made.restores}"
        names = tuple(served.name for served in made.artifacts)
        return cls(
            made.generation, action, made.at, made.actor, made.reason, names, made.digest, entry.signed_by, entry.fault
        )


class Channel(Displayed):
    """A channel: the artifacts that fleets fetch from it, and the log of its changes."""

    def __init__(self, name: str, store: Store) -> None:
        self.name, self.store = name, store

    @property
    def current(self) -> ChannelGeneration | None:
        """The newest generation; None for an empty channel."""
        return next(iter(self.history(1)), None)

    @property
    def served(self) -> tuple[str, ...]:
        """The digests of the manifests that it serves."""
        return tuple(served.manifest.sha256 for entry in self._entries(1) for served in entry.generation.artifacts)

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """The artifacts that it serves. Raises Refused for a generation that [signing] does not trust."""
        found = []
        for entry in self._entries(1):
            entry.require_trust()
            found += [self.store.find(served.request_key) for served in entry.generation.artifacts]
        return tuple(artifact for artifact in found if artifact is not None)

    def history(self, last: int = 20) -> tuple[ChannelGeneration, ...]:
        """The newest generations first, each verified by the digest in its successor."""
        return tuple(map(ChannelGeneration.of, self._entries(last)))

    def promote(
        self,
        *artifacts: Artifact | str,
        reason: str = "",
        expect: int | None = None,
        actor: str | None = None,
        key: str | None = None,
        without_evidence: Sequence[str] = (),
    ) -> ChannelGeneration:
        """Serve artifacts, each in place of that of the same model and target, under the rules of `nxpipe promote`.

        `expect`: fail with Refused unless the channel is at this generation, 0 for an empty one. Raises Refused for
        missing evidence or signatures, and for programs that a fleet of the channel cannot run.
        """
        chosen = [self.store.resolve(each) if isinstance(each, str) else each for each in artifacts]
        change = self._change(reason, actor, key)
        change.promote([each.published for each in chosen], expect=expect, without=without_evidence)
        return self._now()

    def rollback(
        self,
        *,
        to: int | None = None,
        reason: str = "",
        expect: int | None = None,
        actor: str | None = None,
        key: str | None = None,
    ) -> ChannelGeneration:
        """Serve the artifacts of an earlier generation: `to`, or the newest that differs."""
        self._change(reason, actor, key).rollback(to=to, expect=expect)
        return self._now()

    def _change(self, reason: str, actor: str | None, key: str | None) -> "ChannelChange":
        from nxpipe.pipeline.artifacts.promotion import ChannelChange, require_unmanaged
        from nxpipe.pipeline.config import load_config

        require_unmanaged(self.name, "run `nxpipe promote --past-rollouts`")
        path = self.store.config_path
        config = load_config(path, os.environ, missing_ok=True)
        uncached = ArtifactStore(self.store.stored.backend)
        return ChannelChange(uncached, config, path.parent, self.name, reason, actor, key)

    def _now(self) -> ChannelGeneration:
        current = self.current
        assert current is not None, "a change has just been appended"
        return current

    def _entries(self, last: int) -> "list[ChannelEntry]":
        from nxpipe.artifact_store.channel.log import channels
        from nxpipe.pipeline.artifacts.channel_log import ChannelView

        uncached = ArtifactStore(self.store.stored.backend)
        if self.name not in channels(uncached.backend):
            return []
        view = ChannelView.of(uncached, self.store.config_path, lambda _: None)
        return list(view.history(self.name, last))

    def __repr__(self) -> str:
        current = self.current
        state = f"generation {current.number}" if current else "empty"
        return f"<Channel {self.name} of {self.store.url}, {state}>"

    def display(self) -> Iterator[Part]:
        history = self.history()
        if not history:
            yield f"Channel {self.name} of {self.store.url} is empty."
            return
        serves = ", ".join(history[0].artifacts)
        yield f"Channel {self.name} of {self.store.url}, generation {history[0].number}: {serves}"
        header = ("generation", "action", "at", "by", "reason", "serves")
        rows = [
            (
                *(str(each.number), each.action, each.at[:16].replace("T", " "), each.actor, each.reason or "-"),
                ", ".join(each.artifacts),
            )
            for each in history
        ]
        yield TablePart("", header, rows)


def opened(store: "str | Store | ArtifactStore | None", config_path: str | Path = CONFIG) -> Store:
    """A store by its URL, or the one of the commands: NXPIPE_STORE_URL, else [store] of nxpipe.toml, else its
    default."""
    if isinstance(store, Store):
        return store
    path = Path(config_path)
    if isinstance(store, ArtifactStore):
        return Store(store, path)
    from nxpipe.pipeline.artifacts.store_url import open_configured_store
    from nxpipe.pipeline.util.console import Console

    return Store(open_configured_store(store, path, Console(quiet=True)), path)


def open_store(url: str | None = None, *, config_path: str | Path = CONFIG) -> Store:
    """Open a folder (`file://`, a path) or `s3://BUCKET/PREFIX`; without a URL, the store of the commands, of
    nxpipe.toml.

    Nothing is contacted before the first use.
    """
    return opened(url, config_path)


def published_of(artifact: "str | Artifact | Published | Any", store: "Store") -> "Published":
    """The published artifact of a name or of an artifact."""
    if isinstance(artifact, Artifact):
        return artifact.published
    return store.stored.resolve(artifact) if isinstance(artifact, str) else artifact
