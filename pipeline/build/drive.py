"""The driver of a build: begins what is next, tries again what may pass, gives up what will not."""

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from nxpipe.artifact_store.documents import written_now
from nxpipe.pipeline.build.agenda import Agenda
from nxpipe.pipeline.build.events import Ended, Event, Fault, Said
from nxpipe.pipeline.build.executors.protocol import Executor
from nxpipe.pipeline.build.item import Item
from nxpipe.pipeline.build.planned import Plan
from nxpipe.pipeline.build.results import Results
from nxpipe.pipeline.util.errors import PipelineError
from nxpipe.pipeline.util.exit_codes import STORE

_PATIENCE: Final = 1.0  # seconds to wait for news
_LONGEST_PAUSE: Final = 60.0  # seconds before another attempt
_CHANCE: Final = random.SystemRandom()

Watch = Callable[[Event], None]


@dataclass(frozen=True)
class Policy:
    """`pause`: seconds before the second attempt, doubled with each; half of it is left to chance."""

    keep_going: bool = False
    retries: int = 2
    pause: float = 1.0


def drive(plan: Plan, agenda: Agenda, executor: Executor, policy: Policy, watch: Watch) -> Results:
    """To the end of the agenda, or of what runs when one is given up. Ctrl-C ends all; what is committed stays."""
    return _Run(plan, agenda, executor, policy, watch).to_the_end()


class _Run:
    def __init__(self, plan: Plan, agenda: Agenda, executor: Executor, policy: Policy, watch: Watch) -> None:
        self._plan = plan
        self._agenda = agenda
        self._executor = executor
        self._policy = policy
        self._watch = watch
        self._running: dict[str, Item] = {}
        self._later: list[tuple[float, Item]] = []
        self._ended: dict[str, Ended] = {}
        self._put_off: set[str] = set()
        self._attempts = Counter[str]()
        self._is_stopped = not policy.keep_going and any(cell.fault for _, cell in plan.cells())

    def to_the_end(self) -> Results:
        began_at, began, interrupted = written_now(), time.monotonic(), False
        try:
            while self._begin_what_is_next():
                for event in self._executor.events(self._patience()):
                    self._hear(event)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            left_behind = self._close()
        return Results(
            plan=self._plan,
            ended=self._ended,
            put_off=self._put_off,
            attempts=self._attempts,
            began_at=began_at,
            seconds=time.monotonic() - began,
            executor=self._executor.name,
            interrupted=interrupted,
            left_behind=left_behind,
        )

    def _close(self) -> str:
        """What could not be ended, in a sentence: it says less about the build than the build's own end."""
        try:
            self._executor.close()
        except PipelineError as error:
            return str(error)
        return ""

    def _begin_what_is_next(self) -> bool:
        """False: nothing runs, and nothing is left to begin."""
        now = time.monotonic()
        for due in [pair for pair in self._later if pair[0] <= now]:
            self._later.remove(due)
            self._agenda.put(due[1])
        while self._agenda and not self._is_stopped and self._executor.takes(self._agenda.first):
            item = self._agenda.take()
            self._running[item.key] = item
            self._attempts[item.key] += 1
            self._executor.start(item)
        return bool(self._running) or (not self._is_stopped and bool(self._agenda or self._later))

    def _patience(self) -> float:
        due = min((moment for moment, _ in self._later), default=float("inf"))
        return min(max(due - time.monotonic(), 0.01), _PATIENCE)

    def _hear(self, event: Event) -> None:
        if not isinstance(event, Ended):
            self._watch(event)
            return
        item = self._running.pop(event.key)
        event = replace(event, seconds=round(event.seconds, 3))
        self._ended[event.key] = event
        self._put_off.discard(event.key)
        if event.fault is None:
            self._watch(event)
            self._agenda.made(item)
        elif event.fault.sort == "environmental" and self._attempts[item.key] <= self._policy.retries:
            self._try_again(item, event.fault)
        else:
            self._watch(event)
            self._is_stopped |= not self._policy.keep_going or _is_everybodys(event.fault)

    def _try_again(self, item: Item, fault: Fault) -> None:
        self._put_off.add(item.key)
        pause = min(self._policy.pause * 2 ** (self._attempts[item.key] - 1), _LONGEST_PAUSE)
        pause *= 0.5 + _CHANCE.random() / 2
        self._watch(Said(item.key, f"tried again in {pause:.0f} s: {fault.message}"))
        self._later.append((time.monotonic() + pause, item))


def _is_everybodys(fault: Fault) -> bool:
    """No other item would fare better: something of this machine, or the store, which is where all of them meet."""
    return fault.sort == "here" or fault.code == STORE.number
