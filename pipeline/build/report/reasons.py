"""What became of each cell of a build; of a missing one why it is missing, and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, get_args

from nxpipe.pipeline.build.events import Fault, Sort
from nxpipe.pipeline.build.report.folding import Fold, folds, in_general
from nxpipe.pipeline.build.report.words import plain
from nxpipe.pipeline.build.results import CellResult, Results
from nxpipe.pipeline.util.exit_codes import INCOMPLETE, INTERNAL, INTERRUPTED, TABLE

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
