"""Rollout record of a fleet in DynamoDB: its names, its target groups, the owner of the lock, the traffic weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nxpipe.stacks.rollout.states import CONDITION_FAILED, State, call, choose

COLOURS: Final = ("blue", "green")
_OF_THE_RULE: Final = "$.Rules[0].Actions[0].ForwardConfig.TargetGroups"


@dataclass(frozen=True)
class TargetGroup:
    """A group of instances and the targets that they are."""

    group: str
    targets: str  # ARN
    series: str  # the target group as metrics call it


@dataclass(frozen=True)
class Fleet:
    """All of them are values that a deployment knows; none is looked up in a rollout."""

    name: str
    rule: str  # ARN: the only thing whose weights a rollout may set
    balancer: str  # as metrics call it
    colours: Mapping[str, TargetGroup]  # blue, green, maybe standby
    least: int  # instances that a colour has at least when it serves
    alarms: tuple[str, ...]

    def told(self) -> dict[str, Any]:
        """To the judge, who chooses of it what a rollout needs; and to people, who look at the machine."""
        colours = {
            colour: {"group": each.group, "targets": each.targets, "series": each.series}
            for colour, each in self.colours.items()
        }
        alarms = list(self.alarms)
        return {"rule": self.rule, "balancer": self.balancer, "least": self.least, "alarms": alarms, "colours": colours}

    def whole(self, colour: str) -> dict[str, int]:
        """All traffic to one colour."""
        return {each: 100 if each == colour else 0 for each in self.colours}

    def shift(self, weights: str | Mapping[str, int], *, then: str, stubborn: bool = False) -> State:
        """Sets all weights, to those of a table in the state or to given ones."""
        groups: list[dict[str, Any]] = []
        for colour, each in self.colours.items():
            weight = {"Weight.$": f"{weights}.{colour}"} if isinstance(weights, str) else {"Weight": weights[colour]}
            groups.append({"TargetGroupArn": each.targets, **weight})
        forward = {"TargetGroups": groups, "TargetGroupStickinessConfig": {"Enabled": False}}
        parameters = {"RuleArn": self.rule, "Actions": [{"Type": "forward", "ForwardConfig": forward}]}
        return call("elasticloadbalancingv2", "modifyRule", parameters, then=then, stubborn=stubborn)

    def look(self, *, into: str, then: str, stubborn: bool = False) -> State:
        """The weights as the load balancer tells them; by target group, for it keeps no order of them."""
        seen = {
            f"{colour}.$": f"{_OF_THE_RULE}[?(@.TargetGroupArn == '{each.targets}')].Weight"
            for colour, each in self.colours.items()
        }
        parameters = {"RuleArns": [self.rule]}
        return call(
            "elasticloadbalancingv2",
            "describeRules",
            parameters,
            keeping=seen,
            into=into,
            then=then,
            stubborn=stubborn,
        )

    def same(self, seen: str, weights: str | Mapping[str, int], *, then: str, otherwise: str) -> State:
        """Whether what was looked at is what was wanted."""
        tests = [
            {"Variable": f"{seen}.{colour}[0]", "NumericEqualsPath": f"{weights}.{colour}"}
            if isinstance(weights, str)
            else {"Variable": f"{seen}.{colour}[0]", "NumericEquals": weights[colour]}
            for colour in self.colours
        ]
        return choose(({"And": tests}, then), otherwise=otherwise)


KEY: Final = "fleet"
WRITABLE: Final = ("owner", "signal", "since")  # what people write; `stable` is the machines' own
EXECUTION_ID: Final = "$$.Execution.Id"


@dataclass(frozen=True)
class Record:
    table: str
    fleet: str

    @property
    def _key(self) -> dict[str, Any]:
        return {KEY: {"S": self.fleet}}

    def read(self, *, into: str, then: str) -> State:
        parameters = {"TableName": self.table, "Key": self._key, "ConsistentRead": True}
        return call("dynamodb", "getItem", parameters, into=into, then=then)

    def lock(self, *, then: str, caught: Mapping[str, str]) -> State:
        """Also by who has it already: the answer to his first request may have been lost."""
        return self._change(
            "SET #owner = :me, #since = :now",
            "attribute_not_exists(#owner) OR #owner = :me",
            {":me": EXECUTION_ID, ":now": "$$.State.EnteredTime"},
            then=then,
            caught=caught,
        )

    def take_over(self, owner: str, *, then: str, caught: Mapping[str, str]) -> State:
        """From an execution that has ended."""
        values = {":me": EXECUTION_ID, ":now": "$$.State.EnteredTime", ":dead": owner}
        return self._change("SET #owner = :me, #since = :now", "#owner = :dead", values, then=then, caught=caught)

    def point(self, colour: str, *, then: str) -> State:
        values = {":colour": colour, ":me": EXECUTION_ID}
        return self._change("SET #stable = :colour", "#owner = :me", values, then=then)

    def claim(self, *, then: str, caught: Mapping[str, str]) -> State:
        """Before each step: the lock is still held, and nobody has asked for the end. Which of the two is not met, the
        record itself tells.
        """
        condition = "#owner = :me AND (attribute_not_exists(#signal) OR #signal <> :end)"
        values = {":me": EXECUTION_ID, ":end": "States.Format('abort')"}
        return self._change("SET #owner = :me", condition, values, then=then, caught=caught)

    def use_up(self, word: str, *, then: str) -> State:
        """A word that is good for one step; what a person has said since counts."""
        condition, values = (
            "#owner = :me AND #signal = :word",
            {":me": EXECUTION_ID, ":word": f"States.Format('{word}')"},
        )
        return self._change("REMOVE #signal", condition, values, then=then, caught={CONDITION_FAILED: then})

    def unlock(self, *, then: str, caught: Mapping[str, str] | None = None) -> State:
        return self._change(
            "REMOVE #owner, #since, #signal", "#owner = :me", {":me": EXECUTION_ID}, then=then, caught=caught
        )

    def _change(
        self,
        update: str,
        condition: str,
        values: Mapping[str, str],
        *,
        then: str,
        caught: Mapping[str, str] | None = None,
    ) -> State:
        words = [name for name in ("owner", "since", "signal", "stable") if f"#{name}" in f"{update} {condition}"]
        parameters = {
            "TableName": self.table,
            "Key": self._key,
            "UpdateExpression": update,
            "ConditionExpression": condition,
            "ExpressionAttributeNames": {f"#{name}": name for name in words},
            "ExpressionAttributeValues": {name: {"S.$": path} for name, path in values.items()},
        }
        return call("dynamodb", "updateItem", parameters, then=then, caught=caught, stubborn=True)
