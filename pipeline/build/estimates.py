"""Estimates of a cell's work, memory and time. They decide the order and the number of jobs at once, never a result.

Work and memory follow from the model's configuration alone, in microseconds; time from what earlier builds on this
machine took.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.shapes import Shape
from nxpipe.pipeline.models.versions import digest_of
from nxpipe.pipeline.util.files import MiB, json_of, read_file, write_whole

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


def cell_work(request: BuildSpec, shape: Shape) -> float:
    """Multiply-adds of one run, plus the fixed cost."""
    tokens = shape.batch * (1 if shape.phase == "decode" else shape.sequence)
    hidden = _first(request.source.config, "hidden_size", "d_model", "n_embd", "dim")
    attention = tokens * shape.sequence * hidden
    return _BASE + (parameters_of(request.source.config) + attention / max(tokens, 1)) * tokens


def worker_memory(request: BuildSpec) -> int:
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


def timing_key(request: BuildSpec, shape: Shape) -> str:
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
