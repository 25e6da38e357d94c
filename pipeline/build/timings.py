"""How long cells have taken on this machine, for estimates: a file beside the local state, that may go at any time."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from nxpipe.pipeline.request import BuildRequest, Shape, digest_of
from nxpipe.pipeline.util.files import MiB, json_of, read_file, write_whole

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
