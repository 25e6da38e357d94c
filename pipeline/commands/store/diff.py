"""`nxpipe store diff`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli import Command
from pipeline.nearness import difference_table, differences_as_json
from pipeline.options import config_option, store_option
from pipeline.output import Console, human_bytes, table
from pipeline.store_url import open_the_store

if TYPE_CHECKING:
    from artifact_store import Store
    from artifact_store.difference import ManifestDifference, Part, Section
    from artifact_store.documents import Blob
    from artifact_store.index.leaves import Difference
    from artifact_store.manifest import Manifest


@click.command(cls=Command)
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@store_option
@config_option
@click.pass_obj
def diff(console: Console, before: str, after: str, store: str | None, config_path: Path) -> None:
    """Compare two artifacts: key inputs, programs, weights, files, report.

    A and B are names as `nxpipe store show` takes them, or digests of manifests, such as the two that a report of
    non-reproducible output names.

    \b
    Example:
      nxpipe store diff bert-base-uncased@4e9ce0 bert-base-uncased@a41f07
    """
    from artifact_store.difference import ManifestDifference
    from artifact_store.index.leaves import differences

    opened = open_the_store(store, config_path, console)
    old, new = (_manifest(opened, name) for name in (before, after))
    asked = differences(opened.key_inputs(old), opened.key_inputs(new))
    found = ManifestDifference.between(old, new)
    if console.json:
        console.data(_as_json(asked, found))
    else:
        console.result("\n\n".join(_page(asked, found)) or "no difference")


def _manifest(store: "Store", name: str) -> "Manifest":
    """By the name of an artifact, else by the manifest's own digest."""
    from artifact_store.errors import NotFound

    try:
        return store.resolve(name).manifest
    except NotFound:
        found = _by_digest(store, name)
        if found is None:
            raise
        return found


def _by_digest(store: "Store", digest: str) -> "Manifest | None":
    """Whether or not a record names it."""
    from artifact_store.documents import Blob
    from artifact_store.layout import digest_path, is_key
    from artifact_store.manifest import MAX_MANIFEST_BYTES, Manifest
    from artifact_store.verified import read_at_most

    stat = store.backend.stat(digest_path(digest)) if is_key(digest) else None
    if stat is None:
        return None
    return Manifest.from_bytes(
        read_at_most(MAX_MANIFEST_BYTES, store.blobs.chunks(Blob(sha256=digest, size=stat.size)))
    )


def _page(asked: "Sequence[Difference]", found: "ManifestDifference") -> Iterator[str]:
    for title, fields in (("key inputs", asked), ("identity", found.identity)):
        if fields:
            yield f"{click.style(title, bold=True)}\n{difference_table(fields, 'A', 'B')}"
    for section in found.sections:
        if section.differing:
            yield f"{click.style(section.title, bold=True)}: {_counts(section)}\n{_parts(section)}"
    if found.report:
        yield f"{click.style('report', bold=True)}\n{difference_table(found.report, 'A', 'B')}"


def _counts(section: "Section") -> str:
    counted = (
        (section.changed, "changed"),
        (section.added, "added"),
        (section.removed, "removed"),
        (section.same, "the same"),
    )
    return ", ".join(f"{len(parts)} {word} ({_bytes(parts)})" for parts, word in counted if parts)


def _bytes(parts: "Sequence[Part]") -> str:
    """What is new in B, or in A where B has nothing."""
    return human_bytes(sum(blob.size for part in parts if (blob := part.after or part.before)))


def _parts(section: "Section") -> str:
    return table(("name", "A", "B"), [(part.name, _blob(part.before), _blob(part.after)) for part in section.differing])


def _blob(blob: "Blob | None") -> str:
    return f"{blob.sha256[:12]} {human_bytes(blob.size)}" if blob else "-"


def _as_json(asked: "Sequence[Difference]", found: "ManifestDifference") -> dict[str, object]:
    return {
        "key_inputs": differences_as_json(asked, "a", "b"),
        "identity": differences_as_json(found.identity, "a", "b"),
        **{section.title: _section_as_json(section) for section in found.sections},
        "report": differences_as_json(found.report, "a", "b"),
    }


def _section_as_json(section: "Section") -> dict[str, object]:
    return {
        "same": len(section.same),
        "same_bytes": sum(part.after.size for part in section.same if part.after),
        "changed": [_part_as_json(part) for part in section.changed],
        "added": [_part_as_json(part) for part in section.added],
        "removed": [_part_as_json(part) for part in section.removed],
    }


def _part_as_json(part: "Part") -> dict[str, object]:
    sides = {"a": part.before, "b": part.after}
    return {"name": part.name} | {side: blob.model_dump() for side, blob in sides.items() if blob}
