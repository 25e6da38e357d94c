"""What a rollout knows of its fleet: what things are called, and the words for its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nxpipe.stacks.rollout.states import State, call, choose

COLOURS: Final = ("blue", "green")
_OF_THE_RULE: Final = "$.Rules[0].Actions[0].ForwardConfig.TargetGroups"


@dataclass(frozen=True)
class Colour:
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
    colours: Mapping[str, Colour]  # blue, green, maybe standby
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
