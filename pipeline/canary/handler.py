"""Lambda entry of the judge: preflight, start of a step, evaluation; and the state that the state machine carries
between them.

The state is one text, which no service parses: each service that serialises a number may change it. Field names are
part of that text and of the plans of running rollouts: they cannot change.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from nxpipe.pipeline.canary.constants import EVALUATIONS_PER_EXECUTION, WARMUP_MINUTES
from nxpipe.pipeline.canary.documents import CanaryError, canonical_json, digest_of
from nxpipe.pipeline.canary.evalues import FullTrafficTest
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.explanation import (
    PhaseTotals,
    counts_sentence,
    evidence_shares,
    explain,
    full_traffic_sentence,
    place_of,
    totals_after,
    verdict_sentence,
)
from nxpipe.pipeline.canary.judge import Decision, Judgement, Moment, Verdict, judge
from nxpipe.pipeline.canary.metrics import (
    ROLLOUT,
    Batch,
    UnansweredRequests,
    batches,
    complete,
    minute_of,
    pair_queries,
    queries,
    start_of,
    with_pairs,
)
from nxpipe.pipeline.canary.plan import CanaryPlan, Schedule
from nxpipe.pipeline.canary.record import record_of


@dataclass(frozen=True)
class ResponseLimits:
    """Times within which the load balancer and the targets of a fleet respond, in minutes of the plan."""

    silent: int = 1  # without data, after which the load balancer returns 504
    longest: int = 1  # after which no response comes

    @staticmethod
    def of(fleet: Mapping[str, Any]) -> "ResponseLimits":
        """The limits in a fleet's description, which has them in seconds. A rehearsal scales them as its minutes."""
        silent, longest = (-(-int(fleet.get(name, 60)) // 60) for name in ("idle_timeout", "draining"))
        return ResponseLimits(silent, max(silent, longest))


@dataclass(frozen=True)
class RolloutState:
    """The state of a rollout after an evaluation."""

    name: str  # of the execution
    plan: CanaryPlan
    pace: Schedule
    balancer: str
    canary: str  # target group, as CloudWatch names it
    stable: str
    alarms: tuple[str, ...]
    evidence: Evidence = field(default_factory=Evidence)
    alone: FullTrafficTest = field(default_factory=FullTrafficTest)
    opened: tuple[UnansweredRequests, UnansweredRequests] = (
        UnansweredRequests(),
        UnansweredRequests(),
    )  # unanswered requests of canary and stable
    step: int = 0
    begun: int = 0  # first counted minute of the step
    due: int | None = None  # first unread minute
    looks: int = 0  # evaluations
    looks_here: int = 0  # evaluations in this execution of the inner state machine
    limits: ResponseLimits = field(default_factory=ResponseLimits)
    asked: int | None = None  # minute in which people were notified that a decision is needed
    previous: str | None = None  # the digest of the last record
    pairs: Mapping[str, str] = field(default_factory=dict)  # CloudWatch dimensions of mirrored pairs, if there are any
    totals: tuple[PhaseTotals, ...] = ()  # counts of each phase, for the words of verdicts alone

    @property
    def over(self) -> bool:
        """True at full traffic: all steps have ended. The baseline's instances still run, for a rollback."""
        return self.step >= len(self.plan.phases)

    def is_mirrored(self, minute: int) -> bool:
        """True for the minutes of the shadow phase. Those that had not settled at its end are read in the first step;
        a later minute is judged by its traffic, even if a last pair is published in it."""
        return self.plan.is_shadow(self.step) or (self.plan.is_shadow(self.step - 1) and minute < self.begun)

    @property
    def unheard(self) -> int:
        """Minutes until the step has read one whose requests each had a response of a target or of the load balancer.

        A hung request is counted as failed when the load balancer gives it up, so no step ends earlier.
        """
        read = 0 if self.due is None else self.due - self.begun
        return max(0, self.limits.silent + 1 - read)

    def minute(self, at: str) -> int:
        return minute_of(at, self.pace.period)

    def begin(self, step: int, at: str) -> "RolloutState":
        """The state at the start of a step. Its first counted minute follows the warm-up. Minutes of the previous step
        that have not settled yet are read later and count there."""
        begun = self.minute(at) + 1 + WARMUP_MINUTES
        due = begun if self.due is None else self.due
        return replace(self, step=step, begun=begun, due=due, looks_here=0, asked=None)

    def settled(self, at: str) -> range:
        """Minutes since the last evaluation whose counts have settled."""
        first = self.begun if self.due is None else self.due
        return range(first, max(first, minute_of(at, self.pace.period, earlier=self.pace.settle)))

    def moment(self, at: str) -> Moment:
        return Moment(self.step, self.begun, max(self.begun, self.minute(at)))

    def query(self, at: str) -> dict[str, Any]:
        """The CloudWatch query of the next evaluation. It starts in the past, since CloudWatch rejects an empty
        range."""
        first = min(self.settled(at).stop, self.minute(at) - 1)
        arms = {"canary": self.canary, "stable": self.stable}
        asked = queries(self.balancer, arms, self.plan.latencies, self.pace.period)
        if self.plan.shadow is not None and self.step <= 1:
            asked += pair_queries(self.pairs, self.pace.period)
        return {"from": start_of(first, self.pace.period), "queries": asked}

    def text(self) -> str:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        encoded = {"plan": self.plan.as_json(), "pace": vars(self.pace), "evidence": self.evidence.as_json()}
        opened = [requests.as_json() for requests in self.opened]
        totals = [phase.as_json() for phase in self.totals]
        counted = {"alone": vars(self.alone), "opened": opened, "limits": vars(self.limits), "totals": totals}
        return canonical_json(fields | encoded | counted)

    @staticmethod
    def from_text(text: str) -> "RolloutState":
        fields = json.loads(text)
        plan, pace = CanaryPlan.from_json(fields.pop("plan")), Schedule.from_json(fields.pop("pace"))
        evidence, alarms = Evidence.from_json(fields.pop("evidence")), tuple(fields.pop("alarms"))
        alone = FullTrafficTest(**fields.pop("alone"))
        # The text of an earlier version has none of `opened`, `limits` and `totals`.
        canary, stable = map(UnansweredRequests.from_json, fields.pop("opened", ([], [])))
        limits = ResponseLimits(**fields.pop("limits", {}))
        totals = tuple(map(PhaseTotals.from_json, fields.pop("totals", ())))
        return RolloutState(
            plan=plan,
            pace=pace,
            evidence=evidence,
            alone=alone,
            alarms=alarms,
            opened=(canary, stable),
            limits=limits,
            totals=totals,
            **fields,
        )


def stored_document(name: str, number: int, document: Mapping[str, Any]) -> dict[str, Any]:
    """Key and body of a stored document. The body contains a text, so that readers compute the digest of the same
    bytes. Number 0 is the plan; evaluations follow."""
    return {"key": f"{name}/{number:06}.json", "record": {"text": canonical_json(document)}}


_COLOURS: Final = ("blue", "green")


class Refused(CanaryError):
    """A rollout that must not start; nothing was changed."""


@dataclass(frozen=True)
class Alarms:
    """States of the alarms that guard a rollout. A deleted alarm protects nothing, so it counts as ALARM."""

    states: Mapping[str, str]

    @staticmethod
    def of(document: Mapping[str, Any]) -> "Alarms":
        pairs = [
            zip(document[f"{kind}_names"], document[f"{kind}_states"], strict=True) for kind in ("metric", "composite")
        ]
        return Alarms({name: state for pair in pairs for name, state in pair})

    def active(self, guards: tuple[str, ...]) -> list[str]:
        """The guards in ALARM, and those that do not exist."""
        missing = [f"{name} (which is gone)" for name in guards if name not in self.states]
        return [*(name for name in guards if self.states.get(name) == "ALARM"), *missing]


def preflight(context: Mapping[str, Any]) -> dict[str, Any]:
    """The first document of the state machine: both environments, fleet size, weights of each step, initial state.

    `context` contains the fleet as the template describes it, and the state of the machine: its input, and what AWS
    reports of weights, sizes and alarms. An inconsistency is an error, which stops the machine before it has changed
    anything.
    """
    fleet, state = context["fleet"], context["state"]
    old, new = _colours(state)
    _require_whole(old, state["weights"])
    size = _size(fleet, old, new, state)
    plan, pace = CanaryPlan.from_json(_table(state, "plan")), Schedule.from_json(state.get("pace", {}))
    alarms = tuple(fleet["alarms"])
    if active := Alarms.of(state["alarms"]).active(alarms):
        raise Refused(f"alarm {active[0]} is active before the rollout; resolve it, then start again")
    if plan.shadow is not None and "shadow" not in fleet:
        raise Refused(
            "the plan has a shadow phase, and the fleet was deployed without one; deploy it, then start again"
        )
    rollout = RolloutState(
        name=context["name"],
        plan=plan,
        pace=pace,
        balancer=fleet["balancer"],
        canary=fleet["colours"][new]["series"],
        stable=fleet["colours"][old]["series"],
        alarms=alarms,
        limits=ResponseLimits.of(fleet),
        pairs={**fleet["shadow"], ROLLOUT: context["name"]} if plan.shadow is not None else {},
    )
    shares = [phase.weight for phase in plan.phases] + [100]
    return {
        "from": {"colour": old, **fleet["colours"][old]},
        "to": {"colour": new, **fleet["colours"][new]},
        "size": size,
        "home": _weights(fleet, old, new, 0),
        "steps": [_weights(fleet, old, new, share) for share in shares],
        "count": len(shares),
        **({"mirrors": _mirrors(plan, rollout.name, old, new)} if "shadow" in fleet else {}),
        "pace": {"warm": pace.warm, "warm_tries": pace.warm_tries},
        "carried": rollout.text(),
        **stored_document(rollout.name, 0, plan.as_json()),
    }


def _colours(machine_input: Mapping[str, Any]) -> tuple[str, str]:
    old, new = machine_input.get("from"), machine_input.get("to")
    if {old, new} != set(_COLOURS):
        raise Refused(f"a rollout shifts traffic between {' and '.join(_COLOURS)}, not from {old} to {new}")
    return str(old), str(new)


def _table(machine_input: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = machine_input.get(name)
    if not isinstance(value, Mapping):
        raise Refused(f"the input of the execution has no {name}; start it with `nxpipe rollout start`")
    return value


def _require_whole(old: str, weights: Mapping[str, list[int]]) -> None:
    """Raise Refused unless the baseline's environment has all traffic."""
    listing = ", ".join(f"{colour} {' '.join(map(str, weight))}" for colour, weight in weights.items())
    others = [colour for colour, weight in weights.items() if colour != old and weight != [0]]
    if others or not weights[old] or weights[old] == [0]:
        raise Refused(f"{old} does not have all traffic (weights {listing}); restore its weight first")


def _size(fleet: Mapping[str, Any], old: str, new: str, sizes: Mapping[str, Any]) -> int:
    """The baseline's number of instances, which the candidate needs too: promotion and rollback move all traffic at
    once."""
    size = max(int(sizes[old]["desired"]), int(fleet["least"]), 1)
    group, running, maximum = fleet["colours"][new]["group"], sizes[new]["desired"], sizes[new]["most"]
    if running:
        raise Refused(
            f"{group} has {running} instances of an earlier version; set its desired capacity to 0, then start again"
        )
    if size > maximum:
        raise Refused(f"{group} may have {maximum} instances and needs {size}; raise the fleet's size.max")
    return size


NO_MIRROR: Final = {"percent": 0}  # no request is mirrored


def _mirrors(plan: CanaryPlan, name: str, old: str, new: str) -> list[dict[str, Any]]:
    """What the baseline's instances mirror in each phase, and at full traffic."""
    none = [NO_MIRROR] * (1 + len(plan.steps))
    if plan.shadow is None:
        return none
    return [{"percent": plan.shadow.percent, "from": old, "to": new, "rollout": name}, *none]


def _weights(fleet: Mapping[str, Any], old: str, new: str, share: int) -> dict[str, int]:
    return dict.fromkeys(fleet["colours"], 0) | {old: 100 - share, new: share}


class Action(StrEnum):
    """The next action of the state machine."""

    CONTINUE = "continue"  # wait, then evaluate again
    WATCH = "watch"  # the same, in a new execution
    ASK = "ask"  # notify people that a decision is needed, then evaluate again
    ADVANCE = "advance"
    ROLL_BACK = "roll_back"


class Signal(StrEnum):
    """A person's signal to the rollout."""

    APPROVE = "approve"
    PAUSE = "pause"
    ABORT = "abort"


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: the new state and the action, with the data of both."""

    state: RolloutState
    taken: list[Batch]
    judged: Judgement | None  # None at full traffic
    action: Action
    reason: str


def evaluate(state: RolloutState, observed: Mapping[str, Any]) -> Evaluation:
    """Evaluate the settled minutes, and choose the next action."""
    at = observed["at"]
    minutes = state.settled(at) if complete(observed["metrics"]) else range(0)
    taken, opened = batches(
        observed["metrics"], minutes, state.plan.latencies, state.pace.period, state.opened, state.limits.longest
    )
    taken = [
        with_pairs(observed["metrics"], batch, state.pace.period) if state.is_mirrored(batch.minute) else batch
        for batch in taken
    ]
    state, judged = replace(state, opened=opened), None
    if state.over:
        state = replace(state, alone=state.alone + (batch for batch in taken if batch.minute >= state.begun))
    else:
        judged = judge(state.plan, state.evidence, taken, state.moment(at))
        totals = totals_after(state.totals, state.evidence, judged.evidence, taken)
        state = replace(state, evidence=judged.evidence, totals=totals)
    state = replace(
        state,
        due=minutes.stop if minutes else state.due,
        looks=state.looks + 1,
        looks_here=state.looks_here + 1,
    )
    active = Alarms.of(observed["alarms"]).active(state.alarms)
    verdict = None if judged is None else judged.verdict
    action, reason = _action(state, verdict, active, _signal(observed["record"]), state.minute(at))
    if action is Action.ASK:
        state = replace(state, asked=state.minute(at))
    if action is not Action.CONTINUE:
        state = replace(state, looks_here=0)
    return Evaluation(state, taken, judged, action, reason)


def _signal(record: Mapping[str, Any]) -> Signal | None:
    """The signal in an item of DynamoDB; None for an unknown one, whose author cannot be notified."""
    signal = record.get("Item", {}).get("signal", {}).get("S")
    return Signal(signal) if signal in set(Signal) else None


def _action(
    state: RolloutState, verdict: Verdict | None, active: list[str], signal: Signal | None, minute: int
) -> tuple[Action, str]:
    """The next action and its reason. The first line of a reason is a sentence that people are notified of."""
    if signal is Signal.ABORT:
        return Action.ROLL_BACK, f"Aborted {_place(state, verdict, minute)} by an operator{_counts(state, verdict)}."
    if active:
        place, counts = _place(state, verdict, minute), _counts(state, verdict)
        return Action.ROLL_BACK, f"Rolled back {place}: alarm {active[0]} is active{counts}."
    action, reason = (
        _action_at_full_traffic(state, minute)
        if verdict is None
        else _action_of_verdict(state, verdict, signal, minute)
    )
    if action is Action.ADVANCE and signal is Signal.PAUSE:
        place = _place(state, verdict, minute)
        action, reason = Action.CONTINUE, f"Paused {place} by an operator: the evidence to advance is complete."
    if action is Action.CONTINUE and state.looks_here >= EVALUATIONS_PER_EXECUTION:
        action = Action.WATCH
    return action, reason


def _place(state: RolloutState, verdict: Verdict | None, minute: int) -> str:
    if verdict is None:
        return f"at full traffic after {max(0, minute - state.begun):,} min"
    return f"{place_of(state.plan, verdict.step)} after {verdict.minutes:,} min"


def _counts(state: RolloutState, verdict: Verdict | None) -> str:
    """The counts at the end of a sentence; at full traffic there is nothing to compare with."""
    if verdict is None:
        return f"; {state.alone.errors:,} of {state.alone.requests:,} requests failed"
    return f"; {counts_sentence(state.plan, state.evidence, state.totals, verdict.step)}"


def _action_at_full_traffic(state: RolloutState, minute: int) -> tuple[Action, str]:
    elapsed, final = minute - state.begun, state.pace.final
    reason = full_traffic_sentence(state.plan, state.alone, elapsed, final)
    if state.alone.fails(state.plan):
        return Action.ROLL_BACK, reason
    if elapsed >= final and state.unheard:
        return Action.CONTINUE, f"At full traffic {_until_heard(state)}."
    return Action.ADVANCE if elapsed >= final else Action.CONTINUE, reason


def _until_heard(state: RolloutState) -> str:
    minutes = f"{state.unheard} more {'minute' if state.unheard == 1 else 'minutes'}"
    return f"all requests count as good, but some may hang: {minutes} must be read"


def _action_of_verdict(state: RolloutState, verdict: Verdict, signal: Signal | None, minute: int) -> tuple[Action, str]:
    plan, evidence, totals = state.plan, state.evidence, state.totals
    actions = {Decision.ROLL_BACK: Action.ROLL_BACK, Decision.ADVANCE: Action.ADVANCE}
    place = _place(state, verdict, minute)
    if verdict.decision is Decision.ADVANCE and state.unheard:
        return Action.CONTINUE, f"Not decided yet {place}: {_until_heard(state)}."
    if action := actions.get(verdict.decision):
        return action, explain(plan, evidence, totals, verdict)
    if verdict.decision is not Decision.UNDECIDED:
        return Action.CONTINUE, verdict_sentence(plan, evidence, totals, verdict)
    if signal is Signal.APPROVE:
        return Action.ADVANCE, f"Advanced {place} by an operator, undecided{_counts(state, verdict)}."
    if state.asked is None:
        sentence, figures = explain(plan, evidence, totals, verdict).split("\n", 1)
        return Action.ASK, f"{sentence} Approve or abort the rollout.\n{figures}"
    if minute - state.asked >= state.pace.patience:
        waited = f"undecided, and no operator answered for {minute - state.asked:,} min"
        return Action.ROLL_BACK, f"Rolled back {place}: {waited}; {evidence_shares(plan, verdict)}."
    return Action.CONTINUE, f"{verdict_sentence(plan, evidence, totals, verdict)} An operator must decide."


def handle(event: Mapping[str, Any], _context: object) -> dict[str, Any]:
    """The response to one request of the state machine, whose name is the key of the event."""
    ((request, parameters),) = event.items()
    handlers = {"opens": preflight, "begins": begin_step, "looks": record_evaluation}
    return handlers[request](parameters)


def begin_step(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Response to the start of a step, whose weights are in force."""
    state = RolloutState.from_text(parameters["carried"]).begin(parameters["step"], parameters["at"])
    return _response(state, parameters["at"], Action.WATCH, f"step {parameters['step'] + 1} begins")


def record_evaluation(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Response to one evaluation, with its decision record."""
    before, at = RolloutState.from_text(parameters["carried"]), parameters["at"]
    evaluation = evaluate(before, parameters)
    state = evaluation.state
    batches = [batch.as_json() for batch in evaluation.taken]
    judged: dict[str, Any] = {"previous": before.previous, "verdict": None, "batches": batches}
    if evaluation.judged:
        judged = record_of(before.plan, before.moment(at), evaluation.taken, evaluation.judged, before.previous)
    record = judged | {
        "execution": state.name,
        "number": state.looks,
        "at": at,
        "alarms": parameters["alarms"],
        "record": parameters["record"],
        "word": evaluation.action,
        "reason": evaluation.reason,
    }
    state = replace(state, previous=digest_of(record))
    return _response(state, at, evaluation.action, evaluation.reason) | stored_document(state.name, state.looks, record)


def _response(state: RolloutState, at: str, action: Action, reason: str) -> dict[str, Any]:
    return {
        "verdict": action.value,
        "reason": reason,
        "wait": state.pace.poll,
        "ask": state.query(at),
        "carried": state.text(),
    }
