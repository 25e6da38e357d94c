"""Differences between the local AWS and AWS, one test for each row of DIVERGENCES.md that is left. A failing test means
that the difference is gone."""

import json
import time
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

pytestmark = pytest.mark.usefixtures("aws")


def _role(name: str, policy: dict[str, Any] | None = None) -> str:
    iam = boto3.client("iam")
    arn: str = iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    if policy:
        iam.put_role_policy(RoleName=name, PolicyName="p", PolicyDocument=json.dumps(policy))
    return arn


def test_an_alarm_does_not_look_at_its_metric() -> None:
    cloudwatch = boto3.client("cloudwatch")
    metric: dict[str, Any] = {"MetricName": "m", "Namespace": "n"}
    cloudwatch.put_metric_alarm(
        AlarmName="a",
        ComparisonOperator="GreaterThanThreshold",
        EvaluationPeriods=1,
        Period=60,
        Statistic="Sum",
        Threshold=1,
        **metric,
    )
    cloudwatch.put_metric_data(Namespace="n", MetricData=[{"MetricName": "m", "Value": 100.0}])
    assert cloudwatch.describe_alarms()["MetricAlarms"][0]["StateValue"] == "INSUFFICIENT_DATA"


def test_a_subscription_by_mail_needs_no_consent() -> None:
    sns = boto3.client("sns")
    topic = sns.create_topic(Name="t")["TopicArn"]
    subscription_arn = sns.subscribe(TopicArn=topic, Protocol="email", Endpoint="a@example.com")["SubscriptionArn"]
    assert subscription_arn.startswith("arn:")  # AWS returns "pending confirmation"


@pytest.mark.parametrize("where", [{"QueryLanguage": "JSONata"}, {"Assign": {"a": 1}}])
def test_a_state_machine_speaks_jsonpath_alone(where: dict[str, Any]) -> None:
    inner = {"StartAt": "A", "States": {"A": {"Type": "Pass", "End": True, **where}}}
    definition = {"StartAt": "B", "States": {"B": {"Type": "Parallel", "Branches": [inner], "End": True}}}
    with pytest.raises(ClientError, match="in JSONPath, without variables"):
        boto3.client("stepfunctions").create_state_machine(
            name="m", definition=json.dumps(definition), roleArn=_role("machine")
        )


def test_a_role_is_not_asked_for_its_permissions() -> None:
    never = {"Version": "2012-10-17", "Statement": [{"Effect": "Deny", "Action": "*", "Resource": "*"}]}
    role = _role("r", never)
    credentials = boto3.client("sts").assume_role(RoleArn=role, RoleSessionName="session")["Credentials"]
    session = boto3.Session(credentials["AccessKeyId"], credentials["SecretAccessKey"], credentials["SessionToken"])
    assert session.client("sns", region_name="us-east-2").create_topic(Name="t")["TopicArn"]


def test_an_endpoint_is_in_service_at_once() -> None:
    sagemaker = boto3.client("sagemaker")
    sagemaker.create_model(ModelName="m", ExecutionRoleArn=_role("r"), PrimaryContainer={"Image": "i"})
    variant: Any = {"VariantName": "v", "ModelName": "m", "InstanceType": "ml.inf2.xlarge", "InitialInstanceCount": 1}
    sagemaker.create_endpoint_config(EndpointConfigName="c", ProductionVariants=[variant])
    sagemaker.create_endpoint(EndpointName="e", EndpointConfigName="c")
    assert sagemaker.describe_endpoint(EndpointName="e")["EndpointStatus"] == "InService"


def test_a_rule_of_the_clock_never_strikes() -> None:
    """Schedules never fire: a rule with an event pattern acts, a scheduled rule does not."""
    events, sqs = boto3.client("events"), boto3.client("sqs")
    url = sqs.create_queue(QueueName="q")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    events.put_rule(Name="r", ScheduleExpression="rate(1 minute)")
    events.put_targets(Rule="r", Targets=[{"Id": "0", "Arn": arn}])
    assert "Messages" not in sqs.receive_message(QueueUrl=url)


def test_an_execution_that_is_stopped_leaves_the_one_that_it_waits_for() -> None:
    machines = boto3.client("stepfunctions")

    def machine(name: str, state: dict[str, Any]) -> str:
        definition = {"StartAt": "A", "States": {"A": {**state, "End": True}}}
        resource = machines.create_state_machine(name=name, definition=json.dumps(definition), roleArn=_role(name))
        return str(resource["stateMachineArn"])

    def running(arn: str) -> list[str]:
        executions = machines.list_executions(stateMachineArn=arn, statusFilter="RUNNING")["executions"]
        return [entry["executionArn"] for entry in executions]

    inner = machine("inner", {"Type": "Wait", "Seconds": 600})
    waits = {"Resource": "arn:aws:states:::states:startExecution.sync:2", "Parameters": {"StateMachineArn": inner}}
    outer = machine("outer", {"Type": "Task", **waits})
    execution = machines.start_execution(stateMachineArn=outer)["executionArn"]
    while not (left := running(inner)):
        time.sleep(0.02)
    machines.stop_execution(executionArn=execution)
    while running(outer):
        time.sleep(0.02)
    assert running(inner) == left
    machines.stop_execution(executionArn=left[0])


def test_the_images_of_public_parameters_are_of_our_own_making() -> None:
    name = "/aws/service/neuron/dlami/base/amazon-linux-2023/latest/image_id"
    image = boto3.client("ssm").get_parameter(Name=name)["Parameter"]["Value"]
    (message,) = boto3.client("ec2").describe_images(ImageIds=[image])["Images"]
    assert "for tests only" in message["Description"]
