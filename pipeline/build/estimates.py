"""Estimates of a cell's work, memory and time. They decide the order and the number of jobs at once, never a result.

Work and memory follow from the model's configuration alone, in microseconds; time from what earlier builds on this
machine took.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from nxpipe.pipeline.build.plan import PlannedCell
from nxpipe.pipeline.request import BuildRequest, Shape, digest_of
from nxpipe.pipeline.util.documents import MiB, json_of, read_file
from nxpipe.pipeline.util.whole_file import write_whole

_ALONE: Final = 900 << 20  # bytes of a worker with its libraries and a small model, measured on two small encoders
_PER_PARAMETER: Final = 12  # bytes: fp32 weights, the emulator's rounded copy, the reference's copy
_BASE: Final = 5e9  # multiply-adds that take as long as the fixed cost of a cell: capture, passes, checks
SMALL_BUILD: Final = 4 * _BASE  # built in this process sooner than another process has imported its libraries


def parameters_of(config: Mapping[str, object]) -> int:
    """Approximate number of weights of a transformer; the parts of a composite are summed."""
    parts = (part for name, part in config.items() if name.endswith("_config"))
    inner = sum(parameters_of(part) for part in parts if isinstance(part, Mapping))
    hidden = _first(config, "hidden_size", "d_model", "n_embd", "dim")
    if not hidden:
        return inner
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers") or 1
    wide = _first(config, "intermediate_size", "d_ff", "n_inner", "ffn_dim") or 4 * hidden
    experts = _first(config, "num_local_experts", "num_experts") or 1
    vocabulary = _first(config, "vocab_size")
    return inner + vocabulary * hidden + layers * (4 * hidden * hidden + 3 * experts * hidden * wide)


def cell_work(request: BuildRequest, shape: Shape) -> float:
    """Multiply-adds of one run, plus the fixed cost."""
    tokens = shape.batch * (1 if shape.phase == "decode" else shape.sequence)
    hidden = _first(request.source.config, "hidden_size", "d_model", "n_embd", "dim")
    attention = tokens * shape.sequence * hidden
    return _BASE + (parameters_of(request.source.config) + attention / max(tokens, 1)) * tokens


def worker_memory(request: BuildRequest) -> int:
    """Bytes of a worker that builds one of its cells."""
    return _ALONE + (_PER_PARAMETER * parameters_of(request.source.config) if request.verified else 0)


def _first(config: Mapping[str, object], *names: str) -> int:
    """The first of these sizes that the configuration has; else 0."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


_KEPT: Final = 2000  # timings, the newest


class Timings:
    """Seconds by timing key, in a file that may be deleted at any time. The key ignores the compiler, for a new release
    takes about as long as the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[float]] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError):  # no file yet, or another format
            read = json_of(read_file(path, limit=4 * MiB))
            self._known = {str(name): [float(work), float(seconds)] for name, (work, seconds) in read.items()}

    @classmethod
    def kept_in(cls, state: Path) -> Self:
        return cls(state / "timings.json")

    def estimate(self, name: str, work: float) -> float | None:
        """Seconds of the last time, else a fit of the others by their work; None before the first build."""
        if name in self._known:
            return self._known[name][1]
        if not self._known:
            return None
        rate, base = _line(self._known.values())
        return max(rate * work + base, 0.1)

    def note(self, built: Mapping[str, tuple[float, float]]) -> None:
        """Record work and seconds by timing key."""
        if not built:
            return
        for name, (work, seconds) in built.items():
            self._known.pop(name, None)
            self._known[name] = [work, round(seconds, 2)]
        kept = dict(list(self._known.items())[-_KEPT:])
        with suppress(OSError):  # an estimate is not worth a failed build
            write_whole(self._path, json.dumps(kept).encode())


def timing_key(request: BuildRequest, shape: Shape) -> str:
    """Key of a cell without its compiler and its weights."""
    return digest_of(
        {
            "model": request.source.id,
            "shape": [shape.phase, shape.batch, shape.sequence],
            "target": request.target.compiler_target,
            "tp": request.tensor_parallel,
            "backend": request.backend,
            "verified": request.verified,
        }
    )


def _line(known: Iterable[list[float]]) -> tuple[float, float]:
    """Least-squares line of seconds by work (slope, offset); a constant if all have the same work."""
    points = list(known)
    middle = sum(work for work, _ in points) / len(points)
    mean = sum(seconds for _, seconds in points) / len(points)
    spread = sum((work - middle) ** 2 for work, _ in points)
    rate = sum((work - middle) * (seconds - mean) for work, seconds in points) / spread if spread else 0.0
    return max(rate, 0.0), mean - max(rate, 0.0) * middle


class TimeEstimates:
    """Time left of a build: the plan's estimates, scaled by how far they were off so far. A cell without an estimate
    counts by its work. Sums only, for a display reads this four times a second, and a plan has thousands of cells."""

    def __init__(self) -> None:
        self._waiting = 0
        self._seconds = 0.0  # of queued cells with an estimate
        self._work = 0.0  # of queued cells without one
        self._measured = [0.0, 0.0]  # estimated seconds, actual seconds
        self._rated = [0.0, 0.0]  # work, actual seconds
        self._at_once = 1

    def wait(self, cell: PlannedCell) -> None:
        self._count(cell, 1)

    def take(self, cell: PlannedCell) -> None:
        """The cell leaves the queue."""
        self._count(cell, -1)

    def measured(self, cell: PlannedCell, seconds: float) -> None:
        self._rated[0] += cell.work
        self._rated[1] += seconds
        if cell.seconds is not None:
            self._measured[0] += cell.seconds
            self._measured[1] += seconds

    def left(self, running: Sequence[tuple[PlannedCell, float]]) -> float | None:
        """`running`: cells with their elapsed seconds. None if no cell like a queued or running one was measured.

        The work is divided by the largest number of jobs seen at once; the longest running job is a lower bound.
        """
        self._at_once = max(self._at_once, len(running))
        waiting = self._of(self._seconds, self._work) if self._waiting else 0.0
        whole = [(self._of(cell.seconds or 0.0, 0.0 if cell.seconds else cell.work), had) for cell, had in running]
        rest = [max(seconds - had, 0.0) for seconds, had in whole if seconds is not None]
        if waiting is None or len(rest) < len(whole):
            return None
        return max([(waiting + sum(rest)) / self._at_once, *rest])

    def _count(self, cell: PlannedCell, sign: int) -> None:
        self._waiting += sign
        if cell.seconds is None:
            self._work += sign * cell.work
        else:
            self._seconds += sign * cell.seconds

    def _of(self, seconds: float, work: float) -> float | None:
        """Actual seconds of so many estimated seconds, and of so much work without an estimate."""
        estimated, took = self._measured
        size, lasted = self._rated
        if work and not (size and lasted):
            return None
        return seconds * (took / estimated if estimated and took else 1.0) + (work * lasted / size if work else 0.0)
