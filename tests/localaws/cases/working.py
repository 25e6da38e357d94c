"""Cases of Lambda, EventBridge, Step Functions, DynamoDB and SQS."""

from typing import Final

from tests.localaws.cases.case import LOGS, NETWORK, TOPIC, Case, ref, role, tags

_MACHINE: Final = '{"StartAt":"End","States":{"End":{"Type":"Succeed"}}}'

_SOURCE: Final = "def handler(event, context):\n    return {'twice': 2 * event['n']}\n"


CASES: Final = (
    Case(
        "AWS::Events::Rule",
        {
            "Description": "a",
            "EventPattern": {"source": ["aws.autoscaling"], "detail": {"AutoScalingGroupName": ["x"]}},
            "Name": "nxpipe-r",
            "State": "ENABLED",
            "Tags": tags(a="1"),
            "Targets": [
                {
                    "Id": "0",
                    "Arn": ref("Topic"),
                    "InputTransformer": {"InputPathsMap": {"d": "$.detail"}, "InputTemplate": "<d>"},
                },
                {"Id": "1", "Arn": ref("Topic"), "RetryPolicy": {"MaximumRetryAttempts": 3}},
            ],
        },
        {"Description": "b", "State": "DISABLED", "Tags": tags(b="1"), "Targets": [{"Id": "1", "Arn": ref("Topic")}]},
        TOPIC,
    ),
    Case("AWS::Scheduler::ScheduleGroup", {"Name": "nxpipe-g", "Tags": tags(a="1")}, {"Tags": tags(b="1")}),
    Case(
        "AWS::Scheduler::Schedule",
        {
            "Description": "a",
            "EndDate": "2099-05-02T00:00:00.000Z",
            "FlexibleTimeWindow": {"Mode": "OFF"},
            "GroupName": ref("Schedules"),
            "Name": "nxpipe-s",
            "ScheduleExpression": "at(2099-05-01T10:15:00)",
            "ScheduleExpressionTimezone": "UTC",
            "StartDate": "2099-05-01T00:00:00Z",
            "State": "ENABLED",
            "Target": {
                "Arn": "arn:aws:scheduler:::aws-sdk:autoscaling:setDesiredCapacity",
                "Input": '{"DesiredCapacity":0}',
                "RetryPolicy": {"MaximumRetryAttempts": 5},
                "RoleArn": ref("Role", "Arn"),
            },
        },
        {"Description": "b", "FlexibleTimeWindow": {"Mode": "FLEXIBLE", "MaximumWindowInMinutes": 5}},
        {"Schedules": {"Type": "AWS::Scheduler::ScheduleGroup", "Properties": {}}, "Role": role("scheduler")},
        ("EndDate",),
    ),
    Case(
        "AWS::StepFunctions::StateMachine",
        {
            "DefinitionString": _MACHINE,
            "LoggingConfiguration": {
                "Destinations": [{"CloudWatchLogsLogGroup": {"LogGroupArn": ref("Logs", "Arn")}}],
                "IncludeExecutionData": True,
                "Level": "ALL",
            },
            "RoleArn": ref("Role", "Arn"),
            "StateMachineName": "nxpipe-m",
            "StateMachineType": "STANDARD",
            "Tags": tags(a="1"),
            "TracingConfiguration": {"Enabled": True},
        },
        {
            "DefinitionString": _MACHINE.replace("End", "Done"),
            "Tags": tags(b="1"),
            "TracingConfiguration": {"Enabled": False},
        },
        {**LOGS, "Role": role("states")},
    ),
    Case(
        "AWS::Lambda::Function",
        {
            "Architectures": ["x86_64"],
            "Code": {"ZipFile": _SOURCE},
            "Description": "a",
            "Environment": {"Variables": {"A": "b"}},
            "EphemeralStorage": {"Size": 512},
            "FunctionName": "nxpipe-f",
            "Handler": "index.handler",
            "LoggingConfig": {"LogGroup": "/nxpipe/f"},
            "MemorySize": 256,
            "ReservedConcurrentExecutions": 2,
            "Role": ref("Role", "Arn"),
            "Runtime": "python3.13",
            "Tags": tags(a="1"),
            "Timeout": 30,
            "TracingConfig": {"Mode": "Active"},
            "VpcConfig": {"SubnetIds": [ref("A")], "SecurityGroupIds": [ref("Group")]},
        },
        {"Code": {"ZipFile": _SOURCE + "#\n"}, "MemorySize": 512, "Tags": tags(b="1"), "Timeout": 60},
        {"Role": role("lambda"), **NETWORK},
        ("ReservedConcurrentExecutions",),
    ),
    Case(
        "AWS::Lambda::Permission",
        {
            "Action": "lambda:InvokeFunction",
            "FunctionName": ref("Function", "Arn"),
            "Principal": "states.amazonaws.com",
            "SourceAccount": "123456789012",
            "SourceArn": "arn:aws:states:us-east-2:123456789012:stateMachine:x",
        },
        {"SourceArn": "arn:aws:states:us-east-2:123456789012:stateMachine:y"},
        {
            "Function": {
                "Type": "AWS::Lambda::Function",
                "Properties": {
                    "Code": {"ZipFile": _SOURCE},
                    "Handler": "index.handler",
                    "Role": ref("Role", "Arn"),
                    "Runtime": "python3.13",
                },
            },
            "Role": role("lambda"),
        },
    ),
    Case(
        "AWS::DynamoDB::Table",
        {
            "AttributeDefinitions": [{"AttributeName": "k", "AttributeType": "S"}],
            "BillingMode": "PAY_PER_REQUEST",
            "DeletionProtectionEnabled": False,
            "KeySchema": [{"AttributeName": "k", "KeyType": "HASH"}],
            "PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": True},
            "SSESpecification": {"SSEEnabled": True, "SSEType": "KMS"},
            "StreamSpecification": {"StreamViewType": "NEW_IMAGE"},
            "TableName": "nxpipe-t",
            "Tags": tags(a="1"),
            "TimeToLiveSpecification": {"AttributeName": "expires", "Enabled": True},
        },
        {"PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": False}, "Tags": tags(b="1")},
    ),
    Case(
        "AWS::SQS::Queue",
        {
            "DelaySeconds": 5,
            "MessageRetentionPeriod": 3600,
            "QueueName": "nxpipe-q",
            "RedrivePolicy": {"deadLetterTargetArn": ref("Dead", "Arn"), "maxReceiveCount": 3},
            "SqsManagedSseEnabled": True,
            "Tags": tags(a="1"),
            "VisibilityTimeout": 60,
        },
        {"DelaySeconds": 0, "Tags": tags(b="1"), "VisibilityTimeout": 120},
        {"Dead": {"Type": "AWS::SQS::Queue", "Properties": {}}},
    ),
)
