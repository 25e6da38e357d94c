"""How often the time left that `nxpipe rollout status` shows is right: a table for docs/guides/canary.md.

    nice -n 10 python benchmarks/rollout_forecast.py [--rollouts N] [--seed N]

Rollouts are simulated with the production judge. In every minute in which a range is shown, the actual remaining time
is compared with it. A range without a latest time (the step may end first) holds all later times.
"""

import argparse
from collections import Counter
from typing import Final

from nxpipe.pipeline.canary.judge import Decision
from nxpipe.pipeline.config import Rollout
from nxpipe.pipeline.rollout.input import plan_of
from nxpipe.pipeline.rollout.simulate import TrafficModel, foreseen

# Requests a second, error rates of the stable and of the new version.
SERVICES: Final = ((5, 0.005, 0.005), (20, 0.005, 0.005), (20, 0.001, 0.001), (50, 0.005, 0.005), (5, 0.005, 0.02))
SHOWN: Final = 0.5  # chance from which a time until a rollback is shown


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
                if decision is Decision.ADVANCE and progress.until_advance:
                    found["advance"][progress.until_advance.place_of(actual)] += 1
                elif decision is Decision.ROLL_BACK and back and back.chance >= SHOWN:
                    found["rollback"][back.place_of(actual)] += 1
        for until, counts in found.items():
            if count := counts.total():
                shares = (f"{counts[kind] / count:.0%}" for kind in ("inside", "earlier", "later", "unknown"))
                cells = (f"{rps}", f"{base:.1%}, {canary:.1%}", until, f"{count:,}", *shares)
                lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
