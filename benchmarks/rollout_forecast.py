"""How often the time left that `nxpipe rollout status` shows is right: a table for docs/guides/canary.md.

    nice -n 10 python benchmarks/rollout_forecast.py [--rollouts N] [--seed N]

Rollouts are simulated with the production judge. In every minute in which a range is shown, the actual remaining time
is compared with it. A range without a latest time (the step may end first) holds all later times.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.explanation import PhaseTotals, totals_after
from nxpipe.pipeline.canary.judge import Decision
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.config import Rollout
from nxpipe.pipeline.rollout.forecast import Progress, TimeLeft, progress_of
from nxpipe.pipeline.rollout.input import plan_of
from nxpipe.pipeline.rollout.simulate import SimulatedTraffic, TrafficModel, judgements

# Requests a second, error rates of the stable and of the new version.
SERVICES: Final = ((5, 0.005, 0.005), (20, 0.005, 0.005), (20, 0.001, 0.001), (50, 0.005, 0.005), (5, 0.005, 0.02))
SHOWN: Final = 0.5  # chance from which a time until a rollback is shown


def foreseen(plan: CanaryPlan, world: TrafficModel, seed: int) -> Iterator[tuple[Progress, Decision, int]]:
    """The progress in each minute of a rollout, with the end of its phase and the minutes that remained until then."""
    traffic = SimulatedTraffic(world, np.random.default_rng(seed))
    evidence, totals = Evidence(), tuple[PhaseTotals, ...]()
    phase: list[tuple[Progress, int]] = []
    for at, batch, judged in judgements(plan, traffic):
        totals = totals_after(totals, evidence, judged.evidence, [batch])
        evidence, decision = judged.evidence, judged.verdict.decision
        if decision in (Decision.CONTINUE, Decision.FROZEN):
            phase.append((progress_of(plan, evidence, totals, judged.verdict, 60 * world.rps), at.minute))
            continue
        yield from ((progress, decision, at.minute - minute) for progress, minute in phase)
        phase.clear()


def outcome_of(left: TimeLeft | None, actual: int) -> str:
    if left is None or left.earliest is None:
        return "unknown"
    if actual < left.earliest:
        return "earlier"
    return "later" if left.latest is not None and actual > left.latest else "inside"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    lines = [
        "| requests a second | errors of old, new | until | minutes | within the range | earlier | later | unknown |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for rps, base, canary in SERVICES:
        world, found = (
            TrafficModel("steady", rps, base, canary),
            {"advance": Counter[str](), "rollback": Counter[str]()},
        )
        for number in range(given.rollouts):
            for progress, decision, actual in foreseen(plan_of(Rollout()), world, given.seed + number):
                back = progress.until_rollback
                if decision is Decision.ADVANCE:
                    found["advance"][outcome_of(progress.until_advance, actual)] += 1
                elif decision is Decision.ROLL_BACK and back and back.chance >= SHOWN:
                    found["rollback"][outcome_of(back, actual)] += 1
        for until, counts in found.items():
            if count := counts.total():
                shares = (f"{counts[kind] / count:.0%}" for kind in ("inside", "earlier", "later", "unknown"))
                cells = (f"{rps}", f"{base:.1%}, {canary:.1%}", until, f"{count:,}", *shares)
                lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
