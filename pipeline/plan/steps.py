"""Step times of a served model: predictions of `AWS's compiler`, or an artifact's programs on the emulator's clock.

The error of a prediction is common to all steps of a configuration: a model that is read slower is read slower in every
step. So the interval of the step times is carried through a simulation by running it at both ends.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from nxpipe.pipeline.predict.constants import Prediction, predict
from nxpipe.pipeline.predict.measurements import Configuration
from nxpipe.pipeline.predict.work import Architecture

Bound = Literal["low", "nominal", "high"]


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
    _known: dict[tuple[str, int, int], float] = field(default_factory=dict, repr=False)

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
            prediction = found(rows, tokens)
            value = {"low": prediction.low, "high": prediction.high}.get(self.bound, prediction.value)
            self._known[key] = value / 1e3
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
