"""People who use a fleet on the local AWS, and the agents on its instances.

Requests go where the listener's rule sends them at that moment; how many fail, and how long they take, is drawn.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from tests.localaws.formation.provider import client_of

_NAMESPACE: Final = "AWS/ApplicationELB"
_MEDIAN, _SPREAD = 0.02, 0.5  # seconds, and sigma of the logarithm
_FINEST: Final = 0.001  # seconds: what takes equally long is one value


@dataclass(frozen=True)
class Fleet:
    """What the load balancer's metrics call it, and its target groups by colour."""

    region: str
    name: str  # PROJECT-FLEET
    rule: str
    balancer: str
    targets: Mapping[str, str]

    @classmethod
    def found(cls, region: str, name: str) -> "Fleet":
        balancing, scaling = client_of("elbv2", region), client_of("autoscaling", region)
        groups = {colour: f"{name}-{colour}" for colour in ("blue", "green")}
        found = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=list(groups.values()))["AutoScalingGroups"]
        by_name = {each["AutoScalingGroupName"]: each["TargetGroupARNs"][0] for each in found}
        targets = {colour: by_name[group] for colour, group in groups.items()}
        (told,) = balancing.describe_target_groups(TargetGroupArns=[targets["blue"]])["TargetGroups"]
        (balancer,) = told["LoadBalancerArns"]
        (listener,) = balancing.describe_listeners(LoadBalancerArn=balancer)["Listeners"]
        rules = balancing.describe_rules(ListenerArn=listener["ListenerArn"])["Rules"]
        rule = next(each["RuleArn"] for each in rules if not each["IsDefault"])
        return cls(region, name, rule, balancer.partition("loadbalancer/")[2], targets)

    def weights(self) -> dict[str, int]:
        (rule,) = client_of("elbv2", self.region).describe_rules(RuleArns=[self.rule])["Rules"]
        groups = {
            each["TargetGroupArn"]: each["Weight"] for each in rule["Actions"][0]["ForwardConfig"]["TargetGroups"]
        }
        return {colour: groups[targets] for colour, targets in self.targets.items()}

    def weigh(self, weights: Mapping[str, int]) -> None:
        """By hand."""
        groups = [{"TargetGroupArn": self.targets[colour], "Weight": weight} for colour, weight in weights.items()]
        forward = {"Type": "forward", "ForwardConfig": {"TargetGroups": groups}}
        client_of("elbv2", self.region).modify_rule(RuleArn=self.rule, Actions=[forward])

    def sizes(self) -> dict[str, int]:
        return {each["AutoScalingGroupName"].rpartition("-")[2]: each["DesiredCapacity"] for each in self._groups()}

    def answer_hooks(self) -> None:
        """As the agents of new instances do when they have what they serve."""
        for group in self._groups():
            for each in group["Instances"]:
                if each["LifecycleState"] == "Pending:Wait":
                    client_of("autoscaling", self.region).complete_lifecycle_action(
                        LifecycleHookName=f"{self.name}-ready",
                        AutoScalingGroupName=group["AutoScalingGroupName"],
                        InstanceId=each["InstanceId"],
                        LifecycleActionResult="CONTINUE",
                    )

    def _groups(self) -> list[dict[str, Any]]:
        names = [f"{self.name}-{colour}" for colour in self.targets]
        told = client_of("autoscaling", self.region).describe_auto_scaling_groups(AutoScalingGroupNames=names)
        found: list[dict[str, Any]] = told["AutoScalingGroups"]
        return found


@dataclass
class Visitors:
    """`errors` is by colour the share of requests that fail, and may be changed at any time."""

    fleet: Fleet
    errors: dict[str, float]
    requests: int = 400  # a second
    answers: bool = True  # the agents of new instances do
    seen: list[dict[str, int]] = field(default_factory=list)  # all weights that there were
    lost: bool = False  # whether anybody was ever sent to a colour without instances
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def look(self) -> dict[str, int]:
        weights = self.fleet.weights()
        if not self.seen or self.seen[-1] != weights:
            self.seen.append(weights)
        there = self.fleet.sizes()
        self.lost = self.lost or any(weight and not there[colour] for colour, weight in weights.items())
        return weights

    def second(self, at: int) -> None:
        """Its counts are published when it is over, as a load balancer does with minutes."""
        if self.answers:
            self.fleet.answer_hooks()
        weights = self.look()
        data: list[dict[str, Any]] = []
        for colour, weight in weights.items():
            there = int(self._random.binomial(self.requests, weight / sum(weights.values())))
            if there:
                data += self._counts(colour, at, there)
        if data:
            client_of("cloudwatch", self.fleet.region).put_metric_data(Namespace=_NAMESPACE, MetricData=data)

    def _counts(self, colour: str, at: int, there: int) -> Iterator[dict[str, Any]]:
        dimensions = {"LoadBalancer": self.fleet.balancer, "TargetGroup": self.fleet.targets[colour].rpartition(":")[2]}
        about = {
            "Dimensions": [{"Name": name, "Value": value} for name, value in dimensions.items()],
            "Timestamp": datetime.fromtimestamp(at, UTC),
        }
        yield {"MetricName": "RequestCount", "Value": there, **about}
        failed = int(self._random.binomial(there, self.errors[colour]))
        for kind, count in (("2XX", there - failed), ("5XX", failed)):
            if count:
                yield {"MetricName": f"HTTPCode_Target_{kind}_Count", "Value": count, **about}
        taken = np.ceil(self._random.lognormal(np.log(_MEDIAN), _SPREAD, there) / _FINEST).astype(int)
        values, counts = np.unique(taken, return_counts=True)
        seconds = (values * _FINEST).tolist()
        yield {"MetricName": "TargetResponseTime", "Values": seconds, "Counts": counts.tolist(), **about}


@contextmanager
def visitors(
    fleet: Fleet, errors: dict[str, float], *, requests: int = 400, answers: bool = True
) -> Iterator[Visitors]:
    over, made = threading.Event(), Visitors(fleet, errors, requests, answers)

    def come() -> None:
        at = int(time.time())
        while not over.wait(max(0.0, at + 1 - time.time())):
            made.second(at)
            at += 1

    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        over.set()
        thread.join()
        made.look()
