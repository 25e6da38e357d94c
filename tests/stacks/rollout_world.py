"""A fleet and what rolls it out, deployed on the local AWS; and people who use the fleet while that happens."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
from moto import mock_aws

from pipeline.canary.plan import Plan
from pipeline.config import Config, ServingFleet
from stacks.observe import ObserveStack
from stacks.rollout import RolloutStack
from tests.cloud.formation.provider import client_of
from tests.cloud.install import install
from tests.cloud.mends.refreshes import hosts_answer
from tests.stacks.fleet_world import World, configured, world
from tests.stacks.local import ACCOUNT, HERE, REGION, deploy

FLEET: Final = "search"
MACHINE: Final = f"arn:aws:states:{REGION}:{ACCOUNT}:stateMachine:demo-search-rollout"
TABLE: Final = "demo-search-rollout"
BAD: Final = "demo-search-release-bad"
CLOCK: Final = "demo-search-watchdog"
ENDED: Final = "demo-search-ended"
_OVER: Final = ("SUCCEEDED", "FAILED", "TIMED_OUT", "ABORTED")
# A minute of the plan is a second here, and nothing else is otherwise than on AWS.
PACE: Final = {"period": 1, "poll": 1, "settle": 1, "warm": 1, "warm_tries": 3, "final": 1, "patience": 30}


NEVER_SURE: Final = Plan.of((50, 100), bake_min=1, bake_max=1, alpha=1e-9, beta=1e-300).as_json()
WHO: Final = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_DEFAULT_REGION": REGION}


@dataclass(frozen=True)
class Rolled:
    fleet: World
    observe: ObserveStack
    rollout: RolloutStack


def rolled(folder: Path, *, more: str = 'command = ["server"]') -> Rolled:
    config = configured(folder, more=more)
    return Rolled(*_above(config, world(config, folder)))


def _above(config: Config, made: World) -> tuple[World, ObserveStack, RolloutStack]:
    app = made.serve.node.scope
    (fleet,) = config.fleets
    assert isinstance(fleet, ServingFleet)
    observe = ObserveStack(
        app,
        "demo-observe",
        project="demo",
        observe=config.observe,
        budget=config.budget,
        guards=config.rollout.guards,
        fleets=[made.serve.handle],
        hourly={},
        env=HERE,
    )
    rollout = RolloutStack(
        app,
        "demo-rollout-search",
        project="demo",
        fleet=fleet,
        serve=made.serve.handle,
        observe=observe.handle,
        store=made.store.handle,
        prefix="models/",
        alarms=config.rollout.guards.alarms,
        env=HERE,
    )
    return made, observe, rollout


def bootstrapped() -> None:
    _client("ssm").put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Value="30", Type="String")


def deployed(folder: Path) -> Rolled:
    """As the command would, which uploads assets first."""
    made = rolled(folder)
    bucket = f"cdk-hnb659fds-assets-{ACCOUNT}-{REGION}"
    s3 = _client("s3")
    s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
    for asset in Path(made.rollout.node.root.synth().directory).glob("asset.*.zip"):
        s3.upload_file(str(asset), bucket, asset.name.removeprefix("asset."))
    with hosts_answer("CONTINUE"):
        deploy(*made.fleet.stacks, made.observe, made.rollout)
    return made


@contextmanager
def fleet_there(folder: Path) -> "Iterator[Front]":
    """On a local AWS of its own, deployed."""
    install()
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        for name, value in WHO.items():
            patch.setenv(name, value)
        bootstrapped()
        deployed(folder)
        yield Front.found()


def _client(service: str) -> Any:
    """One for all calls: making one takes longer than they do."""
    return client_of(service, REGION)


# What a test sees


def rule() -> str:
    elb = _client("elbv2")
    (balancer,) = elb.describe_load_balancers()["LoadBalancers"]
    (listener,) = elb.describe_listeners(LoadBalancerArn=balancer["LoadBalancerArn"])["Listeners"]
    rules = elb.describe_rules(ListenerArn=listener["ListenerArn"])["Rules"]
    return str(next(each["RuleArn"] for each in rules if each["Priority"] == "100"))


@dataclass(frozen=True)
class Front:
    """The load balancer, as metrics and people know it."""

    rule: str
    balancer: str
    colours: Mapping[str, str]  # by target group

    @classmethod
    def found(cls) -> "Front":
        elb = _client("elbv2")
        (balancer,) = elb.describe_load_balancers()["LoadBalancers"]
        arns = {}
        for colour in ("blue", "green"):
            groups = _client("autoscaling").describe_auto_scaling_groups(
                AutoScalingGroupNames=[f"demo-search-{colour}"]
            )
            arns[groups["AutoScalingGroups"][0]["TargetGroupARNs"][0]] = colour
        return cls(rule(), balancer["LoadBalancerArn"].partition("loadbalancer/")[2], arns)

    def weights(self) -> dict[str, int]:
        (found,) = _client("elbv2").describe_rules(RuleArns=[self.rule])["Rules"]
        groups = found["Actions"][0]["ForwardConfig"]["TargetGroups"]
        return {self.colours[each["TargetGroupArn"]]: each["Weight"] for each in groups}

    def weigh(self, weights: Mapping[str, int]) -> None:
        """By hand."""
        groups = [{"TargetGroupArn": arn, "Weight": weights[colour]} for arn, colour in self.colours.items()]
        forward = {"Type": "forward", "ForwardConfig": {"TargetGroups": groups}}
        _client("elbv2").modify_rule(RuleArn=self.rule, Actions=[forward])


def record() -> dict[str, str]:
    found = _client("dynamodb").get_item(TableName=TABLE, Key={"fleet": {"S": FLEET}}).get("Item", {})
    return {name: value["S"] for name, value in found.items()}


def stable() -> str:
    return record().get("stable", "blue")


def other(colour: str) -> str:
    return {"blue": "green", "green": "blue"}[colour]


def passed(execution: str) -> list[str]:
    """The states that an execution has entered."""
    pages = _client("stepfunctions").get_paginator("get_execution_history").paginate(executionArn=execution)
    details = [each.get("stateEnteredEventDetails") for page in pages for each in page["events"]]
    return [each["name"] for each in details if each]


def watched() -> bool:
    """Whether a watchdog is at work."""
    machine = MACHINE.replace("rollout", "watchdog")
    return bool(_client("stepfunctions").list_executions(stateMachineArn=machine, statusFilter="RUNNING")["executions"])


def evidence(execution: str) -> list[dict[str, Any]]:
    """What was kept of each look."""
    s3, folder = _client("s3"), f"models/rollouts/search/{execution.rpartition(':')[2]}/0"
    bucket = next(each["Name"] for each in s3.list_buckets()["Buckets"] if "artifacts" in each["Name"])
    keys = [each["Key"] for each in s3.list_objects_v2(Bucket=bucket, Prefix=folder)["Contents"]]
    kept = [json.load(s3.get_object(Bucket=bucket, Key=key)["Body"]) for key in sorted(keys)]
    return [json.loads(each["text"]) for each in kept]


def sizes() -> dict[str, int]:
    groups = _client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    return {each["AutoScalingGroupName"].rpartition("-")[2]: each["DesiredCapacity"] for each in groups}


# What a person does


def start(**changes: Any) -> str:
    """From whatever is stable to the other colour."""
    plan = Plan.of((50, 100), bake_min=1, bake_max=20).as_json()
    given = {
        "from": stable(),
        "to": other(stable()),
        "artifact": "a" * 64,
        "channel": "production",
        "plan": plan,
        "pace": PACE,
    }
    asked = json.dumps(given | changes)
    return str(_client("stepfunctions").start_execution(stateMachineArn=MACHINE, input=asked)["executionArn"])


def stop(execution: str) -> None:
    _client("stepfunctions").stop_execution(executionArn=execution)


def signal(word: str) -> None:
    _client("dynamodb").update_item(
        TableName=TABLE,
        Key={"fleet": {"S": FLEET}},
        UpdateExpression="SET #signal = :word",
        ConditionExpression="attribute_exists(#owner)",
        ExpressionAttributeNames={"#signal": "signal", "#owner": "owner"},
        ExpressionAttributeValues={":word": {"S": word}},
    )


def wake_the_clock() -> None:
    _client("events").enable_rule(Name=CLOCK)


def given_away() -> None:
    """The lock, to an execution that is none."""
    _client("dynamodb").update_item(
        TableName=TABLE,
        Key={"fleet": {"S": FLEET}},
        UpdateExpression="SET #owner = :other",
        ExpressionAttributeNames={"#owner": "owner"},
        ExpressionAttributeValues={":other": {"S": f"{MACHINE.replace('stateMachine', 'execution')}:of-somebody-else"}},
    )


def ended(execution: str, within: float = 240) -> dict[str, Any]:
    def over() -> dict[str, Any] | None:
        told: dict[str, Any] = _client("stepfunctions").describe_execution(executionArn=execution)
        return told if told["status"] in _OVER else None

    found: dict[str, Any] = until(over, within)
    return found


def outcome(execution: str) -> str:
    told = ended(execution)
    assert told["status"] == "SUCCEEDED", (told.get("error"), told.get("cause"))
    return str(json.loads(told["output"])["outcome"])


def until(met: Any, within: float = 120) -> Any:
    deadline = time.monotonic() + within
    while not (found := met()):
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.05)
    return found


# People who use the fleet, and its agents


def answer_hooks() -> None:
    """Instances that have what they serve."""
    scaling = _client("autoscaling")
    for group in scaling.describe_auto_scaling_groups()["AutoScalingGroups"]:
        for each in group["Instances"]:
            if each["LifecycleState"] == "Pending:Wait":
                scaling.complete_lifecycle_action(
                    LifecycleHookName="demo-search-ready",
                    AutoScalingGroupName=group["AutoScalingGroupName"],
                    InstanceId=each["InstanceId"],
                    LifecycleActionResult="CONTINUE",
                )


@dataclass
class Traffic:
    """Requests that go where the rule sends them, and what the load balancer counts of them: each second's counts are
    published when it is over. All of a version's requests take equally long.
    """

    front: Front
    errors: Mapping[str, float]  # by colour, the share that fails
    requests: int = 400  # a second
    seconds: Mapping[str, float] = field(default_factory=dict)  # by colour, how long a request takes
    answers: bool = True  # the agents of new instances do
    seen: list[dict[str, int]] = field(default_factory=list)  # all weights that there were
    lost: bool = False  # whether anybody was ever sent to a colour without instances

    def look(self) -> dict[str, int]:
        weights = self.front.weights()
        if not self.seen or self.seen[-1] != weights:
            self.seen.append(weights)
        there = sizes()
        self.lost = self.lost or any(weight and not there[colour] for colour, weight in weights.items())
        return weights

    def second(self, at: int) -> None:
        weights = self.look()
        total = sum(weights.values())
        data: list[dict[str, Any]] = []
        for targets, colour in self.front.colours.items():
            there = self.requests * weights[colour] // total
            failed = round(there * self.errors[colour])
            if there:
                data += self._counted(targets, at, "RequestCount", there)
                data += self._counted(targets, at, "HTTPCode_Target_5XX_Count", failed)
                data += self._counted(targets, at, "TargetResponseTime", self.seconds.get(colour, 0.1), there)
        if data:
            _client("cloudwatch").put_metric_data(Namespace="AWS/ApplicationELB", MetricData=data)

    def _counted(self, targets: str, at: int, name: str, value: float, times: int = 1) -> list[dict[str, Any]]:
        if not value:
            return []  # nothing happened, so nothing is published
        dimensions = [
            {"Name": "LoadBalancer", "Value": self.front.balancer},
            {"Name": "TargetGroup", "Value": targets.rpartition(":")[2]},
        ]
        when = datetime.fromtimestamp(at, UTC)
        counted = {"Values": [value], "Counts": [times]} if times > 1 else {"Value": value}
        return [{"MetricName": name, "Dimensions": dimensions, "Timestamp": when, **counted}]


@contextmanager
def traffic(front: Front, **how: Any) -> Iterator[Traffic]:
    flowing, made = threading.Event(), Traffic(front, **how)

    def flow() -> None:
        at = int(time.time())
        while not flowing.is_set():
            if time.time() >= at + 0.9:
                if made.answers:
                    answer_hooks()
                made.second(at)
                at += 1
            flowing.wait(0.02)

    thread = threading.Thread(target=flow, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        flowing.set()
        thread.join()
        made.look()
