"""`nxpipe diff`, also `nxpipe store diff`: the differences between two artifacts."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from nxpipe.pipeline.artifacts.store_url import open_configured_store
from nxpipe.pipeline.build.explain import difference_table, differences_as_json
from nxpipe.pipeline.build.report.program_table import by_size
from nxpipe.pipeline.cli.completion import complete_channels_or_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import for_terminal, human_bytes, shown, style, table

if TYPE_CHECKING:
    from nxpipe.artifact_store.difference import EntryChange, ManifestDifference, Section
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.evidence import Evidence
    from nxpipe.artifact_store.index.leaves import Difference
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.pipeline.artifacts.difference import GraphDifference, ProgramDifference, TensorChange, TimingDifference

_LISTED: Final = 10  # weights and node kinds; --json has all


@click.command(cls=Command)
@click.argument("before", metavar="A", shell_complete=complete_channels_or_artifacts)
@click.argument("after", metavar="B", shell_complete=complete_channels_or_artifacts)
@click.option("--tensors", is_flag=True, help="Read the changed weights and report the size of each change.")
@store_option
@config_option
@click.pass_obj
def diff(console: Console, before: str, after: str, tensors: bool, store: str | None, config_path: Path) -> None:
    """Compare two artifacts: key inputs, programs, graphs, weights, files, evidence.

    A and B are artifact names as for `nxpipe store show`, channels (their artifact for the other's model and target),
    or manifest digests, as in the message of exit code 24. The change of a tensor is its largest absolute difference
    relative to its largest old value.

    \b
    Example:
      nxpipe diff bert-base-uncased@4e9ce0 bert-base-uncased@a41f07
      nxpipe diff production staging --tensors
      nxpipe store diff bert-base-uncased@4e9ce0 bert-base-uncased@a41f07
    """
    from nxpipe.artifact_store.difference import ManifestDifference
    from nxpipe.artifact_store.index.leaves import differences
    from nxpipe.pipeline.artifacts.difference import program_differences, tensor_changes, timing_differences
    from nxpipe.pipeline.artifacts.lookup import pair

    opened = open_configured_store(store, config_path, console)
    old, new = pair((before, after), opened, config_path)
    key_inputs = differences(opened.key_inputs(old), opened.key_inputs(new))
    manifests = ManifestDifference.between(old, new)
    programs = list(program_differences(old, new, opened))
    documents = [opened.evidence(manifest.digest) for manifest in (old, new)]
    reports = [_reports(manifest, each) for manifest, each in zip((old, new), documents, strict=True)]
    evidence = differences(*reports)
    timings = list(timing_differences(old, new, documents))
    changes = list(tensor_changes(old, new, _changed_weights(manifests), opened)) if tensors else None
    if console.json:
        console.data(_as_json(key_inputs, manifests, programs, changes, evidence, timings))
    else:
        common = [each for each in evidence if all(each.path.partition("[")[0] in report for report in reports)]
        sections = [*_page(key_inputs, manifests, programs, changes, common, timings), *_alone(*reports)]
        console.page("\n\n".join(sections) or "no difference")


def _reports(manifest: "Manifest", evidence: "Sequence[Evidence]") -> dict[str, object]:
    """The rounded figures of emulated evidence by program, and those of each other kind below its name."""
    from nxpipe.artifact_store.evidence import EMULATED, KINDS
    from nxpipe.pipeline.models.thresholds import report_in

    reports = {kind: report_in(manifest, evidence, kind) for kind in KINDS}
    emulated = reports.pop(EMULATED)
    return {**emulated, **{kind: report for kind, report in reports.items() if report}}


def _alone(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    """The evidence of one side only, whose figures have nothing to be compared with."""
    for side, names in (("A", before.keys() - after.keys()), ("B", after.keys() - before.keys())):
        if names:
            yield for_terminal(f"evidence of {side} only: {', '.join(sorted(names, key=by_size))}")


def _changed_weights(manifests: "ManifestDifference") -> list[str]:
    return [entry.name for section in manifests.sections if section.title == "weights" for entry in section.changed]


def _page(
    key_inputs: "Sequence[Difference]",
    manifests: "ManifestDifference",
    programs: "Sequence[ProgramDifference]",
    changes: "Sequence[TensorChange] | None",
    evidence: "Sequence[Difference]",
    timings: "Sequence[TimingDifference]",
) -> Iterator[str]:
    for title, fields in (("key inputs", key_inputs), ("identity", manifests.identity)):
        if fields:
            yield f"{_title(title)}\n{difference_table(fields, 'A', 'B')}"
    if rows := [row for program in programs for row in _figures(program)]:
        yield f"{_title('programs')}\n{table(('program', 'figure', 'A', 'B', 'change'), rows)}"
    for program in programs:
        if program.graph:
            yield "\n".join(_graph(program.name, program.graph))
    for section in manifests.sections:
        if section.differing:
            yield f"{_title(section.title)}: {_counts(section)}\n{_entry_table(section)}"
    if changes:
        yield f"{_title('tensors')}\n{table(('name', 'changed by'), [_changed(change) for change in changes])}"
    yield from _found(evidence, timings)


def _found(evidence: "Sequence[Difference]", timings: "Sequence[TimingDifference]") -> Iterator[str]:
    if evidence:
        yield f"{_title('evidence')}\n{difference_table(evidence, 'A', 'B')}"
    if timings:
        rows = [row for timing in timings for row in _durations(timing)]
        yield f"{_title('measured on devices')}\n{table(('program', 'figure', 'A', 'B', 'change'), rows)}"


def _durations(timing: "TimingDifference") -> Iterator[tuple[str, ...]]:
    for figure, (before, after) in timing.figures.items():
        change = f"{after / before - 1:+.1%}" if before and after is not None else ""
        cells = ("-" if value is None else f"{value:.3f} ms" for value in (before, after))
        yield timing.program, figure.removesuffix("_ms"), *cells, change


def _figures(program: "ProgramDifference") -> Iterator[tuple[str, ...]]:
    for figure, (before, after) in program.figures.items():
        if before != after:
            change = f"{after / before - 1:+.1%}" if before and after is not None else ""
            name = "this program" if figure == "predicted_ns" else figure.replace("_", " ")
            yield program.name, name, _value(figure, before), _value(figure, after), change


def _value(figure: str, value: float | None) -> str:
    if value is None:
        return "-"
    if figure.endswith("_ns"):
        return f"{value / 1e6:.3f} ms"
    return human_bytes(int(value)) if figure.endswith("_bytes") else f"{value:,.0f}"


def _graph(program: str, difference: "GraphDifference") -> Iterator[str]:
    rows = [
        ("nodes", *map(str, difference.nodes)),
        ("constants", *map(str, difference.constants)),
        *((name, str(old), str(new)) for name, (old, new) in difference.operators.items() if old != new),
    ]
    yield f"{_title(f'graph of {program}')}\n{table(('operator', 'A', 'B'), rows)}"
    for sign, kinds in (("-", difference.removed), ("+", difference.added)):
        by_count = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
        yield from _listed([f"{sign} {count} x {kind}" for kind, count in by_count])


def _listed(lines: Sequence[str]) -> Iterator[str]:
    yield from map(shown, lines[:_LISTED])
    if len(lines) > _LISTED:
        yield f"  and {len(lines) - _LISTED} more"


def _counts(section: "Section") -> str:
    counted = (
        (section.changed, "changed"),
        (section.added, "added"),
        (section.removed, "removed"),
        (section.same, "unchanged"),
    )
    return ", ".join(f"{len(entries)} {state} ({_bytes(entries)})" for entries, state in counted if entries)


def _bytes(entries: "Sequence[EntryChange]") -> str:
    """The size in B, or in A for a removed part."""
    return human_bytes(sum(blob.size for entry in entries if (blob := entry.after or entry.before)))


def _entry_table(section: "Section") -> str:
    rows = [(entry.name, _blob(entry.before), _blob(entry.after)) for entry in section.differing]
    lines = table(("name", "A", "B"), rows[:_LISTED])
    return f"{lines}\n  and {len(rows) - _LISTED} more" if len(rows) > _LISTED else lines


def _blob(blob: "Blob | None") -> str:
    return f"{blob.sha256[:12]} {human_bytes(blob.size)}" if blob else "-"


def _changed(change: "TensorChange") -> tuple[str, str]:
    return change.name, change.why if change.largest is None else f"{change.largest:.3g}"


def _title(text: str) -> str:
    return style(text, bold=True)


def _as_json(
    key_inputs: "Sequence[Difference]",
    manifests: "ManifestDifference",
    programs: "Sequence[ProgramDifference]",
    changes: "Sequence[TensorChange] | None",
    evidence: "Sequence[Difference]",
    timings: "Sequence[TimingDifference]",
) -> dict[str, object]:
    tensors: Mapping[str, object] = {} if changes is None else {"tensors": [change.document() for change in changes]}
    return {
        "key_inputs": differences_as_json(key_inputs, "a", "b"),
        "identity": differences_as_json(manifests.identity, "a", "b"),
        "programs": [program.document() for program in programs],
        **{section.title: _section_as_json(section) for section in manifests.sections},
        **tensors,
        "evidence": differences_as_json(evidence, "a", "b"),
        "timings": [timing.document() for timing in timings],
    }


def _section_as_json(section: "Section") -> dict[str, object]:
    return {
        "same": len(section.same),
        "same_bytes": sum(entry.after.size for entry in section.same if entry.after),
        "changed": [_entry_as_json(entry) for entry in section.changed],
        "added": [_entry_as_json(entry) for entry in section.added],
        "removed": [_entry_as_json(entry) for entry in section.removed],
    }


def _entry_as_json(entry: "EntryChange") -> dict[str, object]:
    sides = {"a": entry.before, "b": entry.after}
    return {"name": entry.name} | {side: blob.model_dump() for side, blob in sides.items() if blob}
