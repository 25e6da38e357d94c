"""Differences between two manifests, section by section."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.index.leaves import Difference, differences
from nxpipe.artifact_store.manifest import Manifest, SharedFile

_NAMED: Final = 3  # entries of a section that a summary lists


@dataclass(frozen=True)
class EntryChange:
    """One executable, weight or file in two manifests; a blob is None where the entry is absent."""

    name: str
    before: Blob | None
    after: Blob | None


@dataclass(frozen=True)
class Section:
    """The entries of one kind, by how they differ."""

    title: str
    same: tuple[EntryChange, ...]
    changed: tuple[EntryChange, ...]
    added: tuple[EntryChange, ...]
    removed: tuple[EntryChange, ...]

    @property
    def differing(self) -> tuple[EntryChange, ...]:
        return (*self.changed, *self.added, *self.removed)


@dataclass(frozen=True)
class ManifestDifference:
    identity: tuple[Difference, ...]  # model, target, backend
    sections: tuple[Section, ...]

    @classmethod
    def between(cls, before: Manifest, after: Manifest) -> "ManifestDifference":
        return cls(
            identity=differences(_identity(before), _identity(after)),
            sections=(
                _section("executables", _executables(before), _executables(after)),
                _section("neffs", _neffs(before), _neffs(after)),
                _section("weights", _weights(before), _weights(after)),
                _section("files", _files(before), _files(after)),
                _section("serving", _serving(before), _serving(after)),
            ),
        )

    def in_short(self) -> str:
        """A phrase for messages; empty if only the key inputs differ."""
        phrases = [_counted(section) for section in self.sections if section.differing]
        phrases += [f"the identity ({self.identity[0].path})"] if self.identity else []
        return ", ".join(phrases)


_Described = Mapping[str, tuple[Blob, object]]


def _identity(manifest: Manifest) -> dict[str, object]:
    return {"model": manifest.model.model_dump(), "target": manifest.target, "backend": manifest.backend}


def _executables(manifest: Manifest) -> _Described:
    return {
        program.name: (
            program.blob,
            (
                program.phase,
                program.batch,
                program.sequence,
                program.tensor_parallel,
                program.graph_key,
                program.outputs,
            ),
        )
        for program in manifest.executables
    }


def _neffs(manifest: Manifest) -> _Described:
    devices = {program.name: program.device for program in manifest.executables if program.device}
    return {name: (device.neff, (device.module, device.interface)) for name, device in devices.items()}


def _weights(manifest: Manifest) -> _Described:
    """Compared by the tensors' own bytes: a different pack is no difference."""
    return {tensor.name: (tensor.blob, (tensor.dtype, tensor.shape)) for tensor in manifest.weights}


def _files(manifest: Manifest) -> _Described:
    return {file.path: (file.blob, None) for file in manifest.files}


def _serving(manifest: Manifest) -> _Described:
    """Contracts and files of the payloads; a file that is stored by tensor is compared by its header and tensors."""
    described: dict[str, tuple[Blob, object]] = {}
    for payload in manifest.serving:
        described[f"{payload.name}.json"] = (payload.contract, None)
        described |= {f"{payload.name}/{file.path}": (file.blob, None) for file in payload.files}
        described |= {
            f"{payload.name}/{file.path}": (_content(file), tuple(tensor.blob for tensor in file.tensors))
            for file in payload.shared
        }
    return described


def _content(file: SharedFile) -> Blob:
    """A digest of the header and the tensors' digests: the store has no object of the whole file."""
    parts = (file.head, *(tensor.blob for tensor in file.tensors))
    digest = Blob.of("".join(part.sha256 for part in parts).encode()).sha256
    return Blob(sha256=digest, size=sum(part.size for part in parts))


def _section(title: str, before: _Described, after: _Described) -> Section:
    common = sorted(before.keys() & after.keys())

    def changes(names: Iterable[str]) -> tuple[EntryChange, ...]:
        return tuple(
            EntryChange(name, *(side[name][0] if name in side else None for side in (before, after))) for name in names
        )

    return Section(
        title,
        same=changes(name for name in common if before[name] == after[name]),
        changed=changes(name for name in common if before[name] != after[name]),
        added=changes(sorted(after.keys() - before.keys())),
        removed=changes(sorted(before.keys() - after.keys())),
    )


def _counted(section: Section) -> str:
    names = [change.name for change in section.differing]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} of {len(names) + len(section.same)} {section.title} ({', '.join(names[:_NAMED])}{more})"
