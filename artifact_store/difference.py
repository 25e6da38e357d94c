"""Differences between two manifests, section by section."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.index.leaves import Difference, differences
from nxpipe.artifact_store.manifest import Manifest

_NAMED: Final = 3  # parts that a summary names


@dataclass(frozen=True)
class EntryChange:
    """One executable, weight or file, by its content and by what the manifest says of it; None where it is absent."""

    name: str
    before: Blob | None
    after: Blob | None


@dataclass(frozen=True)
class Section:
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
                _section("weights", _weights(before), _weights(after)),
                _section("files", _files(before), _files(after)),
            ),
        )

    def in_short(self) -> str:
        """As part of a sentence; empty when nothing but the key inputs differs."""
        said = [_counted(section) for section in self.sections if section.differing]
        said += [f"the identity ({self.identity[0].path})"] if self.identity else []
        return ", ".join(said)


_Described = Mapping[str, tuple[Blob, object]]


def _identity(manifest: Manifest) -> dict[str, object]:
    return {"model": manifest.model.model_dump(), "target": manifest.target, "backend": manifest.backend}


def _executables(manifest: Manifest) -> _Described:
    return {
        one.name: (one.blob, (one.phase, one.batch, one.sequence, one.tensor_parallel, one.graph_key, one.outputs))
        for one in manifest.executables
    }


def _weights(manifest: Manifest) -> _Described:
    """By the tensors' own bytes: in which pack they lie is no difference."""
    return {one.name: (one.blob, (one.dtype, one.shape)) for one in manifest.weights}


def _files(manifest: Manifest) -> _Described:
    return {one.path: (one.blob, None) for one in manifest.files}


def _section(title: str, before: _Described, after: _Described) -> Section:
    both = sorted(before.keys() & after.keys())

    def parts(names: Iterable[str]) -> tuple[EntryChange, ...]:
        return tuple(
            EntryChange(name, *(side[name][0] if name in side else None for side in (before, after))) for name in names
        )

    return Section(
        title,
        same=parts(name for name in both if before[name] == after[name]),
        changed=parts(name for name in both if before[name] != after[name]),
        added=parts(sorted(after.keys() - before.keys())),
        removed=parts(sorted(before.keys() - after.keys())),
    )


def _counted(section: Section) -> str:
    names = [part.name for part in section.differing]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} of {len(names) + len(section.same)} {section.title} ({', '.join(names[:_NAMED])}{more})"
