"""Training plans against published training: `python benchmarks/training_rows.py CSV [--json]`.

Each scored row of a decoder with its published layout: whether it is found to fit, and the predicted tokens a second
with constants, and a share of own work, that have not seen the row's model. The last line is the share over all rows,
which `pipeline/plan/training.py` has as OWN_WORK.
"""

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from nxpipe.pipeline.plan.training import (
    OWN_WORK,
    TrainingCandidate,
    TrainingClock,
    TrainingJob,
    TrainingStep,
    candidate,
    configuration,
    instance_of,
)
from nxpipe.pipeline.plan.training_memory import Precision, TrainingLayout, rank_bytes
from nxpipe.pipeline.predict.architectures import architecture
from nxpipe.pipeline.predict.constants import predict
from nxpipe.pipeline.predict.fit import select
from nxpipe.pipeline.predict.measurements import Configuration, Measured, read


@dataclass(frozen=True)
class Row:
    """A published row, its plan with the shipped constants, and the seconds of a sequence that others predict."""

    id: str
    name: str
    measured: float  # seconds of a step
    planned: TrainingCandidate
    clock: TrainingClock
    seen: float  # whole seconds of a sequence on one core by the shipped constants
    unseen: float  # and by constants that have not seen the model

    def share(self, whole: float) -> float:
        """What the other terms leave of the measured step, over the predicted time of a whole sequence."""
        step = self._step(whole)
        slots = 1 + step.bubble / (step.seconds - step.bubble - step.gradients - step.optimizer)
        rest = (self.measured - step.gradients - step.optimizer) / slots
        return (rest - step.tensor - step.pipeline - step.executions) / (step.compute + step.recompute)

    def predicted(self, share: float) -> float:
        """Seconds of a step for a share that was found on other models."""
        return self._step(share * self.unseen).seconds

    def _step(self, sequence: float) -> TrainingStep:
        return replace(self.clock, sequence=sequence).step(self.planned.count, self.planned.layout)


def rows_of(path: Path, others: Sequence[Path]) -> list[Row]:
    """The scored rows of decoders."""
    measured = read(path)
    selection = select([*measured, *(row for other in others for row in read(other))])
    problem = selection.problem()
    logs = problem.left_out([row.configuration.model for row, _ in selection.rows], problem.fit())
    left_out = {row.id: float(log) for (row, _), log in zip(selection.rows, logs, strict=True)}
    with path.open(encoding="utf-8-sig") as lines:
        batches = {row["id"]: row["global_batch"] for row in csv.DictReader(lines)}
    chosen = [row for row in measured if row.scored and row.configuration.family == "training"]
    return [
        _row(row, int(batches[row.id]), math.exp(left_out[row.id]))
        for row in chosen
        if row.configuration.sequence and row.id in left_out
    ]


def _row(row: Measured, sequences: int, unseen: float) -> Row:
    c: Configuration = row.configuration
    found = architecture(c.published_name, c.model)
    assert found is not None
    assert row.cycle is not None
    assert c.sequence is not None
    precision = Precision.BF16_SR if "sr" in c.model_dtype else Precision.MIXED
    job = TrainingJob(c.model, found, c.sequence, sequences, precision, flash=False)
    clock = TrainingClock.of(job, instance_of(c.instance))
    layout = TrainingLayout(
        tp=c.tp, pp=c.pp, dp=c.dp, micro=c.batch, sequences=sequences, precision=precision, flash=False
    )
    # The error of the row with constants that have not seen its model, applied to what they predict.
    whole = row.cycle * unseen * c.cores
    seen = predict(configuration(job, clock.instance), architecture=found).seconds
    return Row(row.id, c.published_name, sequences * row.cycle, candidate(clock, c.nodes, layout), clock, seen, whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--with", dest="others", type=Path, action="append", default=[], metavar="CSV")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = rows_of(arguments.csv, arguments.others)
    models = {row.name for row in rows}
    shares = {name: median(row.share(row.unseen) for row in rows if row.name != name) for name in models}
    lines = []
    for row in rows:
        seconds = row.predicted(shares[row.name])
        error = row.measured / seconds - 1  # of tokens a second
        held, available = row.planned.memory.total / 2**30, rank_bytes(row.planned.instance) / 2**30
        lines.append(
            {
                "id": row.id,
                "name": row.name,
                "layout": str(row.planned.layout),
                "instances": row.planned.count,
                "gib": round(held, 2),
                "fits": held <= available,
                "measured_s": round(row.measured, 2),
                "predicted_s": round(seconds, 2),
                "error": round(error, 4),
                "share": round(row.share(row.seen), 3),
                "seen_error": round(row.measured / row.planned.step.seconds - 1, 4),
            }
        )
    errors = [abs(float(str(line["error"]))) for line in lines]
    factor = rows[0].clock.factor
    inside = sum(1 / factor <= 1 + float(str(line["error"])) <= factor for line in lines)
    result = {
        "rows": lines,
        "median_error": round(median(errors), 4),
        "worst_error": max(errors),
        "inside_interval": inside / len(lines),
        "fit": sum(bool(line["fits"]) for line in lines),
        "own_work": round(median(row.share(row.seen) for row in rows), 3),
        "shipped_own_work": OWN_WORK,
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    for line in lines:
        print("  ".join(f"{value}" for value in line.values()))
    print(
        f"{len(lines)} rows: median error of tokens/s {result['median_error']:.1%}, worst {result['worst_error']:.1%}, "
        f"{result['inside_interval']:.0%} inside the interval, {result['fit']} found to fit"
    )
    print(f"own work: {result['own_work']} over all rows, shipped {OWN_WORK}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
