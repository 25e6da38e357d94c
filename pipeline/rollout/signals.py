"""What a person tells the rollout of a fleet. It is written into the fleet's record, where the machine looks for it."""

from dataclasses import dataclass
from typing import Final

from nxpipe.pipeline.rollout.errors import RolloutRefused
from nxpipe.pipeline.rollout.machine import Machine

APPROVE: Final = "approve"
PAUSE: Final = "pause"
ABORT: Final = "abort"


@dataclass(frozen=True)
class Answer:
    execution: str
    signal: str | None
    changed: bool
    sentence: str


def approve(machine: Machine) -> Answer:
    return _say(machine, APPROVE, "is approved, and goes on as soon as its step is undecided")


def pause(machine: Machine) -> Answer:
    return _say(machine, PAUSE, "stays at its step until: nxpipe rollout resume")


def abort(machine: Machine) -> Answer:
    return _say(machine, ABORT, "is told to end; all traffic goes back to the old version at the next look")


def resume(machine: Machine) -> Answer:
    execution, signal = _under_way(machine)
    name = execution.rpartition(":")[2]
    if signal != PAUSE:
        return Answer(name, signal, False, f"Rollout {name} is not paused.")
    changed = machine.record.ask(execution, None, instead_of=PAUSE)
    return Answer(name, None, changed, f"Rollout {name} goes on.")


def _say(machine: Machine, signal: str, means: str) -> Answer:
    execution, before = _under_way(machine)
    name = execution.rpartition(":")[2]
    if before == ABORT != signal:
        raise RolloutRefused(f"rollout {name} was told to end already, and nothing can take that back")
    if before != signal and not machine.record.ask(execution, signal):
        raise RolloutRefused(f"rollout {name} has ended at this moment")
    return Answer(name, signal, before != signal, f"Rollout {name} {means}.")


def _under_way(machine: Machine) -> tuple[str, str | None]:
    """The execution, and what it was told already."""
    _ = machine.front  # a fleet without a machine has no record either
    item = machine.record.read()
    if item.owner is None:
        raise RolloutRefused(f"no rollout of fleet {machine.fleet} is under way")
    return item.owner, item.signal
