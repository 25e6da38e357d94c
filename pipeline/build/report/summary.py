"""Summary of a build: published artifacts, missing cells with reason and remedy; and texts of all views.

Cells that share a status are one group with one name: `forward-b{1,4}-s{128,256,512}` are six programs.
"""

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from nxpipe.pipeline.build.jobs import REPORT_WORDS, RESULT_WORDS, CellStatus, Failure, FailureClass
from nxpipe.pipeline.build.report.program_table import program_table
from nxpipe.pipeline.build.state import ArtifactResult, CellResult, Results
from nxpipe.pipeline.compile import artifact_files
from nxpipe.pipeline.models.configuration import SAVED_PROGRAM, Shape
from nxpipe.pipeline.models.thresholds import Report
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.exit_codes import INCOMPLETE, INTERNAL, INTERRUPTED, TABLE, row_of
from nxpipe.pipeline.util.text import human_bytes, plain, style

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.manifest import Manifest


def duration(seconds: float) -> str:
    """0.4 s, 41 s, 3:07 min, 1:02:09 h."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60}:{rounded % 60:02} min"
    return f"{rounded // 3600}:{rounded // 60 % 60:02}:{rounded % 60:02} h"


def clock(seconds: float) -> str:
    """A duration in a column: 0:41, 1:02:09."""
    total = int(seconds)
    hours = f"{total // 3600}:{total // 60 % 60:02}" if total >= 3600 else str(total // 60)
    return f"{hours}:{total % 60:02}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


T = TypeVar("T")
AWS_COMPILER: Final = "aws_compiler"  # in the figures of a program: the time of AWS's compiler
EXECUTION: Final = "this_program"  # and that of this program with the host and collectives
_RANGE: Final = 4  # least count of numbers in equal steps that is written as a range


@dataclass(frozen=True)
class BraceGroup(Generic[T]):
    name: str
    members: tuple[T, ...]


def brace_groups(
    items: Iterable[T], shape: Callable[[T], Shape], alike: Callable[[T], Hashable]
) -> list[BraceGroup[T]]:
    """Groups of items that are alike and of one phase, each a full grid of batches and buckets, in the order of the
    items."""
    groups: dict[Hashable, dict[int, list[T]]] = {}
    for item in items:
        item_shape = shape(item)
        groups.setdefault((alike(item), item_shape.phase), {}).setdefault(item_shape.batch, []).append(item)
    return [group for batches in groups.values() for group in _grids(batches, shape)]


def generalize(reasons: Sequence[tuple[str, Shape]]) -> list[str]:
    """Reasons with N in place of their cell's bucket, so that equal ones can be grouped.

    A text that several buckets share does not contain a bucket: such a number in it has another meaning.
    """
    buckets: dict[str, set[int]] = {}
    for text, shape in reasons:
        buckets.setdefault(text, set()).add(shape.sequence)
    return [text if len(buckets[text]) > 1 else _without(shape.sequence, text) for text, shape in reasons]


def _without(number: int, text: str) -> str:
    return re.sub(rf"(?<!\d)(?<!\d\.){number}(?!\.?\d)", "N", text)


def _grids(batches: dict[int, list[T]], shape: Callable[[T], Shape]) -> Iterable[BraceGroup[T]]:
    """One group for all batches with the same buckets."""
    grids: dict[tuple[int, ...], list[int]] = {}
    for batch, items in batches.items():
        grids.setdefault(tuple(sorted(shape(item).sequence for item in items)), []).append(batch)
    for sequences, shared in grids.items():
        members = tuple(item for batch in shared for item in batches[batch])
        yield BraceGroup(_name(shape(members[0]).phase, sorted(shared), sequences), members)


def _name(phase: str, batches: Sequence[int], sequences: Sequence[int]) -> str:
    return phase if phase == SAVED_PROGRAM else f"{phase}-b{_braced(batches)}-s{_braced(sequences)}"


def _braced(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    if len(numbers) < _RANGE or len(steps) > 1:
        return f"{{{','.join(map(str, numbers))}}}"
    step = "" if steps == {1} else f"..{steps.pop()}"
    return f"{{{numbers[0]}..{numbers[-1]}{step}}}"


_ROWS: Final = {row.number: row for row in TABLE}
# In place of the remedy of an exit code, which is for a command: these jobs were retried, or exceeded a limit of a job.
_REMEDIES: Final[Mapping[FailureClass, str]] = {
    FailureClass.LIMIT: "Allow more with `--timeout` or `--memory-limit`, or build a smaller program.",
    FailureClass.RETRYABLE: "Fix the cause that the message names, then run the same command again: cells in the "
    "store are not built again.",
}
_FIX_THE_FAILED: Final = "Fix the failed cell and run the same command again, or run it with `--keep-going`."


@dataclass(frozen=True)
class Reason:
    """The reason why a cell is missing. `name` is that of an exit code."""

    status: CellStatus
    name: str
    text: str
    remedy: str


@dataclass(frozen=True)
class MissingGroup:
    """Cells that are missing for the same reason."""

    reason: Reason
    groups: list[BraceGroup[CellResult]]

    @property
    def cells(self) -> int:
        return sum(len(group.members) for group in self.groups)


def status_counts(results: Results) -> dict[CellStatus, int]:
    statuses = [cell.status for cell in results.cells()]
    return {status: statuses.count(status) for status in REPORT_WORDS if status in statuses}


def reason(results: Results, result: CellResult) -> Reason:
    """The reason why this cell is missing."""
    status = result.status
    if result.failure and status is CellStatus.RETRYING:
        return _not_retried(results, result.failure)
    if result.failure:
        row = _ROWS.get(result.failure.code, INTERNAL)
        remedy = _REMEDIES.get(result.failure.failure_class, row.remedy)
        return Reason(status, row.name, plain(result.failure.message), remedy)
    if status is CellStatus.BLOCKED:
        text = "it is built and in the store, but its artifact cannot be published without its other cells"
        return Reason(status, INCOMPLETE.name, text, "Fix the other cells; this one is not built again.")
    if results.interrupted:
        return Reason(status, INTERRUPTED.name, "the build was interrupted before the job started", INTERRUPTED.remedy)
    return Reason(status, INCOMPLETE.name, "not started after another cell had failed", _FIX_THE_FAILED)


def _not_retried(results: Results, failure: Failure) -> Reason:
    last = f"its last attempt failed: {plain(failure.message)}"
    if results.interrupted:
        text = f"the build was interrupted before the next attempt ended; {last}"
        return Reason(CellStatus.RETRYING, INTERRUPTED.name, text, INTERRUPTED.remedy)
    text = f"not retried after another cell had failed; {last}"
    return Reason(CellStatus.RETRYING, INCOMPLETE.name, text, _FIX_THE_FAILED)


def missing_groups(results: Results) -> list[MissingGroup]:
    """Missing cells by reason: failures first, then the cells that were not built because of them."""
    missing = [(result, reason(results, result)) for result in results.missing()]
    texts = generalize([(why.text, result.cell.shape) for result, why in missing])
    by_reason: dict[Reason, list[tuple[CellResult, Reason]]] = {}
    for (result, why), text in zip(missing, texts, strict=True):
        by_reason.setdefault(replace(why, text=text), []).append((result, why))
    order = list(REPORT_WORDS)
    groups = [_group(general, members) for general, members in by_reason.items()]
    return sorted(groups, key=lambda group: order.index(group.reason.status))


def _group(general: Reason, members: list[tuple[CellResult, Reason]]) -> MissingGroup:
    """A group with the reason of its cells if all have the same, else with the general one."""
    reasons = {why for _, why in members}
    return MissingGroup(reasons.pop() if len(reasons) == 1 else general, _grouped([result for result, _ in members]))


def _grouped(cells: list[CellResult]) -> list[BraceGroup[CellResult]]:
    def alike(result: CellResult) -> tuple[str, str, int]:
        return result.artifact.key, result.artifact.title, max(result.attempts, 1)

    return brace_groups(cells, lambda result: result.cell.shape, alike)


def summary(results: Results, report: Path | None = None) -> list[str]:
    lines = [headline(results)]
    for group in missing_groups(results):
        lines += ["", *_missing(group)]
    if report:
        lines += ["", f"report: {report}"]
    return lines


def headline(results: Results) -> str:
    """Verdict, counts and time in one line."""
    if results.interrupted:
        word, colour = "interrupted", "yellow"
    else:
        word, colour = ("incomplete", "red") if results.missing() else ("complete", "green")
    time = f"{duration(results.seconds)} with the executor {results.executor}"
    return f"{style(word, fg=colour, bold=True)}: {tally(results)}; {published(results)}; {time}"


def tally(results: Results) -> str:
    counts = status_counts(results)
    parts = ", ".join(f"{count:,} {status.value}" for status, count in counts.items())
    return f"{counted(sum(counts.values()), 'program')}: {parts or 'nothing to build'}"


def published(results: Results) -> str:
    count = sum(artifact.is_published for artifact in results.artifacts())
    return f"{count:,} of {counted(len(results.plan.artifacts), 'artifact')} published"


def _missing(group: MissingGroup) -> Iterator[str]:
    why, is_failure = group.reason, group.reason.status is CellStatus.FAILED
    status = style(why.status.value, fg="red" if is_failure else "yellow")
    yield f"{status}{f' {why.name}' if is_failure else ''}: {why.text}"
    for cells in group.groups:
        first = cells.members[0]
        attempts = f"  ({counted(first.attempts, 'attempt')})" if first.attempts > 1 else ""
        yield f"  {plain(first.artifact.title)}, {cells.name}{attempts}"
    yield f"  fix: {why.remedy}"


def published_artifacts(store: "Store", results: Results) -> dict[str, "Published"]:
    """Artifacts of the plan that are complete, by request key."""
    keys = dict.fromkeys(result.artifact.key for result in results.artifacts() if result.is_published)
    artifacts = ((key, store.find(key)) for key in keys)
    return {key: artifact for key, artifact in artifacts if artifact is not None}


def figures_of(manifest: "Manifest", store: "Store") -> dict[str, Any]:
    """The stored figures of each program, with the times of both predictions beside them."""
    from nxpipe.pipeline.predict.constants import execution_times, predict_artifact

    figures, predicted = artifact_files.read(manifest, store), predict_artifact(manifest, store)
    executions = execution_times(manifest, figures)
    return {
        program: {
            **document,
            **({EXECUTION: executions[program].document()} if program in executions else {}),
            AWS_COMPILER: predicted[program].document() | {"in_short": str(predicted[program])},
        }
        if isinstance(document, dict) and program in predicted
        else document
        for program, document in figures.items()
    }


def show_artifacts(
    console: Console,
    published: Mapping[str, "Published"],
    figures: Mapping[str, dict[str, Any]],
    verified: Mapping[str, Report],
    results: Results,
) -> None:
    """Print each published artifact, a cache hit or built, with a table of its programs; `--json` includes missing
    ones."""
    documents: list[dict[str, object]] = []
    for result in results.artifacts():
        key = result.artifact.key
        if key not in published:
            documents.append(_missing_json(result))
            continue
        cached = result.artifact.is_published or not _is_built(results, key)
        documents.append(_artifact_json(published[key], result, figures[key], verified[key], cached=cached))
        if not console.json:
            console.result(*([""] if len(documents) > 1 else []), _headline(published[key], cached=cached))
            console.page(program_table(figures[key], verified[key]))
    if console.json:
        console.data(documents)


def show_end(console: Console, results: Results, report: Path | None) -> None:
    """Print one sentence for a build of one cell, else the summary."""
    missing = results.missing()
    failures = list(dict.fromkeys(cell.failure for cell in missing if cell.failure))
    if console.verbose:
        for failure in failures:
            console.trace(failure.log)
    if results.left_behind:
        console.complain(results.left_behind)
    if results.interrupted:
        console.say("Interrupted. Committed cells stay; `nxpipe build --resume` continues.")
    elif len(failures) == 1 and len(results.cells()) == 1:
        console.complain(failures[0].message, code=row_of(results.exit_code))
    elif missing:
        console.complain(*summary(results, report), code=row_of(results.exit_code))
    elif results.state.attempts and len(results.cells()) > 1:
        console.say(*summary(results, report))


def _is_built(results: Results, key: str) -> bool:
    finished = results.state.finished.get(key)
    return finished is not None and not finished.cached


def _headline(published: "Published", *, cached: bool) -> str:
    word = style("cached", fg="cyan") if cached else style("built", fg="green")
    programs = counted(len(published.manifest.executables), "program")
    return f"{word}  {published.name}  {published.target}  {programs}  {human_bytes(published.size_bytes)}"


def _artifact_json(
    published: "Published", result: ArtifactResult, programs: dict[str, Any], verified: Report, *, cached: bool
) -> dict[str, object]:
    return {
        "model": published.model_id,
        "request_key": published.request_key,
        "manifest": published.manifest_digest,
        "cache": "hit" if cached else "miss",
        "target": published.target,
        "programs": [program.name for program in published.manifest.executables],
        "size_bytes": published.size_bytes,
        "verification": verified,
        "utilisation": programs,
        "cells": [_cell_json(cell) for cell in result.cells],
    }


def _missing_json(result: ArtifactResult) -> dict[str, object]:
    artifact = result.artifact
    return {
        "model": artifact.spec.title,
        "request_key": artifact.key or None,
        "cache": "missing",
        "target": artifact.spec.target,
        "cells": [_cell_json(cell) for cell in result.cells],
    }


def _cell_json(result: CellResult) -> dict[str, object]:
    document = {
        "program": result.cell.shape.name,
        "fate": RESULT_WORDS[result.status],
        "attempts": result.attempts,
        "seconds": result.seconds,
    }
    if result.failure is None:
        return document
    failure = {"kind": result.failure.kind, "message": result.failure.message, "exit_code": result.failure.code}
    return document | {"fault": failure}
