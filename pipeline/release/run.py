"""The gates in their order, each passed once, and what became of them: up to the first that fails."""

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
_CUT_SHORT: Final = "cut short; the same words go on from here"


@dataclass
class ReleaseRun:
    """`tell` hears of each gate as it is passed."""

    tell: Callable[["ReleaseRun"], None]
    began_at: str = field(default_factory=written_now)
    passages: list[GateResult] = field(default_factory=list)
    is_over: bool = False
    _began: float = field(default_factory=time.monotonic)

    @property
    def code(self) -> int:
        return self.passages[-1].code if self.passages else 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def all(self) -> Sequence[GateResult]:
        """Of every gate, whether it was come to or not."""
        rest = (GateResult(gate.name, "not run", "") for gate in CHAIN[len(self.passages) :])
        return [*self.passages, *rest]

    def run(self, release: "ReleaseContext") -> int:
        """The exit code; an error is passed on, once it has been noted."""
        for gate in CHAIN:
            began = time.monotonic()
            try:
                passage = _through(gate, release)
            except BaseException as error:
                self._note(_broken(gate, error), began)
                raise
            self._note(passage, began)
            if passage.code:
                break
        return self.code

    def _note(self, passage: GateResult, began: float) -> None:
        self.passages.append(replace(passage, seconds=round(time.monotonic() - began, 3)))
        self.is_over = bool(passage.code) or len(self.passages) == len(CHAIN)
        self.tell(self)


def preview(release: "ReleaseContext") -> list[GateResult]:
    """Every gate as it stands now: what a run would begin with."""
    return [_left_out(gate, release) or GateResult(gate.name, "to do", gate.intention(release)) for gate in CHAIN]


def _through(gate: Gate, release: "ReleaseContext") -> GateResult:
    return _left_out(gate, release) or _passed(gate.name, gate.run(release))


def _left_out(gate: Gate, release: "ReleaseContext") -> GateResult | None:
    if gate.name in release.words.skipped:
        return GateResult(gate.name, "skipped", f"--skip {gate.name}")
    settled: AlreadyDone | None = gate.settled(release)
    return GateResult(gate.name, settled.state, settled.sentence) if settled else None


def _passed(name: str, outcome: GateOutcome) -> GateResult:
    state: GateState = "interrupted" if outcome.code == INTERRUPTED.number else "failed" if outcome.code else "passed"
    return GateResult(name, state, outcome.sentence, outcome.code, figures=outcome.figures)


def _broken(gate: Gate, error: BaseException) -> GateResult:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else TERMINATED
        return GateResult(gate.name, "interrupted", _CUT_SHORT, code.number)
    return GateResult(gate.name, "failed", str(error), (exit_code_of(error) or INTERNAL).number)
