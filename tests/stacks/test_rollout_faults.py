"""Every failure at every state: all traffic finally goes to an existing version."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Final

import pytest

from tests.canary.samples import plan_with
from tests.localaws.moto_patches.events import strike
from tests.localaws.visitors import Fleet, SimulatedUsers, visitors
from tests.stacks.rollout_faults import Fault, faults, injected, meanwhile
from tests.stacks.rollout_world import (
    CLOCK,
    NEVER_SURE,
    PACE,
    WHO,
    ended,
    fleet_there,
    given_away,
    other,
    outcome,
    passed,
    record,
    signal,
    stable,
    start,
    stop,
    until,
    wake_the_clock,
    watched,
)

pytestmark = [pytest.mark.slow, pytest.mark.runs]

QUICK: Final = plan_with((100,), bake_min=1, bake_max=20).as_json()
_BACK: Final = ("Because", "Back", "SeeBack", "IsBack", "PointBack", "EmptyAgain")
# Where one comes only by another way than to promotion.
_WAYS: Final = {
    "bad": _BACK,
    "blocked": ("TooFew", "LeaveEmpty"),
    "stopped early": ("Stop",),
    "refused": ("Refuse",),
    "undecided": ("AskPeople",),
    "ended between two steps": ("SeeOwner", "Me", "Mine", "Ended"),
    "moved by somebody else": ("NotShifted",),
    "locked for good": ("WakeAgain",),
    "lock given away": ("SeeUnknown", "AllBlue", "AllGreen"),
    "over": ("Idle", "LookAgain", "LockedMeanwhile"),
    "over, and another one starts": ("Restart",),
}
_OTHERWISE: Final = {"watchdog": "killed"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_there(tmp_path_factory.mktemp("fleet")) as front:
        yield front


def way_to(fault: Fault) -> str:
    ways = [way for way, states in _WAYS.items() if fault.state in states]
    return ways[0] if ways else _OTHERWISE.get(fault.machine, "healthy")


def home_of(fault: Fault) -> str | None:
    """The machine of a fault's state: the watchdog has states for each stable colour, and empties the other one."""
    what, _, colour = fault.state.partition("-")
    return (other(colour) if what == "Empty" else colour) or None


def go(way: str, front: Fleet, people: SimulatedUsers) -> str:
    """Run a rollout of this kind, with the operator's actions that it needs."""
    if way == "refused":
        return start(plan={})
    if way == "stopped early":
        people.answers = False
        execution = start(pace=PACE | {"warm_tries": 50})
        until(lambda: "WarmUp" in passed(execution))
        signal("abort")
    elif way in ("killed", "locked for good", "lock given away", "undecided"):
        execution = start(plan=NEVER_SURE)
        if way != "undecided":
            until(lambda: "Watch" in passed(execution))
            if way == "lock given away":
                given_away()
            stop(execution)
    else:
        execution = start(plan=QUICK)
    return execution


@contextmanager
def on(way: str, front: Fleet) -> Iterator[None]:
    """Events on this way besides the fault."""
    if way == "ended between two steps":
        with meanwhile("rollout", "NextStep", lambda: signal("abort")):
            yield
    elif way == "moved by somebody else":
        with meanwhile("rollout", "SeeShift", lambda: front.weigh({"blue": 50, "green": 50})):
            yield
    elif way == "locked for good":
        with injected(Fault("watchdog", "Unlock", "stays broken")):
            yield
    elif way == "over, and another one starts":
        with meanwhile("watchdog", "LookAgain", another):
            yield
    else:
        yield


def another() -> None:
    start(plan=QUICK)
    until(lambda: "owner" in record())


def helped(way: str, execution: str, fault: Fault, met: Event) -> None:
    if way == "undecided":
        until(lambda: not running(execution) or "AskPeople" in passed(execution))
        if running(execution):
            signal("abort")
    if way.startswith("over"):
        ended(execution)
        wake_the_clock()  # as a deployment does
        strike(CLOCK)
    if way == "locked for good" and fault.kind in ("stays broken", "is stopped"):
        until(met.is_set)
        until(lambda: not watched())
        wake_the_clock()  # a person must


def running(execution: str) -> bool:
    return "owner" in record()


@pytest.mark.parametrize("fault", list(faults()), ids=str)
def test_traffic_ends_up_whole(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    for name, value in WHO.items():
        monkeypatch.setenv(name, value)
    if home_of(fault) == other(stable()):
        with visitors(fleet, errors={"blue": 0.0, "green": 0.0}):
            assert outcome(start(plan=QUICK)) == "promoted"
    way, old = way_to(fault), stable()
    new = other(old)
    with on(way, fleet), injected(fault) as met:
        errors = {old: 0.0, new: 0.5 if way == "bad" else 0.0}
        with visitors(fleet, errors=errors, answers=way != "blocked") as people:
            execution = go(way, fleet, people)
            helped(way, execution, fault, met)
            ended(execution)
            until(whole(fleet))
            until(met.is_set, 30)
            until(whole(fleet))  # another rollout may have started since
    assert not people.lost, "somebody was sent to a colour without instances"


def whole(front: Fleet) -> Callable[[], bool]:
    """The lock is gone, if need be by what the clock wakes; all traffic is with a colour that the record names, and no
    other colour has instances.
    """

    def met() -> bool:
        if "owner" in record():
            strike(CLOCK)
            return False
        home = stable()
        return front.weights() == {home: 100, other(home): 0} and front.sizes() == {home: 2, other(home): 0}

    return met
