"""Simulated users of a fleet on the local AWS, and the agents on its instances.

Requests go to the target groups by the current weights of the listener's rule; failures and response times are random.
A request without a response of its target is in RequestCount of the target group and in no other metric of it, as on
AWS: the load balancer returns 502 at once if the target closes the connection, and 504 after its idle timeout if the
target hangs, and counts these for itself.

`inhabited` gives agents and users to every fleet of an account, for the server of `make cloud-up`.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from botocore.exceptions import ClientError
from moto.cloudwatch.models import cloudwatch_backends
from moto.core import DEFAULT_ACCOUNT_ID

from tests.localaws.formation.provider import client_of

_NAMESPACE: Final = "AWS/ApplicationELB"
_MEDIAN, _SPREAD = 0.02, 0.5  # median in seconds, and standard deviation of the logarithm
_FINEST: Final = 0.001  # resolution of response times in seconds
_USUAL: Final = 0.002  # share of failed requests
_BUSY: Final = 500  # requests per second
_HISTORY: Final = 120  # seconds
_SHARE: Final = "localaws:errors"  # the tag of an Auto Scaling group with its share of failed requests


@dataclass(frozen=True)
class Fleet:
    """A deployed fleet: the name of its load balancer in metrics, and its target groups by colour."""

    region: str
    name: str  # PROJECT-FLEET
    rule: str
    balancer: str
    targets: Mapping[str, str]

    @classmethod
    def find(cls, region: str, name: str) -> "Fleet":
        balancing, scaling = client_of("elbv2", region), client_of("autoscaling", region)
        groups = {colour: f"{name}-{colour}" for colour in ("blue", "green")}
        auto_scaling_groups = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=list(groups.values()))[
            "AutoScalingGroups"
        ]
        by_name = {entry["AutoScalingGroupName"]: entry["TargetGroupARNs"][0] for entry in auto_scaling_groups}
        targets = {colour: by_name[group] for colour, group in groups.items()}
        (target_group,) = balancing.describe_target_groups(TargetGroupArns=[targets["blue"]])["TargetGroups"]
        (balancer,) = target_group["LoadBalancerArns"]
        (listener,) = balancing.describe_listeners(LoadBalancerArn=balancer)["Listeners"]
        rules = balancing.describe_rules(ListenerArn=listener["ListenerArn"])["Rules"]
        rule = next(entry["RuleArn"] for entry in rules if not entry["IsDefault"])
        return cls(region, name, rule, balancer.partition("loadbalancer/")[2], targets)

    def weights(self) -> dict[str, int]:
        (rule,) = client_of("elbv2", self.region).describe_rules(RuleArns=[self.rule])["Rules"]
        groups = {
            target_group["TargetGroupArn"]: target_group["Weight"]
            for target_group in rule["Actions"][0]["ForwardConfig"]["TargetGroups"]
        }
        return {colour: groups[targets] for colour, targets in self.targets.items()}

    def weigh(self, weights: Mapping[str, int]) -> None:
        """Set the weights by hand."""
        groups = [{"TargetGroupArn": self.targets[colour], "Weight": weight} for colour, weight in weights.items()]
        forward = {"Type": "forward", "ForwardConfig": {"TargetGroups": groups}}
        client_of("elbv2", self.region).modify_rule(RuleArn=self.rule, Actions=[forward])

    def sizes(self) -> dict[str, int]:
        return {group["AutoScalingGroupName"].rpartition("-")[2]: group["DesiredCapacity"] for group in self._groups()}

    def answer_hooks(self) -> None:
        """Complete the lifecycle hooks, as the agents of new instances do when they are ready."""
        for group in self._groups():
            for instance in group["Instances"]:
                if instance["LifecycleState"] == "Pending:Wait":
                    client_of("autoscaling", self.region).complete_lifecycle_action(
                        LifecycleHookName=f"{self.name}-ready",
                        AutoScalingGroupName=group["AutoScalingGroupName"],
                        InstanceId=instance["InstanceId"],
                        LifecycleActionResult="CONTINUE",
                    )

    def _groups(self) -> list[dict[str, Any]]:
        names = [f"{self.name}-{colour}" for colour in self.targets]
        response = client_of("autoscaling", self.region).describe_auto_scaling_groups(AutoScalingGroupNames=names)
        auto_scaling_groups: list[dict[str, Any]] = response["AutoScalingGroups"]
        return auto_scaling_groups


@dataclass
class SimulatedUsers:
    """A source of requests; `errors` is the share of failed requests by colour, and may be changed at any time."""

    fleet: Fleet
    errors: dict[str, float]
    requests: int = 400  # requests per second
    crashes: dict[str, float] = field(default_factory=dict)  # share of requests whose connection is closed, by colour
    hangs: dict[str, float] = field(default_factory=dict)  # share of requests without a response, by colour
    idle: int = 1  # seconds of the load balancer's idle timeout: a minute of the plan is a second
    answers: bool = True  # the agents of new instances complete their hooks
    weight_history: list[dict[str, int]] = field(default_factory=list)  # all different weights in order
    lost: bool = False  # whether a request was ever sent to a colour without instances
    _late: dict[int, int] = field(default_factory=dict)  # 504 by second
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def sample_weights(self) -> dict[str, int]:
        weights = self.fleet.weights()
        if not self.weight_history or self.weight_history[-1] != weights:
            self.weight_history.append(weights)
        there = self.fleet.sizes()
        self.lost = self.lost or any(weight and not there[colour] for colour, weight in weights.items())
        return weights

    def second(self, at: int) -> None:
        """Publish the counts of one second after its end, as a load balancer does with minutes."""
        if self.answers:
            self.fleet.answer_hooks()
        weights = self.sample_weights()
        data: list[dict[str, Any]] = []
        for colour, weight in weights.items():
            there = int(self._random.binomial(self.requests, weight / sum(weights.values())))
            if there:
                data += self._counts(colour, at, there)
        if late := self._late.pop(at, 0):
            data.append(returned(self.fleet, "504", at, late))
        if data:
            client_of("cloudwatch", self.fleet.region).put_metric_data(Namespace=_NAMESPACE, MetricData=data)

    def _counts(self, colour: str, at: int, requests: int) -> Iterator[dict[str, Any]]:
        shares = (self.crashes.get(colour, 0.0), self.hangs.get(colour, 0.0))
        crashed, hung, answered = self._random.multinomial(requests, [*shares, 1 - sum(shares)]).tolist()
        if crashed:
            yield returned(self.fleet, "502", at, crashed)
        self._late[at + self.idle] = self._late.get(at + self.idle, 0) + hung
        failed = int(self._random.binomial(answered, self.errors[colour]))
        times = self._random.lognormal(np.log(_MEDIAN), _SPREAD, answered).tolist()
        yield from counted(self.fleet, colour, at, requests, {"2XX": answered - failed, "5XX": failed}, times)


def counted(
    fleet: Fleet, colour: str, at: int, requests: int, kinds: Mapping[str, int], times: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """The metrics of a target group for one second: its requests, and of those that it has answered the kinds and the
    response times."""
    dimensions = {"LoadBalancer": fleet.balancer, "TargetGroup": fleet.targets[colour].rpartition(":")[2]}
    common = {
        "Dimensions": [{"Name": name, "Value": value} for name, value in dimensions.items()],
        "Timestamp": datetime.fromtimestamp(at, UTC),
    }
    yield {"MetricName": "RequestCount", "Value": requests, **common}
    for kind, count in kinds.items():
        if count:
            yield {"MetricName": f"HTTPCode_Target_{kind}_Count", "Value": count, **common}
    if len(times):
        values, counts = np.unique(np.ceil(np.asarray(times) / _FINEST).astype(int), return_counts=True)
        seconds = (values * _FINEST).tolist()
        yield {"MetricName": "TargetResponseTime", "Values": seconds, "Counts": counts.tolist(), **common}


def returned(fleet: Fleet, code: str, at: int, count: int) -> dict[str, Any]:
    """A count of the load balancer's own responses."""
    return {
        "MetricName": f"HTTPCode_ELB_{code}_Count",
        "Value": count,
        "Dimensions": [{"Name": "LoadBalancer", "Value": fleet.balancer}],
        "Timestamp": datetime.fromtimestamp(at, UTC),
    }


@contextmanager
def visitors(
    fleet: Fleet,
    errors: dict[str, float],
    *,
    requests: int = 400,
    answers: bool = True,
    crashes: dict[str, float] | None = None,
    hangs: dict[str, float] | None = None,
) -> Iterator[SimulatedUsers]:
    over = threading.Event()
    users = SimulatedUsers(fleet, errors, requests, crashes=crashes or {}, hangs=hangs or {}, answers=answers)

    def run() -> None:
        at = int(time.time())
        while not over.wait(max(0.0, at + 1 - time.time())):
            users.second(at)
            at += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield users
    finally:
        over.set()
        thread.join()
        users.sample_weights()


@contextmanager
def inhabited(region: str) -> Iterator[None]:
    """Agents and users of every serving fleet in the region, also of those that are deployed or deleted meanwhile.

    The tag `localaws:errors` of an Auto Scaling group is the share of requests to it that fail.
    """
    over = threading.Event()
    thread = threading.Thread(target=_inhabit, args=(region, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _inhabit(region: str, over: threading.Event) -> None:
    users: dict[str, SimulatedUsers] = {}
    at = int(time.time())
    known: list[Any] = cloudwatch_backends[DEFAULT_ACCOUNT_ID][region].metric_data
    while not over.wait(max(0.0, at + 1 - time.time())):
        fleets = _fleets(region)
        for name in users.keys() - fleets:
            del users[name]
        for name, errors in fleets.items():
            # A deployment may have made only a part of the fleet, and a deletion may have left only a part.
            try:
                if name not in users:
                    users[name] = SimulatedUsers(Fleet.find(region, name), errors, _BUSY)
                users[name].errors = errors
                users[name].second(at)
            except (ClientError, LookupError, StopIteration, ValueError):
                users.pop(name, None)
        if not any(all(each.fleet.sizes().values()) for each in users.values()):  # no rollout is under way
            _forget(known, at)
        at += 1


def _forget(known: list[Any], at: int) -> None:
    """Keep the metrics of the last minutes only: moto has an object of a kilobyte for each request."""
    oldest = datetime.fromtimestamp(at - _HISTORY, UTC)
    recent = (number for number, datum in enumerate(known) if datum.timestamp.replace(tzinfo=UTC) >= oldest)
    del known[: next(recent, len(known))]


def _fleets(region: str) -> dict[str, dict[str, float]]:
    """The share of failed requests, by the fleet's name and the colour."""
    pages = client_of("autoscaling", region).get_paginator("describe_auto_scaling_groups").paginate()
    groups = {group["AutoScalingGroupName"]: group["Tags"] for page in pages for group in page["AutoScalingGroups"]}
    errors = {
        name: next((float(tag["Value"]) for tag in tags if tag["Key"] == _SHARE), _USUAL)
        for name, tags in groups.items()
    }
    names = [name.removesuffix("-blue") for name in sorted(groups) if name.endswith("-blue")]
    return {
        name: {colour: errors[f"{name}-{colour}"] for colour in ("blue", "green")}
        for name in names
        if f"{name}-green" in groups
    }
