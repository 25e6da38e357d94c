"""How large a cell is beside others, and what memory it may take: from its configuration alone, in microseconds.

Rough on purpose. It decides which cell goes first and how many go at once, never what is made.
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

_ALONE: Final = 900 << 20  # bytes of a worker with its libraries and a small model, as measured on two small encoders
_PER_PARAMETER: Final = 12  # bytes: fp32 weights, the emulator's rounded copy, and the reference's
_BASE: Final = 5e9  # multiply-adds that take as long as what every cell takes: capture, passes, a program's check
LITTLE: Final = 4 * _BASE  # no more than this is done sooner here than another process has its libraries at hand


def parameters_of(config: Mapping[str, object]) -> int:
    """About how many weights a transformer of these sizes has; parts of a composite are added up."""
    parts = (part for name, part in config.items() if name.endswith("_config"))
    inner = sum(parameters_of(part) for part in parts if isinstance(part, Mapping))
    hidden = _first(config, "hidden_size", "d_model", "n_embd", "dim")
    if not hidden:
        return inner
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers") or 1
    wide = _first(config, "intermediate_size", "d_ff", "n_inner", "ffn_dim") or 4 * hidden
    experts = _first(config, "num_local_experts", "num_experts") or 1
    words = _first(config, "vocab_size")
    return inner + words * hidden + layers * (4 * hidden * hidden + 3 * experts * hidden * wide)


def work_of(request: BuildRequest, shape: Shape) -> float:
    """In multiply-adds of one run, and what no program goes without."""
    tokens = shape.batch * (1 if shape.phase == "decode" else shape.sequence)
    hidden = _first(request.source.config, "hidden_size", "d_model", "n_embd", "dim")
    attention = tokens * shape.sequence * hidden
    return _BASE + (parameters_of(request.source.config) + attention / max(tokens, 1)) * tokens


def memory_of(request: BuildRequest) -> int:
    """Bytes that a worker on one of its cells may take."""
    return _ALONE + (_PER_PARAMETER * parameters_of(request.source.config) if request.verified else 0)


def _first(config: Mapping[str, object], *names: str) -> int:
    """The first of these sizes that the configuration states."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


_KEPT: Final = 2000  # of the newest


class Timings:
    """Seconds by what was made, whatever compiler made it: a new release takes about as long as the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[float]] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError):  # none yet, or not ours
            read = json_of(read_file(path, limit=4 * MiB))
            self._known = {str(name): [float(work), float(seconds)] for name, (work, seconds) in read.items()}

    @classmethod
    def kept_in(cls, state: Path) -> Self:
        return cls(state / "timings.json")

    def estimate(self, name: str, work: float) -> float | None:
        """What it took the last time, else by how long others took for their size; None before anything was made."""
        if name in self._known:
            return self._known[name][1]
        if not self._known:
            return None
        rate, base = _line(self._known.values())
        return max(rate * work + base, 0.1)

    def note(self, made: Mapping[str, tuple[float, float]]) -> None:
        """Work and seconds of what was made just now."""
        if not made:
            return
        for name, (work, seconds) in made.items():
            self._known.pop(name, None)
            self._known[name] = [work, round(seconds, 2)]
        kept = dict(list(self._known.items())[-_KEPT:])
        with suppress(OSError):  # an estimate is worth no failed build
            write_whole(self._path, json.dumps(kept).encode())


def name_of(request: BuildRequest, shape: Shape) -> str:
    """Of a cell, but for its compiler and its weights."""
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
    """Seconds by work, as a straight line; a constant where all are of one size."""
    points = list(known)
    middle = sum(work for work, _ in points) / len(points)
    mean = sum(seconds for _, seconds in points) / len(points)
    spread = sum((work - middle) ** 2 for work, _ in points)
    rate = sum((work - middle) * (seconds - mean) for work, seconds in points) / spread if spread else 0.0
    return max(rate, 0.0), mean - max(rate, 0.0) * middle


class Estimates:
    """The plan's, corrected by how far they were off so far. What has none is held, by its size, against what was
    measured. Sums only: a plan may have many thousands of cells, and this is asked several times a second."""

    def __init__(self) -> None:
        self._waiting = 0
        self._seconds = 0.0  # of those that wait and have an estimate
        self._work = 0.0  # of those that wait and have none
        self._measured = [0.0, 0.0]  # seconds that were estimated, and those it took
        self._rated = [0.0, 0.0]  # work, and the seconds it took
        self._at_once = 1

    def wait(self, cell: PlannedCell) -> None:
        self._count(cell, 1)

    def take(self, cell: PlannedCell) -> None:
        """It waits no longer."""
        self._count(cell, -1)

    def measured(self, cell: PlannedCell, seconds: float) -> None:
        self._rated[0] += cell.work
        self._rated[1] += seconds
        if cell.seconds is not None:
            self._measured[0] += cell.seconds
            self._measured[1] += seconds

    def left(self, running: Sequence[tuple[PlannedCell, float]]) -> float | None:
        """`running`: each with the seconds it has had. None where nothing like what waits or runs was measured.

        The work is shared by as many as have been seen at it at once, and lasts as long as the longest that runs.
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
        """What so many estimated seconds, and so much work without an estimate, will really take."""
        estimated, took = self._measured
        size, lasted = self._rated
        if work and not (size and lasted):
            return None
        return seconds * (took / estimated if estimated and took else 1.0) + (work * lasted / size if work else 0.0)
