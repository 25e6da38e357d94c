"""Cases of SageMaker."""

from typing import Final

from tests.localaws.cases.case import NETWORK, Case, ref, role, tags

_MODEL: Final = {
    "Model": {
        "Type": "AWS::SageMaker::Model",
        "Properties": {"ExecutionRoleArn": ref("Role", "Arn"), "PrimaryContainer": {"Image": "repo/image:1"}},
    },
    "Role": role("sagemaker"),
}

_VARIANT: Final = {
    "VariantName": "one",
    "ModelName": ref("Model", "ModelName"),
    "InitialInstanceCount": 1,
    "InitialVariantWeight": 1.0,
    "InstanceType": "ml.inf2.xlarge",
}

_CONFIG: Final = {
    name: {"Type": "AWS::SageMaker::EndpointConfig", "Properties": {"ProductionVariants": [_VARIANT]}}
    for name in ("Config", "NextConfig")
}


CASES: Final = (
    Case(
        "AWS::SageMaker::Model",
        {
            "EnableNetworkIsolation": True,
            "ExecutionRoleArn": ref("Role", "Arn"),
            "ModelName": "nxpipe-m",
            "PrimaryContainer": {"Image": "repo/image:1", "Environment": {"A": "b"}},
            "Tags": tags(a="1"),
            "VpcConfig": {"SecurityGroupIds": [ref("Group")], "Subnets": [ref("A")]},
        },
        {"Tags": tags(b="1")},
        {"Role": role("sagemaker"), **NETWORK},
    ),
    Case(
        "AWS::SageMaker::EndpointConfig",
        {
            "EndpointConfigName": "nxpipe-e",
            "ProductionVariants": [_VARIANT],
            "Tags": tags(a="1"),
        },
        {"Tags": tags(b="1")},
        _MODEL,
    ),
    Case(
        "AWS::SageMaker::Endpoint",
        {
            "DeploymentConfig": {
                "BlueGreenUpdatePolicy": {
                    "MaximumExecutionTimeoutInSeconds": 3600,
                    "TerminationWaitInSeconds": 60,
                    "TrafficRoutingConfiguration": {
                        "Type": "CANARY",
                        "CanarySize": {"Type": "CAPACITY_PERCENT", "Value": 10},
                        "WaitIntervalInSeconds": 120,
                    },
                },
                "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": "x"}]},
            },
            "EndpointConfigName": ref("Config", "EndpointConfigName"),
            "EndpointName": "nxpipe-e",
            "Tags": tags(a="1"),
        },
        {"EndpointConfigName": ref("NextConfig", "EndpointConfigName"), "Tags": tags(b="1")},
        {**_MODEL, **_CONFIG},
    ),
)
