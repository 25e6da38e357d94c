"""Services that behave as on AWS, where moto's do not."""

import base64
import hashlib
import io
import json
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto.iam.models import iam_backends
from moto.s3.models import S3Backend
from moto.sns.models import sns_backends

from tests.localaws.moto_patches.cloudwatch import holds
from tests.localaws.moto_patches.ssm import NAMES

ACCOUNT, REGION = "123456789012", "us-east-2"


pytestmark = pytest.mark.usefixtures("aws")


# Events


def test_a_rule_publishes_the_message_of_its_template_and_is_counted() -> None:
    events, sns = boto3.client("events"), boto3.client("sns")
    topic = sns.create_topic(Name="alarms")["TopicArn"]
    events.put_rule(Name="launches", EventPattern=json.dumps({"source": ["aws.autoscaling"]}))
    paths = {"group": "$.detail.AutoScalingGroupName"}
    transformer = {"InputPathsMap": paths, "InputTemplate": '"Group <group> has not launched."'}
    events.put_targets(Rule="launches", Targets=[{"Id": "a", "Arn": topic, "InputTransformer": transformer}])
    for source in ("aws.autoscaling", "aws.ec2"):
        detail = json.dumps({"AutoScalingGroupName": 'the "blue" one'})
        events.put_events(Entries=[{"Source": source, "DetailType": "a", "Detail": detail}])
    sent = sns_backends[ACCOUNT][REGION].topics[topic].sent_notifications
    assert [message for _, message, *_ in sent] == ['Group the "blue" one has not launched.']
    now = datetime.now(UTC)
    counted = boto3.client("cloudwatch").get_metric_statistics(
        Namespace="AWS/Events",
        MetricName="TriggeredRules",
        Dimensions=[{"Name": "RuleName", "Value": "launches"}],
        StartTime=now - timedelta(minutes=5),
        EndTime=now + timedelta(minutes=5),
        Period=600,
        Statistics=["Sum"],
    )["Datapoints"]
    assert sum(point["Sum"] for point in counted) == 1


# Alarms


def _alarm(name: str, **more: Any) -> None:
    boto3.client("cloudwatch").put_metric_alarm(
        AlarmName=name,
        ComparisonOperator="GreaterThanThreshold",
        EvaluationPeriods=1,
        MetricName="m",
        Namespace="n",
        Period=60,
        Statistic="Sum",
        Threshold=1,
        **more,
    )


def _set(name: str, state: str) -> None:
    boto3.client("cloudwatch").set_alarm_state(AlarmName=name, StateValue=state, StateReason="a test says so")


def _composite(name: str) -> str:
    response = boto3.client("cloudwatch").describe_alarms(AlarmNames=[name], AlarmTypes=["CompositeAlarm"])
    state: str = response["CompositeAlarms"][0]["StateValue"]
    return state


@pytest.mark.parametrize(
    ("rule", "met"),
    [
        ("ALARM(a)", True),
        ('ALARM("b")', False),
        ("ALARM(arn:aws:cloudwatch:us-east-2:123456789012:alarm:a)", True),
        ("OK(b) AND NOT ALARM(b)", True),
        ("ALARM(b) OR ALARM(a) AND ALARM(b)", False),
        ("(ALARM(b) OR ALARM(a)) AND TRUE", True),
        ("INSUFFICIENT_DATA(c) AND NOT (FALSE OR ALARM(b))", True),
    ],
)
def test_the_rule_of_a_composite_alarm_is_worked_out(rule: str, met: bool) -> None:
    states = {"a": "ALARM", "b": "OK", "c": "INSUFFICIENT_DATA"}
    assert holds(rule, lambda name, state: states[name] == state) is met


@pytest.mark.parametrize(
    "rule", ["ALARM(a", "ALARM(a) XOR ALARM(b)", "(ALARM(a)", "NOT", "ALARM(a) ALARM(b)", "ALARM(nobody)"]
)
def test_a_rule_that_makes_no_sense_is_refused(rule: str) -> None:
    _alarm("a")
    _alarm("b")
    with pytest.raises(ClientError, match="AlarmRule"):
        boto3.client("cloudwatch").put_composite_alarm(AlarmName="bad", AlarmRule=rule)


def test_a_composite_alarm_follows_its_alarms_and_another_follows_it() -> None:
    cloudwatch = boto3.client("cloudwatch")
    _alarm("a")
    _alarm("b")
    cloudwatch.put_composite_alarm(AlarmName="any", AlarmRule="ALARM(a) OR ALARM(b)")
    cloudwatch.put_composite_alarm(AlarmName="over", AlarmRule="ALARM(any)")
    assert (_composite("any"), _composite("over")) == ("OK", "OK")
    _set("b", "ALARM")
    assert (_composite("any"), _composite("over")) == ("ALARM", "ALARM")
    _set("b", "OK")
    assert (_composite("any"), _composite("over")) == ("OK", "OK")


def test_a_new_alarm_has_no_data_and_a_changed_one_keeps_its_state() -> None:
    cloudwatch = boto3.client("cloudwatch")
    _alarm("a")
    assert cloudwatch.describe_alarms()["MetricAlarms"][0]["StateValue"] == "INSUFFICIENT_DATA"
    _set("a", "ALARM")
    _alarm("a", AlarmDescription="changed")
    assert cloudwatch.describe_alarms()["MetricAlarms"][0]["StateValue"] == "ALARM"


def test_filters_of_alarms_hold_together_and_composite_ones_have_to_be_asked_for() -> None:
    cloudwatch = boto3.client("cloudwatch")
    for name in ("a", "b"):
        _alarm(name)
    _set("a", "ALARM")
    cloudwatch.put_composite_alarm(AlarmName="c", AlarmRule="ALARM(a)")
    response = cloudwatch.describe_alarms(AlarmNames=["a", "b", "c"], StateValue="ALARM")
    assert ([metric_alarm["AlarmName"] for metric_alarm in response["MetricAlarms"]], response["CompositeAlarms"]) == (
        ["a"],
        [],
    )
    response = cloudwatch.describe_alarms(AlarmTypes=["CompositeAlarm"], StateValue="ALARM")
    assert (
        [composite_alarm["AlarmName"] for composite_alarm in response["CompositeAlarms"]],
        response["MetricAlarms"],
    ) == (["c"], [])


def test_an_alarm_tells_its_topic_once_for_each_change() -> None:
    sqs, sns = boto3.client("sqs"), boto3.client("sns")
    url = sqs.create_queue(QueueName="q")["QueueUrl"]
    topic = sns.create_topic(Name="t")["TopicArn"]
    arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn)
    _alarm("a")
    boto3.client("cloudwatch").put_composite_alarm(AlarmName="c", AlarmRule="ALARM(a)", AlarmActions=[topic])
    for state in ("ALARM", "ALARM", "OK"):
        _set("a", state)
    messages = [
        json.loads(message["Body"]) for message in sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
    ]
    assert [json.loads(entry["Message"])["AlarmName"] for entry in messages] == ["c"]


# Functions


def _function(source: str, name: str = "f", **more: Any) -> None:
    role = boto3.client("iam").create_role(RoleName=f"{name}-role", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("judge/core.py", source)
        archive.writestr("judge/__init__.py", "")
        archive.writestr("judge/numbers.py", "WEIGHT = 3\n")
    boto3.client("lambda").create_function(
        FunctionName=name,
        Role=role,
        Runtime="python3.13",
        Handler="judge.core.handler",
        Code={"ZipFile": packed.getvalue()},
        **more,
    )


def _call(event: Any, name: str = "f") -> tuple[str | None, Any]:
    result = boto3.client("lambda").invoke(FunctionName=name, Payload=json.dumps(event))
    return result.get("FunctionError"), json.load(result["Payload"])


def test_a_function_runs_with_the_modules_of_its_archive_and_its_environment() -> None:
    source = (
        "import os\nfrom judge.numbers import WEIGHT\n"
        "def handler(event, context):\n"
        "    print('heard')\n"
        "    return {'n': WEIGHT * event['n'], 'a': os.environ['A'], 'me': context.function_name}\n"
    )
    _function(source, Environment={"Variables": {"A": "b"}})
    assert _call({"n": 2}) == (None, {"n": 6, "a": "b", "me": "f"})
    logs = boto3.client("logs")
    stream = logs.describe_log_streams(logGroupName="/aws/lambda/f")["logStreams"][0]["logStreamName"]
    events = logs.get_log_events(logGroupName="/aws/lambda/f", logStreamName=stream)["events"]
    assert [event["message"] for event in events] == ["heard"]


def test_a_function_that_raises_has_failed_and_says_why() -> None:
    _function("def handler(event, context):\n    raise ValueError('no such digest')\n")
    failed, complete_action = _call({})
    assert failed == "Unhandled"
    assert (complete_action["errorType"], complete_action["errorMessage"]) == ("ValueError", "no such digest")


def test_a_function_that_takes_too_long_is_stopped() -> None:
    _function("import time\ndef handler(event, context):\n    time.sleep(60)\n", Timeout=1)
    failed, complete_action = _call({})
    assert failed == "Unhandled"
    assert "timed out after 1.00 seconds" in complete_action["errorMessage"]


# State machines


def _machine(states: dict[str, Any], start: str) -> str:
    role = boto3.client("iam").create_role(RoleName="machine", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    arn: str = boto3.client("stepfunctions").create_state_machine(
        name="m", definition=json.dumps({"StartAt": start, "States": states}), roleArn=role
    )["stateMachineArn"]
    return arn


def _run(machine: str, **arguments: Any) -> dict[str, Any]:
    machines = boto3.client("stepfunctions")
    arn = machines.start_execution(stateMachineArn=machine, **arguments)["executionArn"]
    for _ in range(600):
        response: dict[str, Any] = machines.describe_execution(executionArn=arn)
        if response["status"] != "RUNNING":
            return response
        time.sleep(0.05)
    raise AssertionError("the execution does not end")


def test_a_state_machine_reads_alarms_and_decides() -> None:
    _alarm("bad")
    machine = _machine(
        {
            "Look": {
                "Type": "Task",
                "Resource": "arn:aws:states:::aws-sdk:cloudwatch:describeAlarms",
                "Parameters": {"AlarmNames": ["bad"], "StateValue": "ALARM"},
                "Next": "Decide",
            },
            "Decide": {
                "Type": "Choice",
                "Choices": [{"Variable": "$.MetricAlarms[0]", "IsPresent": True, "Next": "Bad"}],
                "Default": "Good",
            },
            "Bad": {"Type": "Fail", "Error": "ReleaseBad"},
            "Good": {"Type": "Succeed"},
        },
        "Look",
    )
    assert _run(machine)["status"] == "SUCCEEDED"
    _set("bad", "ALARM")
    execution = _run(machine)  # a second execution without a name is a new one
    assert (execution["status"], execution["error"]) == ("FAILED", "ReleaseBad")


def test_a_state_machine_knows_load_balancers_by_the_name_that_aws_has_for_them() -> None:
    task = {
        "Type": "Task",
        "Resource": "arn:aws:states:::aws-sdk:elasticloadbalancingv2:describeRules",
        "Parameters": {"RuleArns": ["arn:aws:elasticloadbalancing:us-east-2:123456789012:listener-rule/app/x/1/2/3"]},
        "Catch": [{"ErrorEquals": ["ElasticLoadBalancingV2.RuleNotFoundException"], "Next": "Gone"}],
        "End": True,
    }
    machine = _machine({"Look": task, "Gone": {"Type": "Succeed"}}, "Look")
    assert _run(machine)["status"] == "SUCCEEDED"


def test_a_state_machine_calls_a_function() -> None:
    _function("def handler(event, context):\n    return {'ok': event['n'] > 2}\n")
    task = {
        "Type": "Task",
        "Resource": "arn:aws:states:::lambda:invoke",
        "Parameters": {"FunctionName": "f", "Payload.$": "$"},
        "ResultSelector": {"ok.$": "$.Payload.ok"},
        "End": True,
    }
    execution = _run(_machine({"Ask": task}, "Ask"), input=json.dumps({"n": 3}))
    assert (execution["status"], json.loads(execution.get("output", "{}"))) == ("SUCCEEDED", {"ok": True})


# Other services


def test_images_of_a_neuron_fleet_are_found_in_every_region_and_differ() -> None:
    for name in NAMES:
        result = {
            region: boto3.client("ssm", region_name=region).get_parameter(Name=name)["Parameter"]["Value"]
            for region in ("us-east-2", "eu-north-1")
        }
        assert all(value.startswith("ami-") and len(value) == 21 for value in result.values())
        assert len(set(result.values())) == 2


def test_a_public_parameter_that_aws_does_not_have_is_not_there() -> None:
    with pytest.raises(ClientError, match="ParameterNotFound"):
        boto3.client("ssm").get_parameter(Name="/aws/service/neuron/dlami/base/windows/latest/image_id")


def test_nobody_is_recorded() -> None:
    assert boto3.client("cloudtrail").lookup_events()["Events"] == []


def test_whoever_attaches_a_policy_of_aws_is_alone_with_it() -> None:
    """The policies are parsed once for all tests; a new state does not see the attachments of an earlier one."""
    arn = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
    for _ in range(2):
        iam_backends.reset()
        iam = boto3.client("iam")
        iam.create_role(RoleName="r", AssumeRolePolicyDocument="{}")
        iam.attach_role_policy(RoleName="r", PolicyArn=arn)
        assert iam.get_policy(PolicyArn=arn)["Policy"]["AttachmentCount"] == 1


def test_of_two_who_create_one_object_at_once_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    s3, look, both_looked = boto3.client("s3", "us-east-1"), S3Backend.get_object, threading.Barrier(2)
    s3.create_bucket(Bucket="one")

    def seen(*args: Any, **kwargs: Any) -> Any:
        result = look(*args, **kwargs)
        with suppress(threading.BrokenBarrierError):
            both_looked.wait(timeout=0.3)
        return result

    def create(body: bytes) -> str:
        try:
            s3.put_object(Bucket="one", Key="key", Body=body, IfNoneMatch="*")
        except ClientError as refused:
            return str(refused.response["Error"]["Code"])
        return "created"

    monkeypatch.setattr(S3Backend, "get_object", seen)
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(create, (b"a", b"b"))) == ["PreconditionFailed", "created"]


def test_all_environments_of_an_account_share_batchs_own_role() -> None:
    batch = boto3.client("batch")
    for name in ("farm", "nodes"):
        batch.create_compute_environment(computeEnvironmentName=name, type="UNMANAGED")
    environments = batch.describe_compute_environments()["computeEnvironments"]
    assert {environment["serviceRole"].rpartition("/")[2] for environment in environments} == {"AWSServiceRoleForBatch"}


def test_quotas_are_listed_in_pages_and_an_increase_holds_in_its_region() -> None:
    def quotas(region: str, call: str = "list_service_quotas", service: str = "ec2") -> dict[str, float]:
        client = boto3.client("service-quotas", region_name=region)
        pages = client.get_paginator(call).paginate(ServiceCode=service)
        return {entry["QuotaName"]: entry["Value"] for page in pages for entry in page["Quotas"]}

    name = "Running On-Demand Inf instances"
    assert quotas(REGION)[name] == 0
    boto3.client("service-quotas").request_service_quota_increase(
        ServiceCode="ec2", QuotaCode="L-1945791B", DesiredValue=64
    )
    assert (quotas(REGION)[name], quotas("us-west-2")[name]) == (64, 0)
    defaults = "list_aws_default_service_quotas"
    assert quotas(REGION, defaults)[name] == 0
    assert quotas(REGION, service="sagemaker") == {}
    assert quotas(REGION, defaults, "sagemaker")["ml.inf2.xlarge for endpoint usage"] == 0


def test_ebs_has_a_default_key_of_aws_until_another_is_chosen() -> None:
    ec2 = boto3.client("ec2")
    assert ec2.get_ebs_default_kms_key_id()["KmsKeyId"] == "alias/aws/ebs"
    ec2.modify_ebs_default_kms_key_id(KmsKeyId="arn:aws:kms:us-east-2:123456789012:key/k")
    assert ec2.get_ebs_default_kms_key_id()["KmsKeyId"].endswith("key/k")


# Checksums of uploads


def _sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def test_bytes_that_differ_from_their_checksum_are_refused_and_a_checksum_is_kept() -> None:
    s3, place = boto3.client("s3"), {"Bucket": "uploads", "Key": "k"}
    s3.create_bucket(Bucket="uploads", CreateBucketConfiguration={"LocationConstraint": REGION})
    with pytest.raises(ClientError, match="BadDigest"):
        s3.put_object(**place, Body=b"hell0", ChecksumSHA256=_sha256(b"hello"))
    assert "Contents" not in s3.list_objects_v2(Bucket="uploads")
    for more, name in (({"ChecksumSHA256": _sha256(b"hello")}, "ChecksumSHA256"), ({}, "ChecksumCRC32")):
        sent = s3.put_object(**place, Body=b"hello", **more)
        assert s3.head_object(**place, ChecksumMode="ENABLED")[name] == sent[name]
    upload = s3.create_multipart_upload(**place, ChecksumAlgorithm="SHA256")["UploadId"]
    with pytest.raises(ClientError, match="BadDigest"):
        s3.upload_part(**place, UploadId=upload, PartNumber=1, Body=b"hell0", ChecksumSHA256=_sha256(b"hello"))
    assert "Parts" not in s3.list_parts(**place, UploadId=upload)


def test_a_bucket_of_more_than_a_page_of_versions_is_emptied_page_by_page() -> None:
    bucket = boto3.resource("s3").create_bucket(Bucket="full", CreateBucketConfiguration={"LocationConstraint": REGION})
    bucket.Versioning().enable()
    for number in range(5):
        for _ in range(2):
            bucket.put_object(Key=f"key-{number}", Body=b"")
    bucket.object_versions.page_size(3).delete()
    bucket.delete()


def test_public_parameters_are_found_by_name_and_by_path_and_are_not_in_lists_of_the_account() -> None:
    ssm = boto3.client("ssm")
    for name in NAMES:
        assert ssm.get_parameter(Name=name)["Parameter"]["Name"] == name
    ssm.put_parameter(Name="own", Value="1", Type="String")
    assert [parameter["Name"] for parameter in ssm.describe_parameters()["Parameters"]] == ["own"]
    tagging = boto3.client("resourcegroupstaggingapi")
    assert tagging.get_resources(ResourceTypeFilters=["s3"])["ResourceTagMappingList"] == []
    below = ssm.get_parameters_by_path(Path="/aws/service/neuron/dlami/base", Recursive=True)["Parameters"]
    assert {parameter["Name"] for parameter in below} == {name for name in NAMES if "/dlami/base/" in name}
