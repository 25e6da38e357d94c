"""What became of each cell of a build; of a missing one why it is missing, and what to do about it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from nxpipe.pipeline.artifacts import utilisation
from nxpipe.pipeline.build.plan import PlannedArtifact
from nxpipe.pipeline.build.report.text import Fold, counted, duration, folds, in_general, plain
from nxpipe.pipeline.build.state import CellResult, Results
from nxpipe.pipeline.build.status import Fault, Sort
from nxpipe.pipeline.util.console import Console, human_bytes
from nxpipe.pipeline.util.escape import style
from nxpipe.pipeline.util.exit_codes import INCOMPLETE, INTERNAL, INTERRUPTED, TABLE
from nxpipe.pipeline.verify.verify import Report, sentences

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store


# `waiting`: the cell is made and kept, and its artifact lacks others.
Became: TypeAlias = Literal["found", "built", "failed", "not retried", "not tried", "waiting"]
BECAME: Final[tuple[Became, ...]] = get_args(Became)

_ROWS: Final = {row.number: row for row in TABLE}
# What the exit code advises is for one command that failed at once; these were tried, or ended by a limit of ours.
_WAYS: Final[Mapping[Sort, str]] = {
    "limit": "Allow more with `--timeout` or `--memory-limit`, or ask for a smaller program.",
    "environmental": "Mend what the message names, then run the same command again: what is there is not built again.",
}

_MEND_THE_OTHER: Final = "Mend that one and run the same command again, or run it with `--keep-going`."


@dataclass(frozen=True)
class Reason:
    """`name` is that of an exit code."""

    became: Became
    name: str
    text: str
    way_out: str


@dataclass(frozen=True)
class Lack:
    """Cells that are missing for one reason."""

    reason: Reason
    lots: list[Fold[CellResult]]

    @property
    def cells(self) -> int:
        return sum(len(lot.members) for lot in self.lots)


def became(results: Results, one: CellResult) -> Became:
    return "waiting" if one.fate == "not tried" and _is_made(results, one) else one.fate


def tallied(results: Results) -> dict[Became, int]:
    found = [became(results, one) for one in results.cells()]
    return {word: found.count(word) for word in BECAME if word in found}


def reason(results: Results, one: CellResult) -> Reason:
    """Why this one is missing."""
    if one.fault and one.fate == "not retried":
        return _not_retried(results, one.fault)
    if one.fault:
        row = _ROWS.get(one.fault.code, INTERNAL)
        return Reason("failed", row.name, plain(one.fault.message), _WAYS.get(one.fault.sort, row.way_out))
    if _is_made(results, one):
        text = "it is made and kept, but its artifact cannot be published without the others"
        return Reason("waiting", INCOMPLETE.name, text, "Mend the others; this one is not made again.")
    if results.interrupted:
        return Reason("not tried", INTERRUPTED.name, "the build was interrupted before its turn", INTERRUPTED.way_out)
    return Reason("not tried", INCOMPLETE.name, "it was not tried after another had failed", _MEND_THE_OTHER)


def _not_retried(results: Results, fault: Fault) -> Reason:
    met = f"its last attempt met: {plain(fault.message)}"
    if results.interrupted:
        text = f"the build was interrupted before another attempt was over; {met}"
        return Reason("not retried", INTERRUPTED.name, text, INTERRUPTED.way_out)
    text = f"it was not tried again after another had failed; {met}"
    return Reason("not retried", INCOMPLETE.name, text, _MEND_THE_OTHER)


def missing(results: Results) -> list[Lack]:
    """Every missing cell below its reason: what failed first, then what that kept from being built."""
    lacking = [(one, reason(results, one)) for one in results.missing()]
    texts = in_general([(why.text, one.cell.shape) for one, why in lacking])
    found: dict[Reason, list[tuple[CellResult, Reason]]] = {}
    for (one, why), text in zip(lacking, texts, strict=True):
        found.setdefault(replace(why, text=text), []).append((one, why))
    lacks = [_lack(alike, those) for alike, those in found.items()]
    return sorted(lacks, key=lambda lack: BECAME.index(lack.reason.became))


def _lack(alike: Reason, those: list[tuple[CellResult, Reason]]) -> Lack:
    """In the words of the one cell, if it is only one or all say the same."""
    said = {why for _, why in those}
    return Lack(said.pop() if len(said) == 1 else alike, _folded([one for one, _ in those]))


def _folded(cells: list[CellResult]) -> list[Fold[CellResult]]:
    def alike(one: CellResult) -> tuple[str, str, int]:
        return one.artifact.key, one.artifact.title, max(one.attempts, 1)

    return folds(cells, lambda one: one.cell.shape, alike)


def _is_made(results: Results, one: CellResult) -> bool:
    """Asked only of one that did not fail."""
    return one.cell.key in results.ended or one.cell.state == "committed"


def summary(results: Results, report: Path | None = None) -> list[str]:
    lines = [headline(results)]
    for lack in missing(results):
        lines += ["", *_missing(lack)]
    if report:
        lines += ["", f"report: {report}"]
    return lines


def headline(results: Results) -> str:
    """One sentence: is all there, and what it took."""
    if results.interrupted:
        word, colour = "interrupted", "yellow"
    else:
        word, colour = ("incomplete", "red") if results.missing() else ("complete", "green")
    took = f"{duration(results.seconds)} with the executor {results.executor}"
    return f"{style(word, fg=colour, bold=True)}: {tally(results)}; {published(results)}; {took}"


def tally(results: Results) -> str:
    counts = tallied(results)
    parts = ", ".join(f"{count:,} {word}" for word, count in counts.items())
    return f"{counted(sum(counts.values()), 'program')}: {parts or 'none was asked for'}"


def published(results: Results) -> str:
    lacking = {id(one.artifact) for one in results.missing()}
    whole = sum(id(artifact) not in lacking for artifact in results.plan.artifacts)
    return f"{whole:,} of {counted(len(results.plan.artifacts), 'artifact')} published"


def _missing(lack: Lack) -> Iterator[str]:
    why = lack.reason
    became = style(why.became, fg="red" if why.became == "failed" else "yellow")
    yield f"{became}{f' {why.name}' if why.became == 'failed' else ''}: {why.text}"
    for lot in lack.lots:
        one = lot.members[0]
        tries = f"  ({counted(one.attempts, 'attempt')})" if one.attempts > 1 else ""
        yield f"  {plain(one.artifact.title)}, {lot.name}{tries}"
    yield f"  way out: {why.way_out}"


def published_of(store: "Store", results: Results) -> dict[str, "Published"]:
    """What there is now of all that was asked for, by request key."""
    lacking = {id(one.artifact) for one in results.missing()}
    whole = [artifact.key for artifact in results.plan.artifacts if id(artifact) not in lacking]
    found = ((key, store.find(key)) for key in dict.fromkeys(whole))
    return {key: one for key, one in found if one is not None}


def show_artifacts(
    console: Console,
    published: Mapping[str, "Published"],
    figures: Mapping[str, dict[str, Any]],
    verified: Mapping[str, Report],
    results: Results,
) -> None:
    """Every artifact that there is now, and whether this run made it; programs read what is missing too."""
    documents = []
    for artifact, cells in _by_artifact(results):
        one = published.get(artifact.key)
        if one is None:
            documents.append(_shown_missing(artifact, cells))
            continue
        cached = artifact.is_published or not _made(results, artifact)
        documents.append(_as_json(one, cells, figures[artifact.key], verified[artifact.key], cached=cached))
        if not console.json:
            console.result(*_lines(one, figures[artifact.key], verified[artifact.key], cached=cached))
    if console.json:
        console.data(documents)


def show_end(console: Console, results: Results, report: Path | None) -> None:
    """The one failure of a small build in a sentence; of a large one what it amounts to."""
    missing = results.missing()
    faults = list(dict.fromkeys(one.fault for one in missing if one.fault))
    if console.verbose:
        for fault in faults:
            console.trace(fault.log)
    if results.left_behind:
        console.complain(results.left_behind)
    if results.interrupted:
        console.say("Interrupted; what was committed is kept, and `nxpipe build --resume` goes on from there.")
    elif len(faults) == 1 and len(results.cells()) == 1:
        console.complain(faults[0].message)
    elif missing:
        console.complain(*summary(results, report))
    elif results.attempts and len(results.cells()) > 1:
        console.say(*summary(results, report))


def _by_artifact(results: Results) -> list[tuple[PlannedArtifact, list[CellResult]]]:
    found: dict[int, tuple[PlannedArtifact, list[CellResult]]] = {}
    for one in results.cells():
        found.setdefault(id(one.artifact), (one.artifact, []))[1].append(one)
    return list(found.values())


def _made(results: Results, artifact: PlannedArtifact) -> bool:
    ended = results.ended.get(artifact.key)
    return ended is not None and not ended.cached


def _lines(published: "Published", programs: dict[str, Any], verified: Report, *, cached: bool) -> list[str]:
    manifest = published.manifest
    count = len(manifest.executables)
    headline = (
        "cached" if cached else "built",
        published.name,
        published.target,
        f"{count} program{'s' if count > 1 else ''}",
        human_bytes(published.size_bytes),
    )
    parts = [*sentences(verified), *(f"{name}: {line}" for name, line in utilisation.sentences(programs))]
    return ["  ".join(headline), *(f"  {text}" for text in parts)]


def _as_json(
    published: "Published", cells: list[CellResult], programs: dict[str, Any], verified: Report, *, cached: bool
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
        "cells": [_cell(one) for one in cells],
    }


def _shown_missing(artifact: PlannedArtifact, cells: list[CellResult]) -> dict[str, object]:
    return {
        "model": artifact.asked.name or artifact.asked.order.model_id,
        "request_key": artifact.key or None,
        "cache": "missing",
        "target": artifact.asked.order.target,
        "cells": [_cell(one) for one in cells],
    }


def _cell(one: CellResult) -> dict[str, object]:
    document = {"program": one.cell.shape.name, "fate": one.fate, "attempts": one.attempts, "seconds": one.seconds}
    if one.fault is None:
        return document
    return document | {"fault": {"kind": one.fault.kind, "message": one.fault.message, "exit_code": one.fault.code}}
