"""Writes docs/results/mutations.md: who notices small changes to emitted programs, and which of them nobody notices,
and why.

    python benchmarks/mutate.py [--each N] [--seed N]

N mutants of each kind, or all that there are. Fails if one that is not explained goes unnoticed.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from nxpipe.emulator.isa.program import instructions
from tests.mutation.changes import KINDS, drawn
from tests.mutation.explained import explanation
from tests.mutation.judges import Judge, Verdict, judged
from tests.mutation.redundant import redundant
from tests.mutation.samples import samples

PAGE = Path(__file__).parent.parent / "docs" / "results" / "mutations.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=50, help="mutants of each kind")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    verdicts = [judged(mutant) for mutant in drawn(args.each, args.seed)]
    PAGE.write_text("\n".join(page(verdicts, args.each, args.seed)) + "\n")
    unexplained = [verdict for verdict in verdicts if verdict.is_missed and not explanation(verdict.mutant)]
    for verdict in unexplained:
        print(f"nobody notices, and nobody knows why: {verdict.mutant}", file=sys.stderr)
    return int(bool(unexplained))


def page(verdicts: Sequence[Verdict], each: int, seed: int) -> Iterator[str]:
    caught = sum(verdict.judge is not None for verdict in verdicts)
    same = sum(bool(verdict.proof) for verdict in verdicts)
    total, others = len(verdicts), len(verdicts) - same
    yield "# Mutations\n"
    yield "What becomes of programs with one small mistake. Each mutant is a program that `emulator.lower` emitted,"
    yield "changed in one place. Where the change is not one of waits, order or queues, half of the mutants have their"
    yield "waits made anew, as if the lowering itself had been wrong; the others are as if the program had been damaged"
    yield "afterwards."
    yield f"`benchmarks/mutate.py --each {each} --seed {seed}` wrote this page on {date.today().isoformat()}.\n"
    yield f"**{total} mutants, {caught} caught: {_share(caught, total)}.** Of the rest, {same} are proved to compute"
    yield "the same as the program that they were made of, in every order of engines and on every input, so that nobody"
    yield f"could notice them. **Of the {others} others {_share(caught, others)} are caught.**\n"
    yield from _judges()
    yield from _by_kind(verdicts)
    yield from _equal(verdicts)
    yield from _missed(verdicts)
    yield from _waits()


def _judges() -> Iterator[str]:
    yield "## Judges\n"
    yield "Asked in this order; the first that objects has caught it.\n"
    yield "- **Validator**: `emulator.isa.legality`, which does not run the program."
    yield "- **Hostile memory**: reads of unwritten bytes, accesses out of bounds, sums not begun, deadlocks."
    yield "- **Race check**: two accesses that no wait orders. A memory fault may end a run first."
    yield "- **Outputs**: all outputs and states of every rank beside `emulator.fast`, within what sums in another"
    yield "  order may differ by. Four draws of inputs and weights, the hostile order and two random ones; and indices"
    yield "  that no table has, which are to be refused.\n"
    yield "Programs: " + ", ".join(f"`{sample.name}` ({sample.core})" for sample, _ in samples()) + ".\n"


def _by_kind(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "## By kind\n"
    yield (
        "| Change | Mutants | "
        + " | ".join(judge.capitalize() for judge in Judge)
        + " | Caught | Proved the same | Missed |"
    )
    yield "| --- |" + " ---: |" * (len(Judge) + 4)
    for kind in (*KINDS, "all"):
        alike = [verdict for verdict in verdicts if kind in (verdict.mutant.kind, "all")]
        by = Counter(verdict.judge for verdict in alike)
        same, missed = (sum(map(bool, each)) for each in zip(*((it.proof, it.is_missed) for it in alike), strict=True))
        numbers = " | ".join(str(by[judge]) for judge in Judge)
        share = _share(by.total() - by[None], by.total())
        yield f"| {kind} | {by.total()} | {numbers} | {share} | {same} | {missed} |"
    yield ""


def _equal(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "## Proved to be the same\n"
    yield "A proof (`tests/mutation/proofs.py`) follows each byte through the program by name instead of value, apart"
    yield "from the emulated core and its race check: every two accesses that meet are in order, and every output byte"
    yield "comes about as it did before.\n"
    reasons = Counter((verdict.proof, verdict.mutant.kind) for verdict in verdicts if verdict.proof)
    yield from ("| Why | Change | Mutants |", "| --- | --- | ---: |")
    yield from (f"| {why} | {kind} | {count} |" for (why, kind), count in sorted(reasons.items()))
    yield ""


def _missed(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "## Missed\n"
    missed = [verdict.mutant for verdict in verdicts if verdict.is_missed]
    if not missed:
        yield "None.\n"
        return
    yield from ("| Mutant | Why nobody notices |", "| --- | --- |")
    yield from (f"| {mutant} | {explanation(mutant) or 'not known'} |" for mutant in missed)
    yield ""


def _waits() -> Iterator[str]:
    yield "## Waits that others imply\n"
    yield "Where whoever is waited for has itself waited for another, waiting for that one too says nothing new."
    yield "`eliminate_redundant_waits` removes such waits;"
    yield "carrying out all iterations of all loops finds what it overlooks.\n"
    yield from ("| Program | Waits | Implied by others |", "| --- | ---: | ---: |")
    for sample, program in samples():
        total = sum(len(each.waits) for each in instructions(program.body))
        yield f"| `{sample.name}` | {total} | {sum(map(len, redundant(program).values()))} |"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


if __name__ == "__main__":
    sys.exit(main())
