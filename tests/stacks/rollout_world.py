"""A fleet and its rollout machines, deployed on the local AWS, and an operator's actions."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from moto import mock_aws

from nxpipe.pipeline.canary.metrics import PAIR_METRICS, PAIR_NAMESPACE, ROLLOUT, PairCounts
from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.pipeline.fleet.agent.shadow import mirror_path
from nxpipe.stacks.observability import ObserveStack
from nxpipe.stacks.rollout.stack import RolloutStack
from tests.canary.samples import plan_with
from tests.localaws.formation.provider import client_of
from tests.localaws.install import install
from tests.localaws.moto_patches.refreshes import hosts_answer
from tests.localaws.visitors import Fleet
from tests.stacks.fleet_world import SIZE, World, configured, world
from tests.stacks.local import ACCOUNT, HERE, REGION, deploy

FLEET: Final = "search"
MACHINE: Final = f"arn:aws:states:{REGION}:{ACCOUNT}:stateMachine:demo-search-rollout"
TABLE: Final = "demo-search-rollout"
BAD: Final = "demo-search-release-bad"
CLOCK: Final = "demo-search-watchdog"
ENDED: Final = "demo-search-ended"
_OVER: Final = ("SUCCEEDED", "FAILED", "TIMED_OUT", "ABORTED")
# A minute of the plan lasts a second; all else is as on AWS.
PACE: Final = {"period": 1, "poll": 1, "settle": 1, "warm": 1, "warm_tries": 3, "final": 1, "patience": 30}


NEVER_SURE: Final = plan_with((50, 100), bake_min=1, bake_max=1, alpha=1e-9, beta=1e-300).as_json()
WHO: Final = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_DEFAULT_REGION": REGION}


@dataclass(frozen=True)
class Rolled:
    fleet: World
    observe: ObserveStack
    rollout: RolloutStack


# The load balancer gives a request up after a minute, which is a second here.
QUICK: Final = 'command = ["server"]\nidle_timeout = "1m"\ndraining = "1m"'
SHADOW: Final = f"{QUICK}\n[rollout.shadow]\npercent = 50.0"
SCALING: Final = f'{QUICK}\nscaling = {{ requests_per_target = 600, warm_up = "1m" }}'


def rolled(folder: Path, *, more: str = QUICK, size: str = SIZE) -> Rolled:
    config = configured(folder, more=more, size=size)
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
        shadow=config.rollout.shadow is not None,
        env=HERE,
    )
    return made, observe, rollout


def bootstrapped() -> None:
    _client("ssm").put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Value="30", Type="String")


def deployed(folder: Path, more: str = QUICK) -> Rolled:
    """Deploy as the CDK, which uploads assets first."""
    made = rolled(folder, more=more)
    bucket = f"cdk-hnb659fds-assets-{ACCOUNT}-{REGION}"
    s3 = _client("s3")
    s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
    for asset in Path(made.rollout.node.root.synth().directory).glob("asset.*.zip"):
        s3.upload_file(str(asset), bucket, asset.name.removeprefix("asset."))
    with hosts_answer("CONTINUE"):
        deploy(*made.fleet.stacks, made.observe, made.rollout)
    return made


def deploy_again(folder: Path, *, more: str, size: str) -> None:
    """Deploy a fleet with other sizes over the deployed one."""
    made = rolled(folder, more=more, size=size)
    deploy(made.fleet.serve, made.rollout)


@contextmanager
def fleet_there(folder: Path, more: str = QUICK) -> Iterator[Fleet]:
    """A fleet deployed on a local AWS of its own."""
    install()
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        for name, value in WHO.items():
            patch.setenv(name, value)
        bootstrapped()
        deployed(folder, more)
        yield Fleet.find(REGION, "demo-search")


def _client(service: str) -> Any:
    """A cached client: creating one takes longer than its calls."""
    return client_of(service, REGION)


# Observations


def record() -> dict[str, str]:
    item = _client("dynamodb").get_item(TableName=TABLE, Key={"fleet": {"S": FLEET}}).get("Item", {})
    return {name: value["S"] for name, value in item.items()}


def stable() -> str:
    return record().get("stable", "blue")


def other(colour: str) -> str:
    return {"blue": "green", "green": "blue"}[colour]


def passed(execution: str) -> list[str]:
    """The states that an execution has entered."""
    pages = _client("stepfunctions").get_paginator("get_execution_history").paginate(executionArn=execution)
    details = [event.get("stateEnteredEventDetails") for page in pages for event in page["events"]]
    return [detail["name"] for detail in details if detail]


def watched() -> bool:
    """Whether a watchdog is running."""
    machine = MACHINE.replace("rollout", "watchdog")
    return bool(_client("stepfunctions").list_executions(stateMachineArn=machine, statusFilter="RUNNING")["executions"])


def _bucket() -> str:
    buckets = _client("s3").list_buckets()["Buckets"]
    return str(next(entry["Name"] for entry in buckets if "artifacts" in entry["Name"]))


def mirror() -> dict[str, Any]:
    """What the stable instances are told to mirror; empty before the first rollout with a shadow phase."""
    s3, bucket, path = _client("s3"), _bucket(), f"models/{mirror_path(FLEET)}"
    if not s3.list_objects_v2(Bucket=bucket, Prefix=path).get("Contents"):
        return {}
    document: dict[str, Any] = json.load(s3.get_object(Bucket=bucket, Key=path)["Body"])
    return document


@contextmanager
def mirrored(differs: float, pairs: int = 200) -> Iterator[list[dict[str, Any]]]:
    """Agents of the stable instances, which publish the pairs of each second in which requests are mirrored. The new
    version answers this share of them otherwise. Yields the documents that told them so.
    """
    told: list[dict[str, Any]] = []
    over, random = threading.Event(), np.random.default_rng(0)

    def publish() -> None:
        while not over.wait(1):
            document = mirror()
            if document and (not told or told[-1] != document):
                told.append(document)
            if document and document["mirror"]["percent"]:
                bad = int(random.binomial(pairs, differs))
                _publish(PairCounts(pairs, bad, bad, 0), document["mirror"]["rollout"])

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        over.set()
        thread.join()


def _publish(counts: PairCounts, rollout: str) -> None:
    dimensions = {"Project": "demo", "Fleet": FLEET, ROLLOUT: rollout}
    data = [
        {
            "MetricName": name,
            "Value": value,
            "Dimensions": [{"Name": key, "Value": text} for key, text in sorted(dimensions.items())],
            "Timestamp": datetime.now(UTC),
        }
        for name, value in zip(PAIR_METRICS, astuple(counts), strict=True)
    ]
    _client("cloudwatch").put_metric_data(Namespace=PAIR_NAMESPACE, MetricData=data)


def evidence(execution: str) -> list[dict[str, Any]]:
    """The records of the evaluations."""
    s3, bucket, folder = _client("s3"), _bucket(), f"models/rollouts/search/{execution.rpartition(':')[2]}/0"
    keys = [content["Key"] for content in s3.list_objects_v2(Bucket=bucket, Prefix=folder)["Contents"]]
    kept = [json.load(s3.get_object(Bucket=bucket, Key=key)["Body"]) for key in sorted(keys)]
    return [json.loads(entry["text"]) for entry in kept]


# Actions of an operator


def start(**changes: Any) -> str:
    """Roll out from the stable colour to the other one."""
    plan = plan_with((50, 100), bake_min=1, bake_max=20).as_json()
    given = {
        "from": stable(),
        "to": other(stable()),
        "artifact": "a" * 64,
        "channel": "production",
        "plan": plan,
        "pace": PACE,
    }
    execution_input = json.dumps(given | changes)
    return str(_client("stepfunctions").start_execution(stateMachineArn=MACHINE, input=execution_input)["executionArn"])


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


def taken_back() -> None:
    """Remove the lock of an execution that does not exist."""
    _client("dynamodb").update_item(
        TableName=TABLE,
        Key={"fleet": {"S": FLEET}},
        UpdateExpression="REMOVE #owner",
        ExpressionAttributeNames={"#owner": "owner"},
    )


def given_away() -> None:
    """Give the lock to an execution that does not exist."""
    _client("dynamodb").update_item(
        TableName=TABLE,
        Key={"fleet": {"S": FLEET}},
        UpdateExpression="SET #owner = :other",
        ExpressionAttributeNames={"#owner": "owner"},
        ExpressionAttributeValues={":other": {"S": f"{MACHINE.replace('stateMachine', 'execution')}:of-somebody-else"}},
    )


def ended(execution: str, within: float = 240) -> dict[str, Any]:
    def over() -> dict[str, Any] | None:
        response: dict[str, Any] = _client("stepfunctions").describe_execution(executionArn=execution)
        return response if response["status"] in _OVER else None

    result: dict[str, Any] = until(over, within)
    return result


def outcome(execution: str) -> str:
    result = ended(execution)
    assert result["status"] == "SUCCEEDED", (result.get("error"), result.get("cause"))
    return str(json.loads(result["output"])["outcome"])


def until(met: Any, within: float = 120) -> Any:
    deadline = time.monotonic() + within
    while not (result := met()):
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.05)
    return result
