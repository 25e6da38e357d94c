"""SageMaker endpoints on the local AWS."""

from functools import cache
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from aws_cdk import RemovalPolicy
from botocore.session import get_session

from nxpipe.pipeline.config import Config, load_config
from nxpipe.pipeline.config.endpoints import HOSTED
from nxpipe.pipeline.config.prices import Price, Prices, Purchase, load_prices
from nxpipe.stacks.lint.costs import estimate
from nxpipe.stacks.lint.egress import needs
from nxpipe.stacks.lint.finding import Facts
from nxpipe.stacks.lint.rules import lint
from nxpipe.stacks.lint.template import Templates, read
from nxpipe.stacks.network import NetworkStack
from nxpipe.stacks.observability import ObserveStack
from nxpipe.stacks.sagemaker import EndpointStack
from nxpipe.stacks.storage import StoreStack
from tests.localaws.census import census
from tests.stacks.linting import complaints
from tests.stacks.local import HERE, REGION, deploy, destroy, new_app, resources, template_of
from tests.stacks.permissions import allowed, statements_of

FIRST, SECOND = "1" * 64, "2" * 64
CANARY: Final = '{ kind = "canary", percent = 25, bake = "10m" }'
_CONFIG: Final = """
[project]
name = "demo"
region = "us-east-2"
account = "123456789012"
[rollout.guards]
max_p99 = "800ms"
[[models]]
name = "bert"
id = "acme/bert"
task = "fill-mask"
target = "inf2.xlarge"
[[endpoints]]
name = "answers"
model = "bert"
artifact = "{artifact}"
image = "210987654321.dkr.ecr.us-east-2.amazonaws.com/team/serve@sha256:{image}"
instance_type = "{type}"
instances = 4
shift = {shift}
{more}
"""


class World:
    """The stacks of a project with one endpoint."""

    def __init__(self, config: Config) -> None:
        app, project = new_app(), config.project.name
        self.network = NetworkStack(
            app, "demo-network", project=project, network=config.network, zones=("us-east-2a", "us-east-2b"), env=HERE
        )
        self.store = StoreStack(app, "demo-storage", project=project, removal_policy=RemovalPolicy.DESTROY, env=HERE)
        (endpoint,) = config.endpoints
        guards = config.rollout.guards
        self.endpoint = EndpointStack(
            app,
            "demo-endpoint-answers",
            project=project,
            endpoint=endpoint,
            guards=guards,
            network=self.network.handle,
            store=self.store.handle,
            prefix="models/",
            env=HERE,
        )
        self.observe = ObserveStack(
            app,
            "demo-observe",
            project=project,
            observe=config.observe,
            budget=config.budget,
            guards=guards,
            fleets=[],
            endpoints=[self.endpoint.handle],
            hourly={},
            env=HERE,
        )

    @property
    def stacks(self) -> tuple[NetworkStack, StoreStack, EndpointStack, ObserveStack]:
        return (self.network, self.store, self.endpoint, self.observe)

    @property
    def templates(self) -> Templates:
        return Templates(tuple(read(stack.stack_name, template_of(stack), REGION) for stack in self.stacks))

    def only(self, type_: str) -> dict[str, Any]:
        found = template_of(self.endpoint)["Resources"].values()
        (one,) = (entry["Properties"] for entry in found if entry["Type"] == f"AWS::SageMaker::{type_}")
        properties: dict[str, Any] = one
        return properties


def configured(
    folder: Path,
    *,
    artifact: str = FIRST,
    image: str = "a" * 64,
    shift: str = CANARY,
    type: str = "ml.inf2.xlarge",  # noqa: A002, the word of nxpipe.toml
    more: str = "disk = 100",
) -> Config:
    path = folder / "nxpipe.toml"
    text = _CONFIG.format(artifact=artifact, image=image, shift=shift, type=type, more=more)
    path.write_text(text.replace('"inf2.xlarge"', f'"{type.removeprefix("ml.")}"'))
    return load_config(path, {})


def world(folder: Path, **asked: str) -> World:
    return _world(configured(folder, **asked))


@cache
def _world(config: Config) -> World:
    """Read and deployed only: no test adds to it."""
    return World(config)


def served() -> dict[str, Any]:
    """The endpoint, and its deployed resources."""
    sagemaker = boto3.client("sagemaker")
    endpoint = sagemaker.describe_endpoint(EndpointName="demo-answers")
    config = sagemaker.describe_endpoint_config(EndpointConfigName=endpoint["EndpointConfigName"])
    (variant,) = config["ProductionVariants"]
    return {"config": config, "variant": variant, "model": sagemaker.describe_model(ModelName=variant["ModelName"])}


def source() -> str:
    found: str = served()["model"]["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]["S3Uri"]
    return found


def test_an_endpoint_lives_moves_to_another_artifact_and_leaves_nothing_behind(aws: None, tmp_path: Path) -> None:
    made = world(tmp_path)
    deploy(made.network, made.store, made.endpoint)
    assert [str(entry) for entry in census(REGION)] == []
    assert source().endswith(f"/models/endpoints/answers/{FIRST}/")
    first = served()

    deploy(world(tmp_path, artifact=SECOND).endpoint)
    assert source().endswith(f"/models/endpoints/answers/{SECOND}/")
    second = served()
    assert second["variant"]["VariantName"] == first["variant"]["VariantName"]
    assert second["config"]["EndpointConfigName"] != first["config"]["EndpointConfigName"]
    assert len(boto3.client("sagemaker").list_models()["Models"]) == 1
    assert [str(entry) for entry in census(REGION)] == []

    destroy(made.endpoint)
    sagemaker = boto3.client("sagemaker")
    assert not sagemaker.list_endpoints()["Endpoints"]
    assert not sagemaker.list_endpoint_configs()["EndpointConfigs"]
    assert not sagemaker.list_models()["Models"]
    assert not boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    groups = boto3.client("logs").describe_log_groups(logGroupNamePrefix="/aws/sagemaker")
    assert not groups["logGroups"]
    assert not [role for role in boto3.client("iam").list_roles()["Roles"] if "endpoint" in role["RoleName"]]


def test_the_role_prepares_instances_of_its_own_endpoint_and_does_nothing_else(aws: None, tmp_path: Path) -> None:
    made = world(tmp_path)
    deploy(made.network, made.store, made.endpoint)
    (role,) = resources(made.endpoint, "AWS::IAM::Role")
    may = statements_of(role)
    (bucket,) = (resource for resource in resources(made.store, "AWS::S3::Bucket") if "artifacts" in resource)
    ours, theirs = f"arn:aws:s3:::{bucket}/models/endpoints/answers", f"arn:aws:s3:::{bucket}/models/endpoints/others"
    assert allowed(may, "s3:GetObject", f"{ours}/{FIRST}/manifest.json")
    assert not allowed(may, "s3:GetObject", f"{theirs}/{FIRST}/manifest.json")
    assert not allowed(may, "s3:GetObject", f"arn:aws:s3:::{bucket}/models/cas/sha256/aa/{FIRST}")
    assert not allowed(may, "s3:PutObject", f"{ours}/{FIRST}/manifest.json")

    here = "arn:aws:ec2:us-east-2:123456789012"
    subnets = resources(made.network, "AWS::EC2::Subnet")
    for action in ("ec2:CreateNetworkInterface", "ec2:DeleteNetworkInterface", "ec2:CreateNetworkInterfacePermission"):
        for subnet in subnets:
            inside = {"ec2:Subnet": f"{here}:subnet/{subnet}"}
            assert allowed(may, action, f"{here}:network-interface/eni-1", inside), action
        assert not allowed(may, action, f"{here}:network-interface/eni-1", {"ec2:Subnet": f"{here}:subnet/subnet-1"})

    registry = "arn:aws:ecr:us-east-2:210987654321:repository"
    assert allowed(may, "ecr:BatchGetImage", f"{registry}/team/serve")
    assert not allowed(may, "ecr:BatchGetImage", f"{registry}/team/others")
    logs = "arn:aws:logs:us-east-2:123456789012:log-group:/aws/sagemaker/Endpoints"
    assert allowed(may, "logs:PutLogEvents", f"{logs}/demo-answers:log-stream:all/i-1")
    assert not allowed(may, "logs:PutLogEvents", f"{logs}/demo-others:log-stream:all/i-1")
    assert allowed(may, "cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": "AWS/SageMaker"})
    assert not allowed(may, "cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": "nxpipe"})


# Templates


def test_the_container_has_the_artifact_and_no_network(tmp_path: Path) -> None:
    model = world(tmp_path).only("Model")
    assert model["EnableNetworkIsolation"] is True
    container = model["PrimaryContainer"]
    assert container["Environment"] == {"NXPIPE_ARTIFACT": "/opt/ml/model"}
    assert container["Image"].endswith(f"@sha256:{'a' * 64}")
    data = container["ModelDataSource"]["S3DataSource"]
    assert (data["S3DataType"], data["CompressionType"]) == ("S3Prefix", "None")
    assert len(model["VpcConfig"]["Subnets"]) == 2
    assert len(model["VpcConfig"]["SecurityGroupIds"]) == 1


@pytest.mark.parametrize("type_", ["ml.trn1.2xlarge", "ml.trn1n.32xlarge"])
def test_a_type_with_local_disks_has_no_volume_key_which_sagemaker_refuses(tmp_path: Path, type_: str) -> None:
    """CreateEndpointConfig fails with a KmsKeyId for Nitro instances with local storage; the hardware encrypts it."""
    made = world(tmp_path, type=type_, more="")
    assert "KmsKeyId" not in made.only("EndpointConfig")
    assert "kms:CreateGrant" not in str(template_of(made.endpoint))


def test_other_volumes_are_encrypted_with_the_stores_key(tmp_path: Path) -> None:
    made = world(tmp_path)
    assert "KmsKeyId" in made.only("EndpointConfig")
    assert "kms:CreateGrant" in str(template_of(made.endpoint))


def test_a_rehearsal_says_so_in_its_description_its_tags_and_the_dashboard(tmp_path: Path) -> None:
    made = world(tmp_path, more="rehearsal = true")
    described = template_of(made.endpoint)["Description"]
    assert described == "Endpoint answers of demo (rehearsal: may serve programs of the emulator)"
    assert {"Key": "nxpipe:rehearsal", "Value": "true"} in made.only("Endpoint")["Tags"]
    assert "answers (SageMaker): REHEARSAL" in str(template_of(made.observe))
    assert "REHEARSAL" not in str(template_of(world(tmp_path).observe))


def test_a_change_of_artifact_or_image_gives_the_endpoint_another_configuration_and_keeps_its_name(
    tmp_path: Path,
) -> None:
    """CloudFormation makes models and configurations anew when they change, since SageMaker changes neither."""
    usual = world(tmp_path)
    for changed in (world(tmp_path, artifact=SECOND), world(tmp_path, image="b" * 64)):
        assert changed.only("Model") != usual.only("Model")
        assert changed.only("EndpointConfig") == usual.only("EndpointConfig")  # refers to the model, whatever it is
        assert changed.only("Endpoint") == usual.only("Endpoint")
    assert usual.only("Endpoint")["EndpointName"] == "demo-answers"
    for nameless in (usual.only("Model"), usual.only("EndpointConfig")):
        assert "ModelName" not in nameless
        assert "EndpointConfigName" not in nameless  # or the new one could not be made beside the old


SHIFTS = {
    CANARY: {
        "Type": "CANARY",
        "CanarySize": {"Type": "CAPACITY_PERCENT", "Value": 25},
        "WaitIntervalInSeconds": 600,
    },
    '{ kind = "linear", percent = 30, bake = "5m" }': {
        "Type": "LINEAR",
        "LinearStepSize": {"Type": "CAPACITY_PERCENT", "Value": 30},
        "WaitIntervalInSeconds": 300,
    },
    '{ kind = "all-at-once", bake = "3m" }': {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": 180},
}


@pytest.mark.parametrize("shift", SHIFTS)
def test_calls_shift_as_the_file_says_and_sagemaker_gives_the_update_time_enough(tmp_path: Path, shift: str) -> None:
    deployment = world(tmp_path, shift=shift).only("Endpoint")["DeploymentConfig"]
    policy = deployment["BlueGreenUpdatePolicy"]
    assert policy["TrafficRoutingConfiguration"] == SHIFTS[shift]
    (endpoint,) = configured(tmp_path, shift=shift).endpoints
    bakes = endpoint.shift.steps * endpoint.shift.bake
    watched = bakes.total_seconds() + policy["TerminationWaitInSeconds"]
    assert 600 <= watched + 3600 <= policy["MaximumExecutionTimeoutInSeconds"] <= 28800


def test_alarms_of_latency_and_failures_take_calls_back_and_tell_somebody(tmp_path: Path) -> None:
    made = world(tmp_path)
    named = [
        alarm["AlarmName"] for alarm in made.only("Endpoint")["DeploymentConfig"]["AutoRollbackConfiguration"]["Alarms"]
    ]
    resources = template_of(made.endpoint)["Resources"]
    alarms = [resources[entry["Ref"]]["Properties"] for entry in named]
    metrics = {
        metric["MetricStat"]["Metric"]["MetricName"]
        for alarm in alarms
        for metric in alarm["Metrics"]
        if "MetricStat" in metric
    }
    assert metrics == {"ModelLatency", "Invocation5XXErrors", "Invocations"}
    (latency,) = (alarm for alarm in alarms if "latency" in alarm["AlarmName"])
    assert latency["Threshold"] == 0.8  # in seconds, which the expression makes of microseconds
    assert any(metric.get("Expression") == "time_ / 1000000" for metric in latency["Metrics"])
    (told,) = (
        resource["Properties"]
        for resource in template_of(made.observe)["Resources"].values()
        if resource["Type"] == "AWS::CloudWatch::CompositeAlarm"
    )
    assert told["AlarmName"] == "demo-answers-endpoint-bad"
    assert told["AlarmActions"]


def test_sagemakers_fetching_gets_a_way_to_s3_and_nothing_else_of_the_endpoint_asks_for_one(tmp_path: Path) -> None:
    template = template_of(world(tmp_path).endpoint)
    assert {need.endpoint for need in needs("demo-endpoint-answers", template["Resources"])} == {"s3"}


def test_the_guards_find_nothing_but_the_endpoints_that_are_made_last(tmp_path: Path) -> None:
    found = [entry for entry in lint(world(tmp_path).templates, Facts()) if entry.rule != "NXP-NET-2"]
    assert [str(entry) for entry in found] == []


def test_instances_of_sagemaker_are_priced_by_its_own_list_or_said_to_have_no_price(tmp_path: Path) -> None:
    templates = world(tmp_path).templates
    assert "4 × ml.inf2.xlarge (demo-endpoint-answers/" in str(estimate(templates, load_prices()))
    assert "no price known in us-east-2" in str(estimate(templates, load_prices()))
    priced = Prices({(REGION, "ml.inf2.xlarge", Purchase.ON_DEMAND): Price(0.5, load_prices().date, "test")})
    assert estimate(templates, priced).hourly == pytest.approx(2.0)


def test_the_instance_types_are_those_of_the_catalogue_that_sagemaker_hosts_on() -> None:
    shape = get_session().get_service_model("sagemaker").shape_for("ProductionVariantInstanceType")
    assert set(HOSTED) <= set(shape.enum)
    assert {"ml.inf2.48xlarge", "ml.trn1.32xlarge"} <= set(HOSTED)


def test_cfn_lint_finds_nothing_to_say(tmp_path: Path) -> None:
    assert complaints(template_of(world(tmp_path).endpoint), REGION) == []
