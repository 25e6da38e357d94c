"""Writes docs/results/mutations.md: the detection of small changes to emitted programs, and reasons for missed ones.

    python benchmarks/mutate.py [--each N] [--seed N]

N mutants of each kind, or all if there are fewer. Fails if a mutant is missed without an explanation.
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
        print(f"missed without an explanation: {verdict.mutant}", file=sys.stderr)
    return int(bool(unexplained))


def page(verdicts: Sequence[Verdict], each: int, seed: int) -> Iterator[str]:
    caught = sum(verdict.judge is not None for verdict in verdicts)
    same = sum(bool(verdict.proof) for verdict in verdicts)
    total, others = len(verdicts), len(verdicts) - same
    yield "# Mutations\n"
    yield "Mutation testing of the emulator: the share of programs with one small error that it detects. Each mutant"
    yield "is a program that `emulator.lower` emitted, with one change. If the change is not one of waits, order or"
    yield "queues, the waits of half of the mutants are inserted again, which simulates an error in the lowering; the"
    yield "other half simulates damage to the emitted program."
    yield f"`benchmarks/mutate.py --each {each} --seed {seed}` wrote this page on {date.today().isoformat()}.\n"
    yield f"**{total} mutants, {caught} detected: {_share(caught, total)}.** Of the rest, {same} are proved equivalent"
    yield "to the original program, in every order of engines and on every input, so that no test can detect them."
    yield f"**Of the {others} others, {_share(caught, others)} are detected.**\n"
    yield from _judges()
    yield from _by_kind(verdicts)
    yield from _equal(verdicts)
    yield from _missed(verdicts)
    yield from _waits()


def _judges() -> Iterator[str]:
    yield "## Judges\n"
    yield "The judges run in this order; the first that reports a fault detects the mutant.\n"
    yield "- **Validator**: `emulator.isa.legality`, which does not run the program."
    yield "- **Hostile memory**: reads of unwritten bytes, accesses out of bounds, sums not begun, deadlocks."
    yield "- **Race check**: two accesses that no wait orders. A memory fault may end a run first."
    yield "- **Outputs**: all outputs and states of every rank, compared with `emulator.run.fast` within the tolerance"
    yield "  of sums in another order. Four samples of inputs and weights, the hostile order and two random orders;"
    yield "  also out-of-range indices, which must be rejected.\n"
    yield "Programs: " + ", ".join(f"`{sample.name}` ({sample.core})" for sample, _ in samples()) + ".\n"


def _by_kind(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "## By kind\n"
    yield (
        "| Change | Mutants | "
        + " | ".join(judge.capitalize() for judge in Judge)
        + " | Detected | Proved equivalent | Missed |"
    )
    yield "| --- |" + " ---: |" * (len(Judge) + 4)
    for kind in (*KINDS, "all"):
        alike = [verdict for verdict in verdicts if kind in (verdict.mutant.kind, "all")]
        by = Counter(verdict.judge for verdict in alike)
        same, missed = (
            sum(map(bool, entry)) for entry in zip(*((it.proof, it.is_missed) for it in alike), strict=True)
        )
        numbers = " | ".join(str(by[judge]) for judge in Judge)
        share = _share(by.total() - by[None], by.total())
        yield f"| {kind} | {by.total()} | {numbers} | {share} | {same} | {missed} |"
    yield ""


def _equal(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "## Proved equivalent\n"
    yield "A proof (`tests/mutation/proofs.py`) executes the program symbolically, independently of the emulated core"
    yield "and its race check: every two conflicting accesses are ordered, and every output byte has the same"
    yield "expression as in the original program.\n"
    reasons = Counter((verdict.proof, verdict.mutant.kind) for verdict in verdicts if verdict.proof)
    yield from ("| Reason | Change | Mutants |", "| --- | --- | ---: |")
    yield from (f"| {why} | {kind} | {count} |" for (why, kind), count in sorted(reasons.items()))
    yield ""


def _missed(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "## Missed\n"
    missed = [verdict.mutant for verdict in verdicts if verdict.is_missed]
    if not missed:
        yield "None.\n"
        return
    yield from ("| Mutant | Reason |", "| --- | --- |")
    yield from (f"| {mutant} | {explanation(mutant) or 'unknown'} |" for mutant in missed)
    yield ""


def _waits() -> Iterator[str]:
    yield "## Redundant waits\n"
    yield "A wait is redundant if another wait of the instruction implies it, because the awaited engine has already"
    yield "waited for the same instruction. `eliminate_redundant_waits` removes such waits; the table counts those that"
    yield "remain, by execution of all iterations of all loops.\n"
    yield from ("| Program | Waits | Redundant |", "| --- | ---: | ---: |")
    for sample, program in samples():
        total = sum(len(instruction.waits) for instruction in instructions(program.body))
        yield f"| `{sample.name}` | {total} | {sum(map(len, redundant(program).values()))} |"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


if __name__ == "__main__":
    sys.exit(main())
