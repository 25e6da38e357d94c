"""States that read and write a fleet: its weights, its sizes and scaling, and its record in DynamoDB with the lock."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nxpipe.stacks.rollout.states import CONDITION_FAILED, State, States, call, choose, with_catch_all

COLOURS: Final = ("blue", "green")
# Target tracking acts by notifications of its CloudWatch alarms. Suspended, they change nothing; the policies, and the
# alarms' states, stay.
_SCALING: Final = ["AlarmNotification"]
_TARGET_GROUPS: Final = "$.Rules[0].Actions[0].ForwardConfig.TargetGroups"


@dataclass(frozen=True)
class TargetGroup:
    """An Auto Scaling group and its target group."""

    group: str
    targets: str  # ARN
    series: str  # the CloudWatch dimension of the target group


@dataclass(frozen=True)
class Fleet:
    """Resources of a serving fleet, resolved at deployment; a rollout looks up none of them."""

    name: str
    rule: str  # ARN of the only listener rule that a rollout may modify
    balancer: str  # CloudWatch dimension
    colours: Mapping[str, TargetGroup]  # blue, green, optionally standby
    least: int  # minimum number of instances of a serving environment
    alarms: tuple[str, ...]
    idle_timeout: int  # seconds after which the load balancer returns 504
    draining: int  # seconds of the longest response
    scaling: bool = False  # the environments have target tracking policies
    shadow: Mapping[str, str] | None = None  # CloudWatch dimensions of mirrored pairs, if rollouts mirror requests

    def description(self) -> dict[str, Any]:
        """Input of the judge; `nxpipe rollout` reads it from the state machine's definition."""
        colours = {
            colour: {"group": target.group, "targets": target.targets, "series": target.series}
            for colour, target in self.colours.items()
        }
        return {
            "rule": self.rule,
            "balancer": self.balancer,
            "least": self.least,
            "alarms": list(self.alarms),
            "colours": colours,
            "idle_timeout": self.idle_timeout,
            "draining": self.draining,
            **({"shadow": dict(self.shadow)} if self.shadow else {}),
        }

    def whole(self, colour: str) -> dict[str, int]:
        """Weights that send all traffic to one environment."""
        return {name: 100 if name == colour else 0 for name in self.colours}

    def shift(self, weights: str | Mapping[str, int], *, then: str, rollback: bool = False) -> State:
        """State that sets all weights; `weights` is a mapping, or the path of one in the state."""
        groups: list[dict[str, Any]] = []
        for colour, target in self.colours.items():
            weight = {"Weight.$": f"{weights}.{colour}"} if isinstance(weights, str) else {"Weight": weights[colour]}
            groups.append({"TargetGroupArn": target.targets, **weight})
        forward = {"TargetGroups": groups, "TargetGroupStickinessConfig": {"Enabled": False}}
        parameters = {"RuleArn": self.rule, "Actions": [{"Type": "forward", "ForwardConfig": forward}]}
        return call("elasticloadbalancingv2", "modifyRule", parameters, then=then, rollback=rollback)

    def read_weights(self, *, into: str, then: str, rollback: bool = False) -> State:
        """State that reads the current weights by target group; the load balancer does not keep their order."""
        selected = {
            f"{colour}.$": f"{_TARGET_GROUPS}[?(@.TargetGroupArn == '{target.targets}')].Weight"
            for colour, target in self.colours.items()
        }
        parameters = {"RuleArns": [self.rule]}
        return call(
            "elasticloadbalancingv2",
            "describeRules",
            parameters,
            select=selected,
            into=into,
            then=then,
            rollback=rollback,
        )

    def compare(self, seen: str, weights: str | Mapping[str, int], *, then: str, otherwise: str) -> State:
        """Choice state: `then` if the weights at the path `seen` are the expected ones."""
        tests = [
            {"Variable": f"{seen}.{colour}[0]", "NumericEqualsPath": f"{weights}.{colour}"}
            if isinstance(weights, str)
            else {"Variable": f"{seen}.{colour}[0]", "NumericEquals": weights[colour]}
            for colour in self.colours
        ]
        return choose(({"And": tests}, then), otherwise=otherwise)

    def pause_scaling(self, *, then: str) -> States:
        """States that pause the scaling of both environments, before anything is read that it could change."""
        first, second = COLOURS
        return {
            f"Pause-{first}": _scaling("suspend", self.colours[first], then=f"Pause-{second}"),
            f"Pause-{second}": _scaling("suspend", self.colours[second], then=then),
        }

    def settle_scaling(self, *, then: str, failed: str) -> States:
        """States after which the environment with all traffic scales, down to the fleet's minimum, and the other one
        does not and has no minimum. `failed` is next if a call failed, or if no environment has all traffic.
        """
        first, second = COLOURS
        states: States = {
            "SeeServing": self.read_weights(into="$.serving", then=f"Serves-{first}"),
            f"Serves-{first}": self.compare(
                "$.serving", self.whole(first), then=f"Rest-{second}", otherwise=f"Serves-{second}"
            ),
            f"Serves-{second}": self.compare("$.serving", self.whole(second), then=f"Rest-{first}", otherwise=failed),
        }
        for colour, other in (COLOURS, COLOURS[::-1]):
            states[f"Rest-{other}"] = _scaling("suspend", self.colours[other], then=f"Free-{other}")
            states[f"Free-{other}"] = _update(self.colours[other].group, {"MinSize": 0}, f"Limit-{colour}")
            states[f"Limit-{colour}"] = _update(self.colours[colour].group, {"MinSize": self.least}, f"Scale-{colour}")
            states[f"Scale-{colour}"] = _scaling("resume", self.colours[colour], then=then)
        return with_catch_all(states, failed, into="$.unsettled")


def empty(group: Mapping[str, str], *, then: str, rollback: bool = False) -> State:
    """State that scales a group to zero. `group` is its name, or the path of one: the parameter AutoScalingGroupName.

    One call sets minimum and capacity: capacity alone would be refused below the minimum of a group that scales.
    """
    parameters = {**group, "MinSize": 0, "DesiredCapacity": 0}
    return call("autoscaling", "updateAutoScalingGroup", parameters, then=then, rollback=rollback)


def _update(group: str, sizes: Mapping[str, int], then: str) -> State:
    return call("autoscaling", "updateAutoScalingGroup", {"AutoScalingGroupName": group, **sizes}, then=then)


def _scaling(verb: str, target: TargetGroup, *, then: str) -> State:
    parameters = {"AutoScalingGroupName": target.group, "ScalingProcesses": _SCALING}
    return call("autoscaling", f"{verb}Processes", parameters, then=then)


KEY: Final = "fleet"
WRITABLE: Final = ("owner", "signal", "since")  # attributes that the command writes; only state machines write `stable`
EXECUTION_ID: Final = "$$.Execution.Id"


@dataclass(frozen=True)
class Record:
    """States that read and write a fleet's record. Every write requires the lock."""

    table: str
    fleet: str

    @property
    def _key(self) -> dict[str, Any]:
        return {KEY: {"S": self.fleet}}

    def read(self, *, into: str, then: str) -> State:
        parameters = {"TableName": self.table, "Key": self._key, "ConsistentRead": True}
        return call("dynamodb", "getItem", parameters, into=into, then=then)

    def lock(self, *, then: str, catch: Mapping[str, str]) -> State:
        """Acquire the lock. Its owner may acquire it again, because the first response may have been lost."""
        return self._change(
            "SET #owner = :me, #since = :now",
            "attribute_not_exists(#owner) OR #owner = :me",
            {":me": EXECUTION_ID, ":now": "$$.State.EnteredTime"},
            then=then,
            catch=catch,
        )

    def take_over(self, owner: str, *, then: str, catch: Mapping[str, str]) -> State:
        """Take the lock over from an execution that has ended."""
        values = {":me": EXECUTION_ID, ":now": "$$.State.EnteredTime", ":dead": owner}
        return self._change("SET #owner = :me, #since = :now", "#owner = :dead", values, then=then, catch=catch)

    def point(self, colour: str, *, then: str) -> State:
        """Record the environment that has, or is about to have, all traffic."""
        values = {":colour": colour, ":me": EXECUTION_ID}
        return self._change("SET #stable = :colour", "#owner = :me", values, then=then)

    def claim(self, *, then: str, catch: Mapping[str, str]) -> State:
        """Check before each step that the lock is held and no abort is requested. The record shows which one failed."""
        condition = "#owner = :me AND (attribute_not_exists(#signal) OR #signal <> :end)"
        values = {":me": EXECUTION_ID, ":end": "States.Format('abort')"}
        return self._change("SET #owner = :me", condition, values, then=then, catch=catch)

    def consume(self, signal: str, *, then: str) -> State:
        """Remove a signal that applies to one step, unless a person has replaced it since."""
        condition, values = (
            "#owner = :me AND #signal = :word",
            {":me": EXECUTION_ID, ":word": f"States.Format('{signal}')"},
        )
        return self._change("REMOVE #signal", condition, values, then=then, catch={CONDITION_FAILED: then})

    def unlock(self, *, then: str, catch: Mapping[str, str] | None = None) -> State:
        return self._change(
            "REMOVE #owner, #since, #signal", "#owner = :me", {":me": EXECUTION_ID}, then=then, catch=catch
        )

    def _change(
        self,
        update: str,
        condition: str,
        values: Mapping[str, str],
        *,
        then: str,
        catch: Mapping[str, str] | None = None,
    ) -> State:
        names = [name for name in ("owner", "since", "signal", "stable") if f"#{name}" in f"{update} {condition}"]
        parameters = {
            "TableName": self.table,
            "Key": self._key,
            "UpdateExpression": update,
            "ConditionExpression": condition,
            "ExpressionAttributeNames": {f"#{name}": name for name in names},
            "ExpressionAttributeValues": {name: {"S.$": path} for name, path in values.items()},
        }
        return call("dynamodb", "updateItem", parameters, then=then, catch=catch, rollback=True)
