"""The chain of gates: each runs once, in order, up to the first that fails."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.documents import written_now
from nxpipe.pipeline.release.gates import (
    AlreadyDone,
    BenchGate,
    BuildGate,
    CheckGate,
    Gate,
    GateOutcome,
    GateResult,
    GateState,
    VerifyGate,
)
from nxpipe.pipeline.release.promotion import PromoteGate, RolloutGate, SignGate
from nxpipe.pipeline.util.exit_codes import INTERNAL, INTERRUPTED, TERMINATED, exit_code_of

if TYPE_CHECKING:
    from nxpipe.pipeline.release.state import ReleaseContext

CHAIN: Final[tuple[Gate, ...]] = (
    CheckGate(),
    BuildGate(),
    VerifyGate(),
    BenchGate(),
    SignGate(),
    PromoteGate(),
    RolloutGate(),
)
_CUT_SHORT: Final = "interrupted; the same command continues from here"


@dataclass
class ReleaseRun:
    """One run of the gates; `on_result` is called after each gate."""

    on_result: Callable[["ReleaseRun"], None]
    began_at: str = field(default_factory=written_now)
    results: list[GateResult] = field(default_factory=list)
    is_over: bool = False
    _began: float = field(default_factory=time.monotonic)

    @property
    def code(self) -> int:
        return self.results[-1].code if self.results else 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def all(self) -> Sequence[GateResult]:
        """Results of all gates, including those that were not reached."""
        not_run = (GateResult(gate.name, "not run", "") for gate in CHAIN[len(self.results) :])
        return [*self.results, *not_run]

    def run(self, release: "ReleaseContext") -> int:
        """Runs the gates and returns the exit code. An exception is recorded as a result and raised."""
        for gate in CHAIN:
            began = time.monotonic()
            try:
                result = _result_of(gate, release)
            except BaseException as error:
                self._add(_result_of_error(gate, error), began)
                raise
            self._add(result, began)
            if result.code:
                break
        return self.code

    def _add(self, result: GateResult, began: float) -> None:
        self.results.append(replace(result, seconds=round(time.monotonic() - began, 3)))
        self.is_over = bool(result.code) or len(self.results) == len(CHAIN)
        self.on_result(self)


def preview(release: "ReleaseContext") -> list[GateResult]:
    """The current state of every gate, for a dry run."""
    return [
        _without_running(gate, release) or GateResult(gate.name, "to do", gate.intention(release)) for gate in CHAIN
    ]


def _result_of(gate: Gate, release: "ReleaseContext") -> GateResult:
    return _without_running(gate, release) or _result_of_outcome(gate.name, gate.run(release))


def _without_running(gate: Gate, release: "ReleaseContext") -> GateResult | None:
    """The result of a gate that is skipped or has nothing to do; None if it must run."""
    if gate.name in release.options.skipped:
        return GateResult(gate.name, "skipped", f"--skip {gate.name}")
    settled: AlreadyDone | None = gate.settled(release)
    return GateResult(gate.name, settled.state, settled.sentence) if settled else None


def _result_of_outcome(name: str, outcome: GateOutcome) -> GateResult:
    state: GateState = "interrupted" if outcome.code == INTERRUPTED.number else "failed" if outcome.code else "passed"
    return GateResult(name, state, outcome.sentence, outcome.code, figures=outcome.figures)


def _result_of_error(gate: Gate, error: BaseException) -> GateResult:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else TERMINATED
        return GateResult(gate.name, "interrupted", _CUT_SHORT, code.number)
    return GateResult(gate.name, "failed", str(error), (exit_code_of(error) or INTERNAL).number)
