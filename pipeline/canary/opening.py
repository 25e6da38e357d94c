"""How a rollout opens: what it is asked to do, and what it finds, must make sense together, or nothing is touched."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nxpipe.pipeline.canary.course import Course, kept
from nxpipe.pipeline.canary.errors import CanaryError
from nxpipe.pipeline.canary.pace import Pace
from nxpipe.pipeline.canary.plan import Plan

_COLOURS: Final = ("blue", "green")


class Refused(CanaryError):
    """A rollout that must not begin."""


@dataclass(frozen=True)
class Alarms:
    """The guards by name, and those of them that sound. One that is not there any more guards nothing, and counts as
    sounding.
    """

    states: Mapping[str, str]

    @staticmethod
    def of(document: Mapping[str, Any]) -> "Alarms":
        pairs = [
            zip(document[f"{kind}_names"], document[f"{kind}_states"], strict=True) for kind in ("metric", "composite")
        ]
        return Alarms({name: state for pair in pairs for name, state in pair})

    def sounding(self, guards: tuple[str, ...]) -> list[str]:
        missing = [f"{name} (which is gone)" for name in guards if name not in self.states]
        return [*(name for name in guards if self.states.get(name) == "ALARM"), *missing]


def opens(found: Mapping[str, Any]) -> dict[str, Any]:
    """`found` has the fleet as the template describes it, and the state of the machine: what was asked, and what AWS
    answered.
    """
    fleet, state = found["fleet"], found["state"]
    old, new = _colours(state)
    _require_whole(old, state["weights"])
    size = _size(fleet, old, new, state)
    plan, pace = Plan.from_json(_table(state, "plan")), Pace.from_json(state.get("pace", {}))
    alarms = tuple(fleet["alarms"])
    if sounding := Alarms.of(state["alarms"]).sounding(alarms):
        raise Refused(f"The alarm {sounding[0]} sounds before anything has changed: find out why, then start again.")
    course = Course(
        name=found["name"],
        plan=plan,
        pace=pace,
        balancer=fleet["balancer"],
        canary=fleet["colours"][new]["series"],
        stable=fleet["colours"][old]["series"],
        alarms=alarms,
    )
    shares = [step.weight for step in plan.steps] + [100]
    return {
        "from": {"colour": old, **fleet["colours"][old]},
        "to": {"colour": new, **fleet["colours"][new]},
        "size": size,
        "home": _weights(fleet, old, new, 0),
        "steps": [_weights(fleet, old, new, share) for share in shares],
        "count": len(shares),
        "pace": {"warm": pace.warm, "warm_tries": pace.warm_tries},
        "carried": course.text(),
        **kept(course.name, 0, plan.as_json()),
    }


def _colours(asked: Mapping[str, Any]) -> tuple[str, str]:
    old, new = asked.get("from"), asked.get("to")
    if {old, new} != set(_COLOURS):
        raise Refused(f"A rollout goes from one of {' and '.join(_COLOURS)} to the other, not from {old} to {new}.")
    return str(old), str(new)


def _table(asked: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = asked.get(name)
    if not isinstance(value, Mapping):
        raise Refused(f"The execution was started without a {name}: start it by `nxpipe rollout start`.")
    return value


def _require_whole(old: str, weights: Mapping[str, list[int]]) -> None:
    said = ", ".join(f"{colour} {' '.join(map(str, weight))}" for colour, weight in weights.items())
    elsewhere = [colour for colour, weight in weights.items() if colour != old and weight != [0]]
    if elsewhere or not weights[old] or weights[old] == [0]:
        raise Refused(f"Traffic is not wholly with {old}, but weighed {said}: bring it home first, or go from there.")


def _size(fleet: Mapping[str, Any], old: str, new: str, sizes: Mapping[str, Any]) -> int:
    """As many as the old version has: each must be able to carry all traffic at any time."""
    size = max(int(sizes[old]["desired"]), int(fleet["least"]), 1)
    group, there, most = fleet["colours"][new]["group"], sizes[new]["desired"], sizes[new]["most"]
    if there:
        raise Refused(
            f"{group} has {there} instances of an earlier version: set its desired capacity to 0, then start again."
        )
    if size > most:
        raise Refused(f"{group} may have {most} instances and needs {size}: raise the fleet's size.max.")
    return size


def _weights(fleet: Mapping[str, Any], old: str, new: str, share: int) -> dict[str, int]:
    return dict.fromkeys(fleet["colours"], 0) | {old: 100 - share, new: share}
