"""The fit of the constants of `AWS's compiler` to published measurements, and what it left over.

Robust least squares in log space: a measurement's residual is the logarithm of predicted over measured, damped beyond
its noise (soft L1); a constant's is its distance from a prior value, so that a constant which no row determines keeps
it. Constants with `@` are deviations of one code generator or instance family from the constant before it.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from nxpipe.pipeline.predict.constants import COVERAGE, FEW, Constant, FamilyErrors, FittedConstants, FittedTable
from nxpipe.pipeline.predict.measurements import Measured, read
from nxpipe.pipeline.predict.model import Graph, graphs
from nxpipe.pipeline.predict.work import NotPredicted
from nxpipe.pipeline.util.errors import InputInvalid

Array = Any  # numpy's arrays of floats
Fitted = Callable[[int], None]  # is called with the number of fits that have ended

# The value expected before any measurement, and its spread as a factor's logarithm. Values in the unit of the term:
# multiples of a documented rate, or of the microseconds that the term counts.
PRIORS: Final[Mapping[str, tuple[float, float]]] = {
    "attention.call": (4, 0.7),
    "collective.bytes": (1.5, 0.5),
    "collective.execution": (0.9, 0.3),  # kernels.csv
    "collective.hop": (2, 1),
    "collective.latency": (1, 1),
    "collective.local": (2.6, 0.5),  # kernels.csv: 26 us each on one chip
    "collective.near": (1.5, 0.5),
    "convolution.fixed": (1.5, 0.7),
    "dma.cache": (1.5, 0.5),
    "dma.gathered": (2, 0.7),
    "dma.ragged": (2, 0.7),  # written and read
    "dma.spilled": (12, 0.7),
    "dma.weights": (1.2, 0.1),
    "experts.visit": (2, 0.5),
    "host.concealed": (0.3, 0.5),
    "host.copy": (1.7, 0.4),
    "host.execution": (1.5, 0.7),  # kernels.csv: 62 to 154 us
    "host.loop": (3, 0.4),
    "host.page": (0.6, 0.25),  # a page fault and clearing 4 KiB
    "layer.fixed": (5, 1.5),
    "overlap": (2, 0.5),
    "tensor.attention": (2, 0.5),
    "tensor.convolution": (2, 1),
    "tensor.dense": (1.5, 1),
    "tensor.experts": (5, 0.5),
    "vector.context": (4, 0.7),
    "vector.elements": (1, 1),
    "vector.flash": (1.5, 0.4),
    "vector.narrow": (0.2, 1),
    "vector.softmax": (5, 1),
}
_SPREADS: Final[Mapping[str, float]] = {  # of deviations, by what they deviate from
    "collective.bytes": 0.25,  # links of one documented rate
    "collective.hop": 0.5,
    "dma.spilled": 1.0,
    "dma.weights": 0.15,
    "host.execution": 0.7,
    "vector.softmax": 0.5,
}
_SPREAD: Final = 0.5
# Steps of training also exchange gradients and update weights, and reach 30 to 50 % of the peak on other accelerators.
_TRAINING: Final = (1.6, 0.3)
_EQUAL_CORES: Final = ("inf2", "trn1", "trn1n")  # their cores are the same; links are not
_EQUAL: Final = 0.1
_SERVER: Final = (1.0, 1.0)  # milliseconds that an HTTP server adds
SEED: Final = 20
_DRAWS: Final = 40  # of the bootstrap
_UNSCORED: Final = 0.5  # weight of the other table's latency of a scored throughput
_OLDEST: Final = (2, 16)
_OLD: Final = 0.15  # weight of a latency by an earlier SDK, whose compiler was another
_NOISE: Final = 0.07  # of one measurement: consecutive SDKs differ by 1 to 5 % in the middle


def _unwatched(_: int) -> None:
    """Progress without a display."""


def _plain(_: int) -> AbstractContextManager[Fitted]:
    return nullcontext(_unwatched)


def prior(name: str) -> tuple[float, float]:
    """The expected value of a constant and the spread of its logarithm."""
    if name.startswith("host.server"):
        return _SERVER
    if name == "tensor.dense@training":
        return _TRAINING
    base, _, deviation = name.partition("@")
    if deviation in _EQUAL_CORES and not base.startswith("collective"):
        return 1.0, _EQUAL
    return (1.0, _SPREADS.get(base, _SPREAD)) if deviation else PRIORS[base]


@dataclass(frozen=True)
class Observation:
    """The terms of a row, the seconds measured, and its weight."""

    cycle: tuple[Graph, ...]
    seconds: float
    weight: float = 1.0


@dataclass(frozen=True)
class Problem:
    """Samples as arrays: terms, the constants of each, and the graphs and rows that they belong to."""

    samples: Sequence[Observation]

    @cached_property
    def names(self) -> tuple[str, ...]:
        found = {name for _, _, term in self._terms for name in term.constants}
        return tuple(sorted(found | {"overlap"}))

    @cached_property
    def _terms(self) -> list[tuple[int, int, Any]]:
        graphs = [(row, graph) for row, sample in enumerate(self.samples) for graph in sample.cycle]
        return [(row, index, term) for index, (row, graph) in enumerate(graphs) for term in graph.terms]

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        index = {name: column for column, name in enumerate(self.names)}
        used = np.zeros((len(self._terms), len(index)))
        for line, (_, _, term) in enumerate(self._terms):
            used[line, [index[name] for name in term.constants]] = 1
        graphs = [(row, graph) for row, sample in enumerate(self.samples) for graph in sample.cycle]
        groups = ("compute", "memory", "serial")
        return {
            "used": used,
            "seconds": np.log([term.seconds for _, _, term in self._terms]),
            "graph": np.array([graph for _, graph, _ in self._terms]),
            "group": np.array([groups.index(term.group) for _, _, term in self._terms]),
            "rows": np.array([row for row, _ in graphs]),
            "times": np.array([graph.times for _, graph in graphs]),
            "floor": np.array([graph.floor for _, graph in graphs]),
            "measured": np.log([sample.seconds for sample in self.samples]),
            "weight": np.sqrt([sample.weight for sample in self.samples]),
            "prior": np.log([prior(name)[0] for name in self.names]),
            "spread": np.array([prior(name)[1] for name in self.names]),
        }

    def logs(self, theta: Array) -> tuple[Array, Array]:
        """The logarithm of the predicted seconds of each sample, and its derivatives by those of the constants."""
        a = self._arrays
        terms = np.exp(a["seconds"] + a["used"] @ theta)
        count = len(a["rows"])
        sums = np.bincount(3 * a["graph"] + a["group"], terms, minlength=3 * count).reshape(count, 3)
        both, inner = self._overlapped(theta, sums)
        graphs = both + sums[:, 2]
        above = graphs > a["floor"]
        slopes = np.column_stack([inner, np.ones(count)]) * (above * a["times"])[:, None]
        totals = np.bincount(a["rows"], np.maximum(graphs, a["floor"]) * a["times"], minlength=len(self.samples))
        weighted = (terms * slopes[a["graph"], a["group"]])[:, None] * a["used"]
        starts = np.searchsorted(a["rows"][a["graph"]], np.arange(len(self.samples)))
        derivatives = np.add.reduceat(weighted, starts, axis=0) / totals[:, None]
        step, column = 1e-6, self.names.index("overlap")
        bent = theta.copy()
        bent[column] += step
        moved = (self._overlapped(bent, sums)[0] - both) / step * above * a["times"]
        derivatives[:, column] = np.bincount(a["rows"], moved, minlength=len(self.samples)) / totals
        return np.log(totals), derivatives

    def _overlapped(self, theta: Array, sums: Array) -> tuple[Array, Array]:
        """`model.overlapped` of all graphs, and its derivatives by both activities."""
        power = math.exp(theta[self.names.index("overlap")])
        longer = np.maximum(sums[:, :2].max(axis=1), 1e-30)
        shares = sums[:, :2] / longer[:, None]
        norm = (shares**power).sum(axis=1) ** (1 / power)
        norm = np.maximum(norm, 1e-30)
        return longer * norm, (shares / norm[:, None]) ** (power - 1)

    def fit(self, rows: Array | None = None, start: Array | None = None) -> Array:
        """The logarithms of the constants that fit the samples, or those of `rows`."""
        a = self._arrays
        chosen = np.ones(len(self.samples), bool) if rows is None else rows

        def system(theta: Array) -> tuple[Array, Array]:
            logs, derivatives = self.logs(theta)
            weight = (a["weight"] / _NOISE)[chosen]
            damped, slopes = _damped((logs - a["measured"])[chosen] * weight)
            lines = np.vstack([(slopes * weight)[:, None] * derivatives[chosen], np.diag(1 / a["spread"])])
            return np.concatenate([damped, (theta - a["prior"]) / a["spread"]]), lines

        return _least_squares(system, a["prior"] if start is None else start)

    def errors(self, theta: Array) -> Array:
        """The logarithms of predicted over measured."""
        return self.logs(theta)[0] - self._arrays["measured"]

    def left_out(self, groups: Sequence[str], start: Array, fitted: Fitted = _unwatched) -> Array:
        """The errors of each group's samples with constants that were fitted to the other groups' samples."""
        labels, errors = np.array(groups), np.zeros(len(self.samples))
        for group in sorted(set(groups)):
            own = labels == group
            errors[own] = self.errors(self.fit(~own, start))[own]
            fitted(1)
        return errors

    def bootstrap(
        self, groups: Sequence[str], start: Array, *, times: int, seed: int, fitted: Fitted = _unwatched
    ) -> Array:
        """Constants fitted to groups that are drawn with replacement, one line for each draw."""
        labels, kinds = np.array(groups), sorted(set(groups))
        draws = np.random.default_rng(seed).integers(len(kinds), size=(times, len(kinds)))
        lines = []
        for draw in draws:
            counts = np.bincount(draw, minlength=len(kinds))
            weights = counts[np.searchsorted(kinds, labels)]
            drawn = Problem(
                [Observation(s.cycle, s.seconds, s.weight * w) for s, w in zip(self.samples, weights, strict=True)]
            )
            lines.append(drawn.fit(weights > 0, start))
            fitted(1)
        return np.array(lines)


_MOST_STEPS: Final = 200
_CONVERGED: Final = 1e-7  # relative decrease of the sum of squares


def _least_squares(system: Callable[[Array], tuple[Array, Array]], theta: Array) -> Array:
    """Levenberg and Marquardt's method: the parameters that minimise the squares of residuals, whose derivatives
    `system` returns too. A step that increases the sum is shortened."""
    residuals, jacobian = system(theta)
    total, damping = residuals @ residuals, 1e-3
    for _ in range(_MOST_STEPS):
        squares = jacobian.T @ jacobian
        squares[np.diag_indices_from(squares)] *= 1 + damping
        tried = theta - np.linalg.solve(squares, jacobian.T @ residuals)
        after, slopes = system(tried)
        less = after @ after
        if not less < total:
            damping *= 8
            if damping > 1e8:
                break
            continue
        theta, residuals, jacobian, damping = tried, after, slopes, damping / 4
        converged = total - less <= _CONVERGED * total
        total = less
        if converged:
            break
    return theta


def _damped(errors: Array) -> tuple[Array, Array]:
    """Residuals whose square grows linearly beyond 1, and their derivatives."""
    root = np.sqrt(1 + errors**2)
    damped = np.sign(errors) * np.sqrt(2 * (root - 1))
    steep = np.where(np.abs(errors) < 1e-6, 1.0, errors / np.where(damped == 0, 1.0, damped * root))
    return damped, steep


@dataclass(frozen=True)
class Selection:
    """Rows that a fit uses, their terms, and the numbers of the others by reason."""

    rows: tuple[tuple[Measured, tuple[Graph, ...]], ...]
    excluded: Mapping[str, int]

    @property
    def models(self) -> list[str]:
        return [row.configuration.model for row, _ in self.rows]

    def problem(self) -> Problem:
        """The rows as observations of a fit."""
        return Problem([Observation(cycle, row.cycle or 0.0, _weight(row)) for row, cycle in self.rows])


def _weight(row: Measured) -> float:
    if row.scored:
        return 1.0
    return _OLD if row.configuration.release < _OLDEST else _UNSCORED


def select(measured: Sequence[Measured]) -> Selection:
    """Rows of known architectures that are meant for figures of accuracy, and latencies of traced models."""
    chosen, excluded = [], Counter[str]()
    for row in measured:
        c = row.configuration
        if not row.scored and (c.family.startswith(("llm", "training")) or not c.metric.startswith("latency_ms")):
            excluded["not scored"] += 1
        elif row.cycle is None:
            excluded["a metric that implies no time of a program"] += 1
        else:
            try:
                chosen.append((row, graphs(c)))
            except NotPredicted as reason:
                excluded[str(reason)] += 1
    return Selection(tuple(chosen), dict(sorted(excluded.items())))


def calibrate_from(
    paths: Sequence[Path],
    *,
    date: str,
    seed: int = SEED,
    watch: Callable[[int], AbstractContextManager[Fitted]] = _plain,
) -> FittedConstants:
    """Constants fitted to tables of measurements. Equal tables, date and seed give an equal document. `watch` opens the
    progress of so many fits and returns what is called with the number of those that ended."""
    tables = {path: read(path) for path in paths}
    selection = select([row for rows in tables.values() for row in rows])
    if len(selection.rows) < FEW:
        raise InputInvalid(
            f"{', '.join(map(str, paths))}: {len(selection.rows)} rows can be fitted, and {FEW} are needed; "
            "pass tables with scored rows of models in the catalogue"
        )
    problem, models = selection.problem(), selection.models
    with watch(1 + _DRAWS + len(set(models))) as fitted:
        theta = problem.fit()
        fitted(1)
        draws = problem.bootstrap(models, theta, times=_DRAWS, seed=seed, fitted=fitted)
        errors = problem.left_out(models, theta, fitted)
    low, high = np.quantile(draws, ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2), axis=0)
    ids = {row.id for row, _ in selection.rows}
    return FittedConstants(
        date=date,
        seed=seed,
        sources=tuple(
            FittedTable(
                name=path.name,
                digest=hashlib.sha256(path.read_bytes()).hexdigest(),
                rows=sum(row.id in ids for row in rows),
            )
            for path, rows in tables.items()
        ),
        excluded=dict(selection.excluded),
        constants={
            name: Constant(value=_rounded(value), low=_rounded(min(value, below)), high=_rounded(max(value, above)))
            for name, value, below, above in zip(problem.names, theta, low, high, strict=True)
        },
        families=_families(selection, errors),
    )


def _rounded(log: float) -> float:
    return float(f"{math.exp(log):.6g}")


def _families(selection: Selection, logs: Sequence[float]) -> dict[str, FamilyErrors]:
    found: dict[str, list[tuple[str, float]]] = {"all": []}
    for (row, _), log in zip(selection.rows, logs, strict=True):
        if row.scored:
            for family in ("all", row.configuration.family):
                found.setdefault(family, []).append((row.configuration.model, float(log)))
    return {family: _family_errors(errors) for family, errors in sorted(found.items()) if errors}


def _family_errors(errors: Sequence[tuple[str, float]]) -> FamilyErrors:
    relative = sorted(abs(math.expm1(log)) for _, log in errors)
    covered = sum(
        abs(log) <= conformal([other for name, other in errors if name != model] or [log]) for model, log in errors
    )
    return FamilyErrors(
        rows=len(errors),
        models=len({model for model, _ in errors}),
        median=round(quantile(relative, 0.5), 4),
        p90=round(quantile(relative, 0.9), 4),
        worst=round(relative[-1], 4),
        within=round(sum(abs(log) <= math.log(1.5) for _, log in errors) / len(errors), 4),
        interval=float(f"{math.exp(conformal([log for _, log in errors])):.4g}"),
        coverage=round(covered / len(errors), 4),
    )


def conformal(logs: Sequence[float]) -> float:
    """The half-width that a new error of the same kind exceeds with the probability 1 - COVERAGE at most."""
    widths = sorted(map(abs, logs))
    return widths[min(math.ceil((len(widths) + 1) * COVERAGE), len(widths)) - 1]


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of ascending numbers, between the two nearest."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
