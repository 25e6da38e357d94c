"""Cases of CloudWatch, CloudWatch Logs, SNS and budgets."""

from typing import Final

from tests.localaws.cases.case import DENIAL, LOGS, TOPIC, Case, ref, tags

_ALARM: Final = {
    "Inner": {
        "Type": "AWS::CloudWatch::Alarm",
        "Properties": {
            "ComparisonOperator": "GreaterThanThreshold",
            "EvaluationPeriods": 1,
            "MetricName": "m",
            "Namespace": "n",
            "Period": 60,
            "Statistic": "Sum",
            "Threshold": 1,
        },
    }
}

_METRICS: Final = [
    {"Id": "rate", "Expression": "100 * bad / all", "Label": "bad answers", "ReturnData": True},
    {
        "Id": "bad",
        "MetricStat": {
            "Metric": {
                "MetricName": "5xx",
                "Namespace": "AWS/ApplicationELB",
                "Dimensions": [{"Name": "LoadBalancer", "Value": "app/x"}],
            },
            "Period": 60,
            "Stat": "Sum",
        },
        "ReturnData": False,
    },
    {
        "Id": "all",
        "MetricStat": {"Metric": {"MetricName": "n", "Namespace": "AWS/ApplicationELB"}, "Period": 60, "Stat": "Sum"},
        "ReturnData": False,
    },
]


CASES: Final = (
    Case(
        "AWS::Logs::LogGroup",
        {"LogGroupName": "/nxpipe/x", "RetentionInDays": 30, "Tags": tags(a="1"), "LogGroupClass": "STANDARD"},
        {"RetentionInDays": 90, "Tags": tags(b="1")},
    ),
    Case(
        "AWS::Logs::MetricFilter",
        {
            "FilterName": "bad",
            "FilterPattern": '{ $.level = "error" }',
            "LogGroupName": ref("Logs"),
            "MetricTransformations": [
                {
                    "MetricName": "errors",
                    "MetricNamespace": "nxpipe",
                    "MetricValue": "1",
                    "DefaultValue": 0,
                    "Unit": "Count",
                }
            ],
        },
        {
            "MetricTransformations": [
                {
                    "MetricName": "errors",
                    "MetricNamespace": "nxpipe",
                    "MetricValue": "$.count",
                    "Dimensions": [{"Key": "Fleet", "Value": "$.fleet"}],
                }
            ]
        },
        LOGS,
    ),
    Case(
        "AWS::CloudWatch::Alarm",
        {
            "ActionsEnabled": False,
            "AlarmActions": [ref("Topic")],
            "AlarmDescription": "too slow",
            "AlarmName": "nxpipe-slow",
            "ComparisonOperator": "GreaterThanThreshold",
            "DatapointsToAlarm": 2,
            "Dimensions": [{"Name": "Fleet", "Value": "a"}],
            "EvaluateLowSampleCountPercentile": "ignore",
            "EvaluationPeriods": 3,
            "ExtendedStatistic": "p99",
            "InsufficientDataActions": [ref("Topic")],
            "MetricName": "latency",
            "Namespace": "nxpipe",
            "OKActions": [ref("Topic")],
            "Period": 60,
            "Tags": tags(a="1"),
            "Threshold": 1.5,
            "TreatMissingData": "breaching",
            "Unit": "Milliseconds",
        },
        {"Statistic": "Average", "Tags": tags(b="2"), "Threshold": 3},
        TOPIC,
        ("ExtendedStatistic", "EvaluateLowSampleCountPercentile"),
    ),
    Case(
        "AWS::CloudWatch::Alarm",
        {
            "ComparisonOperator": "GreaterThanThreshold",
            "EvaluationPeriods": 3,
            "Metrics": _METRICS,
            "Threshold": 1,
        },
        {"Threshold": 5},
    ),
    Case(
        "AWS::CloudWatch::CompositeAlarm",
        {
            "ActionsEnabled": True,
            "AlarmActions": [ref("Topic")],
            "AlarmDescription": "any",
            "AlarmRule": {"Fn::Join": ["", ["ALARM(", ref("Inner"), ")"]]},
            "InsufficientDataActions": [ref("Topic")],
            "OKActions": [ref("Topic")],
            "Tags": tags(a="1"),
        },
        {"AlarmRule": {"Fn::Join": ["", ['NOT OK("', ref("Inner"), '")']]}, "Tags": tags(b="1")},
        {**_ALARM, **TOPIC},
    ),
    Case("AWS::CloudWatch::Dashboard", {"DashboardBody": '{"widgets":[]}'}, {"DashboardBody": "{}"}),
    Case(
        "AWS::SNS::Topic",
        {"DisplayName": "a", "KmsMasterKeyId": "alias/aws/sns", "Tags": tags(a="1"), "TopicName": "nxpipe-t"},
        {"DisplayName": "b", "Tags": tags(b="1")},
    ),
    Case(
        "AWS::SNS::Subscription",
        {
            "Endpoint": "on-call@example.com",
            "FilterPolicy": {"kind": ["bad"]},
            "FilterPolicyScope": "MessageAttributes",
            "Protocol": "email",
            "TopicArn": ref("Topic"),
        },
        {"FilterPolicy": {"kind": ["worse"]}},
        TOPIC,
    ),
    Case(
        "AWS::SNS::TopicPolicy",
        {
            "PolicyDocument": {
                "Version": "2012-10-17",
                "Statement": [
                    {
                        "Effect": "Allow",
                        "Principal": {"Service": "cloudwatch.amazonaws.com"},
                        "Action": "sns:Publish",
                        "Resource": ref("Topic"),
                    }
                ],
            },
            "Topics": [ref("Topic")],
        },
        {"PolicyDocument": DENIAL},
        TOPIC,
    ),
    Case(
        "AWS::Budgets::Budget",
        {
            "Budget": {
                "BudgetName": "nxpipe",
                "BudgetLimit": {"Amount": 1000, "Unit": "USD"},
                "BudgetType": "COST",
                "TimeUnit": "MONTHLY",
                "CostFilters": {"TagKeyValue": ["user:nxpipe:project$nxpipe"]},
            },
            "NotificationsWithSubscribers": [
                {
                    "Notification": {
                        "ComparisonOperator": "GREATER_THAN",
                        "NotificationType": "FORECASTED",
                        "Threshold": 80,
                        "ThresholdType": "PERCENTAGE",
                    },
                    "Subscribers": [{"Address": "a@example.com", "SubscriptionType": "EMAIL"}],
                }
            ],
        },
        {
            "Budget": {
                "BudgetName": "nxpipe",
                "BudgetLimit": {"Amount": 2000, "Unit": "USD"},
                "BudgetType": "COST",
                "TimeUnit": "MONTHLY",
            }
        },
    ),
    Case("AWS::CDK::Metadata", {"Analytics": "v2:deflate64:x"}, {"Analytics": "v2:deflate64:y"}),
)
