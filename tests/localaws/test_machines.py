"""State machines on the local AWS: conversion of names and values, end events, and metrics."""

import json
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service_sfn import (
    StateTaskServiceSfn,
)

from tests.localaws.moto_patches.events import strike

pytestmark = pytest.mark.usefixtures("aws")

DONE: dict[str, Any] = {"Done": {"Type": "Succeed"}}
FAILS: dict[str, Any] = {"Fails": {"Type": "Fail", "Error": "No"}}


def machine(states: dict[str, Any], name: str = "m") -> str:
    iam = boto3.client("iam")
    role = iam.create_role(RoleName=f"{name}-role", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    text = json.dumps({"StartAt": next(iter(states)), "States": states})
    resource = boto3.client("stepfunctions").create_state_machine(name=name, definition=text, roleArn=role)
    return str(resource["stateMachineArn"])


def task(call: str, **more: Any) -> dict[str, Any]:
    return {"Type": "Task", "Resource": f"arn:aws:states:::aws-sdk:{call}", "End": True, **more}


def run(arn: str, arguments: object = None) -> dict[str, Any]:
    machines = boto3.client("stepfunctions")
    execution = machines.start_execution(stateMachineArn=arn, input=json.dumps(arguments or {}))["executionArn"]

    def ended() -> dict[str, Any] | None:
        response: dict[str, Any] = machines.describe_execution(executionArn=execution)
        return response if response["status"] != "RUNNING" else None

    result: dict[str, Any] = until(ended)
    return result


def output(arn: str, arguments: object = None) -> Any:
    result = run(arn, arguments)
    assert result["status"] == "SUCCEEDED", (result.get("error"), result.get("cause"))
    return json.loads(result["output"])


def until(met: Callable[[], Any]) -> Any:
    for _ in range(600):
        if result := met():
            return result
        time.sleep(0.02)
    raise AssertionError("it does not come")


def executions(arn: str) -> list[str]:
    result = boto3.client("stepfunctions").list_executions(stateMachineArn=arn)["executions"]
    return [entry["status"] for entry in result]


# Names and values


def test_what_a_service_takes_as_bytes_is_the_json_of_what_the_state_says() -> None:
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="kept", CreateBucketConfiguration={"LocationConstraint": "us-east-2"})
    put = task("s3:putObject", Parameters={"Bucket": "kept", "Key.$": "$.key", "Body.$": "$.body"})
    arn = machine({"Put": put})
    for key, body in (("a", {"text": 'a "word"'}), ("b", "word")):
        run(arn, {"key": key, "body": body})
        assert s3.get_object(Bucket="kept", Key=key)["Body"].read() == json.dumps(body, separators=(",", ":")).encode()


def test_names_begin_with_a_capital_whatever_the_service_calls_them() -> None:
    target = machine(DONE, "target")
    execution = boto3.client("stepfunctions").start_execution(stateMachineArn=target)["executionArn"]
    ask = task("sfn:describeExecution", Parameters={"ExecutionArn.$": "$.arn"}, ResultSelector={"is.$": "$.Name"})
    assert output(machine({"Ask": ask}), {"arn": execution}) == {"is": execution.rpartition(":")[2]}


def test_a_path_to_one_place_finds_a_value_and_one_to_several_a_list_that_may_be_empty() -> None:
    paths = {
        "one.$": "$.groups[0].size",
        "all.$": "$.groups[*].size",
        "large.$": "$.groups[?(@.size > 2)].name",
        "none.$": "$.groups[?(@.size > 9)].name",
        "no.$": "$.empty[*].size",
    }
    document = {"groups": [{"name": "a", "size": 1}, {"name": "b", "size": 3}], "empty": []}
    result = output(machine({"Pick": {"Type": "Pass", "Parameters": paths, "End": True}}), document)
    assert result == {"one": 1, "all": [1, 3], "large": ["b"], "none": [], "no": []}


def test_a_condition_that_is_not_met_has_a_name_that_can_be_caught() -> None:
    boto3.client("dynamodb").create_table(
        TableName="locks",
        KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    lock = task(
        "dynamodb:updateItem",
        Parameters={
            "TableName": "locks",
            "Key": {"key": {"S": "a"}},
            "UpdateExpression": "SET #owner = :me",
            "ConditionExpression": "attribute_not_exists(#owner)",
            "ExpressionAttributeNames": {"#owner": "owner"},
            "ExpressionAttributeValues": {":me": {"S.$": "$$.Execution.Id"}},
        },
        Catch=[{"ErrorEquals": ["DynamoDb.ConditionalCheckFailedException"], "Next": "Fails"}],
    )
    arn = machine({"Lock": lock, **FAILS})
    assert [run(arn)["status"], run(arn)["status"]] == ["SUCCEEDED", "FAILED"]


def test_a_machine_waits_for_another_one_and_hears_what_it_said() -> None:
    inner = machine({"Say": {"Type": "Pass", "Parameters": {"heard.$": "$.word"}, "End": True}}, "inner")
    ask = {
        "Type": "Task",
        "Resource": "arn:aws:states:::states:startExecution.sync:2",
        "Parameters": {"StateMachineArn": inner, "Input": {"word.$": "$.word"}},
        "OutputPath": "$.Output",
        "End": True,
    }
    assert output(machine({"Ask": ask}, "outer"), {"word": "yes"}) == {"heard": "yes"}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_execution_that_is_stopped_before_it_waits_for_another_one_waits_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner, over = machine({"Wait": {"Type": "Wait", "Seconds": 600, "End": True}}, "inner"), threading.Event()
    stock = StateTaskServiceSfn._eval_integration_pattern

    def stopped(task: Any, env: Any, *rest: Any, **more: Any) -> None:
        execution = env.states.context_object.context_object_data["Execution"]["Id"]
        boto3.client("stepfunctions").stop_execution(executionArn=execution)
        stock(task, env, *rest, **more)
        over.set()

    monkeypatch.setattr(StateTaskServiceSfn, "_eval_integration_pattern", stopped)
    waits = {"Resource": "arn:aws:states:::states:startExecution.sync:2", "Parameters": {"StateMachineArn": inner}}
    assert run(machine({"Ask": {"Type": "Task", "End": True, **waits}}, "outer"))["status"] == "ABORTED"
    assert over.wait(30)


# End events


def waking(**rule: Any) -> str:
    woken = machine(DONE, "woken")
    events = boto3.client("events")
    events.put_rule(Name="r", **rule)
    events.put_targets(Rule="r", Targets=[{"Id": "0", "Arn": woken, "RoleArn": "arn:aws:iam::123456789012:role/r"}])
    return woken


FAILED = json.dumps({"source": ["aws.states"], "detail": {"status": ["FAILED"]}})


def test_an_execution_that_fails_wakes_who_waits_for_that_and_one_that_succeeds_does_not() -> None:
    woken = waking(EventPattern=FAILED)
    run(machine(DONE, "good"))
    run(machine(FAILS, "bad"))
    until(lambda: executions(woken))
    assert len(executions(woken)) == 1


def test_a_rule_that_is_disabled_wakes_nobody() -> None:
    woken = waking(EventPattern=FAILED, State="DISABLED")
    run(machine(FAILS, "bad"))
    strike("r")
    assert executions(woken) == []


def test_a_rule_with_a_clock_hears_no_events_and_wakes_when_it_strikes() -> None:
    woken = waking(ScheduleExpression="rate(1 minute)")
    run(machine(FAILS, "bad"))
    assert executions(woken) == []
    strike("r")
    assert len(executions(woken)) == 1


# Metrics


def put(second: int, *values: float) -> None:
    when = datetime.fromtimestamp(second, UTC)
    data = [{"MetricName": "time", "Timestamp": when, "Value": value} for value in values]
    boto3.client("cloudwatch").put_metric_data(Namespace="n", MetricData=data)


def counts_by_minute(begin: int, end: int, *statistics: str) -> list[dict[int, float]]:
    """Counts by the second at which a minute begins."""
    metric = {"Namespace": "n", "MetricName": "time"}
    queries = [
        {"Id": f"q{number}", "MetricStat": {"Metric": metric, "Period": 60, "Stat": statistic}}
        for number, statistic in enumerate(statistics)
    ]
    metric_data_results = boto3.client("cloudwatch").get_metric_data(
        MetricDataQueries=queries,
        StartTime=datetime.fromtimestamp(begin, UTC),
        EndTime=datetime.fromtimestamp(end, UTC),
        ScanBy="TimestampAscending",
    )["MetricDataResults"]
    return [
        {int(site.timestamp()): value for site, value in zip(entry["Timestamps"], entry["Values"], strict=True)}
        for entry in metric_data_results
    ]


def test_a_trimmed_count_leaves_out_its_lower_bound_and_has_its_upper_one() -> None:
    put(1_800_000_000, 0.1, 0.2, 0.3, 0.4)
    bounds = ("TC(0.2:)", "TC(:0.2)", "TC(0.1:0.3)", "SampleCount")
    assert [value[1_800_000_000] for value in counts_by_minute(1_800_000_000, 1_800_000_060, *bounds)] == [2, 2, 2, 4]


def test_a_minute_without_data_is_missing_and_one_that_comes_late_is_there_when_asked_again() -> None:
    first = 1_800_000_000
    put(first, 0.1)
    put(first + 120, 0.1, 0.1)
    (before,) = counts_by_minute(first, first + 180, "SampleCount")
    assert before == {first: 1, first + 120: 2}
    put(first + 61, 0.1)
    (after,) = counts_by_minute(first, first + 180, "SampleCount")
    assert after == {first: 1, first + 60: 1, first + 120: 2}
