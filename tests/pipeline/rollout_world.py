"""A fleet whose state machine only waits, or ends as ordered, for tests of the commands.

Rule, record and groups are those of the stacks. The machine's definition has the parts of the real one that the
commands read; tests/stacks compares the two.
"""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from moto import mock_aws
from moto.cloudwatch.models import cloudwatch_backends
from moto.core import DEFAULT_ACCOUNT_ID

from nxpipe.artifact_store import Published, open_store
from nxpipe.pipeline.canary.handler import handle
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.root import serving_fleet
from nxpipe.pipeline.rollout.aws import StateMachine
from nxpipe.pipeline.rollout.input import RolloutInput
from tests.agent.project import CONFIG
from tests.artifact_store.samples import MODEL, publish_verified, put
from tests.localaws.install import install
from tests.pipeline.command import Answer
from tests.pipeline.in_process import InProcess

REGION: Final = "us-east-2"
IDENTITY: Final = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_DEFAULT_REGION": REGION}


@dataclass
class Fleet:
    """A fleet with three artifacts in its store; its channel serves the first."""

    project: str
    nxpipe: InProcess
    artifacts: list[Published]
    front: dict[str, Any]
    looks: dict[str, dict[str, Any]] = field(default_factory=dict)  # the judge's last evaluations

    @property
    def machine(self) -> str:
        return f"arn:aws:states:{REGION}:123456789012:stateMachine:{self.table}"

    @property
    def table(self) -> str:
        return f"{self.project}-search-rollout"

    # Actions of a user

    def rollout(self, *words: str) -> Answer:
        return self.nxpipe("rollout", *words)

    def start(self, version: int, *words: str) -> Answer:
        return self.rollout("start", "search", self.name(version), *words)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.rollout("status", "search", "--json").out)
        return document

    def name(self, version: int) -> str:
        return f"{MODEL}@{self.artifacts[version].request_key[:12]}"

    def served(self, channel: str) -> str:
        (name,) = self.all_served(channel)
        return name

    def all_served(self, channel: str) -> list[str]:
        document = json.loads(self.nxpipe("channel", "show", channel, "--json").out)
        artifacts = (document[0] if isinstance(document, list) else document)["artifacts"]
        return [f"{artifact['model_id']}@{artifact['request_key'][:12]}" for artifact in artifacts]

    def publish(self, model: str) -> str:
        """Publish an artifact of a model that another fleet serves."""
        store = open_store("store")
        made = publish_verified(store, put(store, request=9, model=model))
        return f"{model}@{made.request_key[:12]}"

    # Behaviour of the machines

    def ends(self, states: dict[str, Any] | None = None) -> None:
        """From now on an execution passes through these states, or through one that waits."""
        boto3.client("stepfunctions").update_state_machine(stateMachineArn=self.machine, definition=self.text(states))

    def says(self, outcome: str, reason: str) -> None:
        done = {"Type": "Pass", "Result": {"outcome": outcome, "reason": reason}, "End": True}
        unlock = {
            "TableName": self.table,
            "Key": {"fleet": {"S": "search"}},
            "UpdateExpression": "REMOVE #owner",
            "ExpressionAttributeNames": {"#owner": "owner"},
        }
        service = "arn:aws:states:::aws-sdk:dynamodb:updateItem"
        task = {"Type": "Task", "Resource": service, "Parameters": unlock, "ResultPath": None, "Next": "Done"}
        self.ends({"Unlock": task, "Done": done})

    def write_record(self, **values: str) -> None:
        item = {name: {"S": value} for name, value in {"fleet": "search", **values}.items()}
        boto3.client("dynamodb").put_item(TableName=self.table, Item=item)

    def record(self) -> dict[str, str]:
        found = boto3.client("dynamodb").get_item(TableName=self.table, Key={"fleet": {"S": "search"}}).get("Item", {})
        return {name: value["S"] for name, value in found.items()}

    def execution(self) -> dict[str, Any]:
        """The newest execution, after moto has updated its status."""
        states = boto3.client("stepfunctions")
        newest = states.list_executions(stateMachineArn=self.machine)["executions"][0]["executionArn"]
        response: dict[str, Any] = states.describe_execution(executionArn=newest)
        return response

    def running(self) -> list[str]:
        states = boto3.client("stepfunctions")
        found = states.list_executions(stateMachineArn=self.machine, statusFilter="RUNNING")["executions"]
        return [entry["executionArn"] for entry in found]

    def stop_all(self) -> None:
        for entry in self.running():
            boto3.client("stepfunctions").stop_execution(executionArn=entry)
        while self.running():
            time.sleep(0.02)

    def until_ended(self) -> dict[str, Any]:
        while (execution := self.execution())["status"] == "RUNNING":
            time.sleep(0.02)
        return execution

    def weigh(self, green: int) -> None:
        groups = [
            {"TargetGroupArn": self.front["colours"][colour]["targets"], "Weight": weight}
            for colour, weight in (("blue", 100 - green), ("green", green))
        ]
        action = {"Type": "forward", "ForwardConfig": {"TargetGroups": groups}}
        boto3.client("elbv2").modify_rule(RuleArn=self.front["rule"], Actions=[action])

    def count(self, requests: int, seconds: int, *, answered: int | None = None, status: str = "2XX") -> None:
        """Blue's requests in each of the last seconds, and its responses: to all of them, or to as many."""
        responses = requests if answered is None else answered
        counts = {"RequestCount": requests, f"HTTPCode_Target_{status}_Count": responses}
        series = {"LoadBalancer": self.front["balancer"], "TargetGroup": self.front["colours"]["blue"]["series"]}
        dimensions = [{"Name": name, "Value": value} for name, value in series.items()]
        data = [
            {"MetricName": metric, "Value": value, "Dimensions": dimensions, "Timestamp": time.time() - ago}
            for metric, value in counts.items()
            for ago in range(1, seconds + 1)
        ]
        boto3.client("cloudwatch").put_metric_data(Namespace="AWS/ApplicationELB", MetricData=data)

    def look(self, minutes: int, requests: tuple[int, int] = (0, 0), failed: tuple[int, int] = (0, 0)) -> None:
        """Run the real judge at this minute of the step; each minute had these counts of green and blue. Its evaluation
        is stored as by the machine."""
        execution = self.execution()
        name, asked = execution["name"], RolloutInput.from_text(execution["input"])
        assert asked is not None
        answer = self.looks.get(name) or self._open(name, asked)
        first = 1_000_000 * 60
        good = (requests[0] - failed[0], requests[1] - failed[1])
        values = {"requests": requests, "2xx": good, "5xx": failed}
        metrics = [
            {
                "Id": f"{arm}_{what}",
                "Timestamps": [_time(first + 60 * minute) for minute in range(minutes)],
                "Values": [float(counts[side])] * minutes,
            }
            for what, counts in values.items()
            for side, arm in enumerate(("canary", "stable"))
        ]
        seen = {
            "carried": answer["carried"],
            "metrics": metrics,
            "alarms": _QUIET,
            "record": {},
            "at": _time(first + 60 * minutes + 30),
        }
        self.looks[name] = self._keep(json.loads(json.dumps(handle({"looks": seen}, None))))

    def _open(self, name: str, asked: RolloutInput) -> dict[str, Any]:
        sizes = {colour: {"desired": 2 if colour == asked.old else 0, "most": 4} for colour in ("blue", "green")}
        weights = {colour: [100 if colour == asked.old else 0] for colour in ("blue", "green")}
        state = json.loads(asked.text()) | {"weights": weights, "alarms": _QUIET, **sizes}
        opened = handle({"opens": {"fleet": self.front, "state": state, "name": name, "at": _time(0)}}, None)
        if "record" in opened:
            self._keep(opened)
        return handle({"begins": {"step": 0, "carried": opened["carried"], "at": _time(1_000_000 * 60 - 90)}}, None)

    @staticmethod
    def _keep(answer: dict[str, Any]) -> dict[str, Any]:
        path = Path("store/rollouts/search", answer["key"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(answer["record"]))
        return answer

    def state_machine(self) -> StateMachine:
        config = load_config(Path("nxpipe.toml"), {})
        return StateMachine(config, serving_fleet(config, "search", "FLEET"))

    def text(self, states: dict[str, Any] | None) -> str:
        waits = {"Waits": {"Type": "Wait", "Seconds": 3600, "End": True}}
        after = states or waits
        known = {"Payload": {"opens": {"fleet": self.front}}}
        opens = {"Type": "Pass", "Parameters": known, "ResultPath": None, "Next": next(iter(after))}
        return json.dumps({"StartAt": "Open", "States": {"Open": opens, **after}})


_QUIET: Final[dict[str, list[str]]] = {
    "metric_names": [],
    "metric_states": [],
    "composite_names": [],
    "composite_states": [],
}


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


@pytest.fixture(scope="module")
def front() -> Iterator[dict[str, Any]]:
    """A load balancer on a local AWS, for all tests of a file."""
    install()
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        for name, value in IDENTITY.items():
            patch.setenv(name, value)
        yield make_front()


@pytest.fixture
def fleet(nxpipe: InProcess, front: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.chdir(tmp_path)
    for name, value in IDENTITY.items():  # removed before each test
        monkeypatch.setenv(name, value)
    made = make_fleet(nxpipe, front)
    yield made
    made.stop_all()


_numbers: Final = itertools.count()


def make_fleet(nxpipe: InProcess, front: dict[str, Any]) -> Fleet:
    """A fleet in a project of its own, behind a load balancer used by other tests before, without their counts."""
    cloudwatch_backends[DEFAULT_ACCOUNT_ID][REGION].metric_data.clear()
    store, project = open_store("store"), f"demo{next(_numbers)}"
    Path("nxpipe.toml").write_text(CONFIG.replace('name = "demo"', f'name = "{project}"\nregion = "{REGION}"'))
    published = [publish_verified(store, put(store, request=number)) for number in range(3)]
    made = Fleet(project, nxpipe, published, front)
    boto3.client("dynamodb").create_table(
        TableName=made.table,
        KeySchema=[{"AttributeName": "fleet", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "fleet", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    role = "arn:aws:iam::123456789012:role/nobody"
    boto3.client("stepfunctions").create_state_machine(name=made.table, definition=made.text(None), roleArn=role)
    made.weigh(green=0)
    assert nxpipe("promote", made.name(0), "--channel", "production").code == 0
    return made


def make_front() -> dict[str, Any]:
    """A load balancer with one rule that weights two target groups."""
    ec2, balancing = boto3.client("ec2"), boto3.client("elbv2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnets = [
        ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{n}.0/24", AvailabilityZone=f"{REGION}{zone}")["Subnet"][
            "SubnetId"
        ]
        for n, zone in enumerate("ab")
    ]
    (balancer,) = balancing.create_load_balancer(Name="search", Subnets=subnets)["LoadBalancers"]
    targets = {}
    for colour in ("blue", "green"):
        (made,) = balancing.create_target_group(Name=colour, Protocol="HTTP", Port=80, VpcId=vpc)["TargetGroups"]
        targets[colour] = made["TargetGroupArn"]
    nobody = {"Type": "fixed-response", "FixedResponseConfig": {"StatusCode": "503"}}
    arn = balancer["LoadBalancerArn"]
    (listener,) = balancing.create_listener(LoadBalancerArn=arn, Protocol="HTTP", Port=80, DefaultActions=[nobody])[
        "Listeners"
    ]
    groups = [{"TargetGroupArn": targets["blue"], "Weight": 100}, {"TargetGroupArn": targets["green"], "Weight": 0}]
    (rule,) = balancing.create_rule(
        ListenerArn=listener["ListenerArn"],
        Priority=100,
        Conditions=[{"Field": "path-pattern", "PathPatternConfig": {"Values": ["/*"]}}],
        Actions=[{"Type": "forward", "ForwardConfig": {"TargetGroups": groups}}],
    )["Rules"]
    colours = {
        colour: {
            "group": f"demo-search-{colour}",
            "targets": targets[colour],
            "series": targets[colour].rpartition(":")[2],
        }
        for colour in targets
    }
    series = arn.partition("loadbalancer/")[2]
    return {"rule": rule["RuleArn"], "balancer": series, "least": 1, "alarms": [], "colours": colours}
