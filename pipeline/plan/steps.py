"""Step times of a served model: predictions of `AWS's compiler`, or an artifact's programs on the emulator's clock.

The error of a prediction is common to all steps of a configuration: a model that is read slower is read slower in every
step. So one factor multiplies all prompts and another all tokens, and an interval is carried through a simulation by
running it at a few of their values. `bound` takes both factors at the same end. `around` has the nominal times and
eight points of the ellipse that two independent factors give: where the logarithm of a figure is linear in theirs, its
extremes are the ends of its interval.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from nxpipe.pipeline.predict.constants import Prediction, predict
from nxpipe.pipeline.predict.measurements import Configuration
from nxpipe.pipeline.predict.work import Architecture

Bound = Literal["low", "nominal", "high"]
_POINTS: Final = 8  # of the ellipse; between them a linear figure is at most 8 % of its interval further out
_ENDS: Final[Mapping[Bound, tuple[float, float]]] = {"low": (-1, -1), "nominal": (0, 0), "high": (1, 1)}

# How much wider than the interval of a single program the one of a server is, by its logarithm: schedules, hosts and
# loads vary too. `python benchmarks/serving_rows.py published_train.csv contrib_train.csv` derives it.
SERVING: Final = 2.44


@dataclass
class PredictedSteps:
    """Predictions for one copy of a model. `bound` is the end of their interval that is taken."""

    model: str
    instance: str
    tp: int
    cores: int  # physical ones of the copy
    framework: str
    architecture: Architecture
    bound: Bound = "nominal"
    tier: str = ""  # "serving": measured through an HTTP server, whose costs the predictions then have
    overhead: float = 0.0  # seconds of the host in each step, beside what the predictions have
    widening: float = SERVING
    at: tuple[float, float] | None = None  # of prompts and of tokens: -1 and 1 are the ends; instead of `bound`
    _predicted: dict[tuple[str, int, int], Prediction] = field(default_factory=dict, repr=False)
    _known: dict[tuple[str, int, int], float] = field(default_factory=dict, init=False, repr=False)

    def around(self) -> Iterator["PredictedSteps"]:
        """The nominal times, and points around them whose figures' extremes are the ends of their intervals."""
        yield replace(self, at=(0.0, 0.0))
        for number in range(_POINTS):
            angle = 2 * math.pi * number / _POINTS
            yield replace(self, at=(math.cos(angle), math.sin(angle)))

    def prefill(self, tokens: int, context: int = 0, rows: int = 1) -> float:
        """A chunk costs what the longer prompt costs more than the shorter one, and never less than on its own."""
        alone = self._prefill(tokens, rows)
        if context:
            alone = max(alone, self._prefill(tokens + context, rows) - self._prefill(context, rows))
        return alone + self.overhead

    def decode(self, rows: int, context: int) -> float:
        return self._of("decode", rows, context, self._decode) + self.overhead

    def _prefill(self, tokens: int, rows: int) -> float:
        return rows * self._of("prefill", 1, tokens, self._prompt)

    def _of(self, phase: str, rows: int, tokens: int, found: Callable[[int, int], Prediction]) -> float:
        key = phase, rows, tokens
        if key not in self._known:
            if key not in self._predicted:
                self._predicted[key] = found(rows, tokens)
            prediction = self._predicted[key]
            end = (self.at or _ENDS[self.bound])[phase == "decode"]
            factor = (prediction.high / prediction.value) ** (self.widening * end)
            self._known[key] = max(prediction.floor_seconds, prediction.value / 1e3 * factor)
        return self._known[key]

    def _prompt(self, rows: int, tokens: int) -> Prediction:
        return self._predict("llm-prefill", "ttft_ms", rows, tokens)

    def _decode(self, rows: int, tokens: int) -> Prediction:
        return self._predict("llm-decode", "tpot_ms", rows, tokens)

    def _predict(self, family: str, metric: str, rows: int, tokens: int) -> Prediction:
        configuration = Configuration(
            family=family, model=self.model, instance=self.instance, metric=metric, cores=self.cores, tp=self.tp,
            batch=rows, sequence=tokens, framework=self.framework, tier=self.tier,
        )  # fmt: skip
        return predict(configuration, architecture=self.architecture)


@dataclass(frozen=True)
class ProgramSteps:
    """The programs of an artifact by their predicted milliseconds: of prompts by their length, and of the decode."""

    prompts: Mapping[int, float]
    decode_ms: float

    def prefill(self, tokens: int, context: int = 0, rows: int = 1) -> float:
        return self.prompts[tokens] / 1e3

    def decode(self, rows: int, context: int) -> float:
        return self.decode_ms / 1e3
