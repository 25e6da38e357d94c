"""SageMaker endpoint: model, execution role, and blue/green deployment to a new artifact.

No container gets to this role where the model is isolated from the network.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aws_cdk import CfnOutput, Stack, aws_cloudwatch, aws_ec2, aws_iam, aws_logs, aws_sagemaker
from constructs import Construct

from nxpipe.pipeline.config.endpoints import OLD_FLEET_KEPT, AllAtOnce, Canary, ModelEndpoint, Shift
from nxpipe.pipeline.config.sections import Guards
from nxpipe.stacks.handles import EndpointHandle, NetworkHandle, StoreHandle
from nxpipe.stacks.iam import own_account_service, read_artifacts
from nxpipe.stacks.observability import ENDPOINT_MEASURES, Subject
from nxpipe.stacks.project import log_group, tag_project

_METRICS: Final = ("AWS/SageMaker", "/aws/sagemaker/Endpoints")
_PULL: Final = ("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer")
_INTERFACES: Final = (
    "ec2:CreateNetworkInterface",
    "ec2:CreateNetworkInterfacePermission",
    "ec2:DeleteNetworkInterface",
    "ec2:DeleteNetworkInterfacePermission",
)
_LOOKED_AT: Final = ("DhcpOptions", "NetworkInterfaces", "SecurityGroups", "Subnets", "Vpcs")

_Statement = aws_iam.PolicyStatement


@dataclass(frozen=True)
class HostedModel:
    """What one endpoint is made of."""

    image: str  # in ECR, maybe of another account
    artifacts: str  # the prefix in the bucket
    log_group: str
    subnets: Sequence[str]
    group: aws_ec2.ISecurityGroup


def hosting_role(scope: Construct, hosted: HostedModel, store: StoreHandle) -> aws_iam.Role:
    role = aws_iam.Role(
        scope,
        "Role",
        description="Taken by SageMaker, to prepare the instances of an endpoint",
        path="/nxpipe/",
        assumed_by=own_account_service(scope, "sagemaker"),
    )
    read_artifacts(store, role, hosted.artifacts)
    stack = Stack.of(scope)
    for statement in (*_image(stack, hosted), *_network(stack, hosted), *_telling(stack, hosted), _volumes(store)):
        role.add_to_principal_policy(statement)
    return role


def _image(stack: Stack, hosted: HostedModel) -> Iterator[aws_iam.PolicyStatement]:
    registry, _, rest = hosted.image.partition("/")
    account, repository = registry.partition(".")[0], rest.partition("@")[0]
    arn = f"arn:{stack.partition}:ecr:{stack.region}:{account}:repository/{repository}"
    yield _Statement(actions=list(_PULL), resources=[arn])
    yield _Statement(actions=["ecr:GetAuthorizationToken"], resources=["*"])


def _network(stack: Stack, hosted: HostedModel) -> Iterator[aws_iam.PolicyStatement]:
    """An interface has no name before it is made: meant are those in our subnets."""
    here = f"arn:{stack.partition}:ec2:{stack.region}:{stack.account}"
    subnets = [f"{here}:subnet/{each}" for each in hosted.subnets]
    group = f"{here}:security-group/{hosted.group.security_group_id}"
    in_ours = {"ArnEquals": {"ec2:Subnet": subnets}}
    yield _Statement(actions=list(_INTERFACES), resources=[f"{here}:network-interface/*"], conditions=in_ours)
    yield _Statement(actions=["ec2:CreateNetworkInterface"], resources=[*subnets, group])
    yield _Statement(actions=[f"ec2:Describe{each}" for each in _LOOKED_AT], resources=["*"])


def _telling(stack: Stack, hosted: HostedModel) -> Iterator[aws_iam.PolicyStatement]:
    group = f"arn:{stack.partition}:logs:{stack.region}:{stack.account}:log-group:{hosted.log_group}"
    yield _Statement(actions=["logs:CreateLogGroup"], resources=[group])
    lines = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
    yield _Statement(actions=lines, resources=[group, f"{group}:log-stream:*"])
    only = {"StringEquals": {"cloudwatch:namespace": list(_METRICS)}}
    yield _Statement(actions=["cloudwatch:PutMetricData"], resources=["*"], conditions=only)


def _volumes(store: StoreHandle) -> aws_iam.PolicyStatement:
    """Instances are in SageMaker's account: their volumes get to the key by a grant, which only AWS may make."""
    for_aws = {"Bool": {"kms:GrantIsForAWSResource": "true"}}
    return _Statement(actions=["kms:CreateGrant"], resources=[store.key.key_arn], conditions=for_aws)


_VARIANT: Final = "all"  # has the same name before and after, or SageMaker would shift all calls at once
_FOLDER: Final = "/opt/ml/model"  # where SageMaker puts what it has copied
_SHORTEST_LIMIT: Final = 600  # seconds, of an update

_Model = aws_sagemaker.CfnModel
_Config = aws_sagemaker.CfnEndpointConfig
_Endpoint = aws_sagemaker.CfnEndpoint


class EndpointStack(Stack):
    """One endpoint."""

    handle: EndpointHandle

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        endpoint: ModelEndpoint,
        guards: Guards,
        network: NetworkHandle,
        store: StoreHandle,
        prefix: str,
        **kwargs: Any,
    ) -> None:
        """`prefix` is where the store is in its bucket: "" or "models/", say."""
        super().__init__(scope, id_, description=f"Endpoint {endpoint.name} of {project}", **kwargs)
        self._endpoint, self._network, self._store = endpoint, network, store
        self._name = f"{project}-{endpoint.name}"
        self._artifacts = f"{prefix}endpoints/{endpoint.name}/"
        dimensions = {"EndpointName": self._name, "VariantName": _VARIANT}
        alarms = self._alarms(Subject("", dimensions), guards)
        made = self._serve(self._config(self._model()), alarms)
        self.handle = EndpointHandle(endpoint.name, dimensions, alarms)
        tag_project(self, project)
        CfnOutput(self, "EndpointName", value=made.attr_endpoint_name, description="What callers invoke")

    def _alarms(self, subject: Subject, guards: Guards) -> list[aws_cloudwatch.Alarm]:
        made = []
        for measure in ENDPOINT_MEASURES:
            name = f"{self._name}-endpoint-{measure.key}"
            alarm = measure.alarm(self, measure.key, name=name, subject=subject, guards=guards)
            if alarm is not None:
                made.append(alarm)
        return made

    def _model(self) -> aws_sagemaker.CfnModel:
        group, subnets = self._group(), [each.subnet_id for each in self._network.subnets.values()]
        role = hosting_role(
            self, HostedModel(self._endpoint.image, self._artifacts, self._log_group, subnets, group), self._store
        )
        data = _Model.S3DataSourceProperty(
            s3_uri=f"s3://{self._store.bucket.bucket_name}/{self._artifacts}{self._endpoint.artifact}/",
            s3_data_type="S3Prefix",
            compression_type="None",
        )
        model = _Model(
            self,
            "Model",
            execution_role_arn=role.role_arn,
            enable_network_isolation=True,
            primary_container=_Model.ContainerDefinitionProperty(
                image=self._endpoint.image,
                environment={"NXPIPE_ARTIFACT": _FOLDER},
                model_data_source=_Model.ModelDataSourceProperty(s3_data_source=data),
            ),
            vpc_config=_Model.VpcConfigProperty(security_group_ids=[group.security_group_id], subnets=subnets),
        )
        model.node.add_dependency(role.node.find_child("DefaultPolicy"))  # SageMaker tries what it may do
        return model

    def _config(self, model: aws_sagemaker.CfnModel) -> aws_sagemaker.CfnEndpointConfig:
        ready = int(self._endpoint.ready_within.total_seconds())
        variant = _Config.ProductionVariantProperty(
            variant_name=_VARIANT,
            model_name=model.attr_model_name,
            instance_type=self._endpoint.instance_type,
            initial_instance_count=self._endpoint.instances,
            initial_variant_weight=1,
            model_data_download_timeout_in_seconds=ready,
            container_startup_health_check_timeout_in_seconds=ready,
            volume_size_in_gb=self._endpoint.disk,
        )
        return _Config(self, "Config", production_variants=[variant], kms_key_id=self._store.key.key_arn)

    def _serve(
        self, config: aws_sagemaker.CfnEndpointConfig, alarms: list[aws_cloudwatch.Alarm]
    ) -> aws_sagemaker.CfnEndpoint:
        longest = max(int(self._endpoint.longest_update.total_seconds()), _SHORTEST_LIMIT)
        moving = _Endpoint.BlueGreenUpdatePolicyProperty(
            traffic_routing_configuration=_routing(self._endpoint.shift),
            termination_wait_in_seconds=int(OLD_FLEET_KEPT.total_seconds()),
            maximum_execution_timeout_in_seconds=longest,
        )
        back = _Endpoint.AutoRollbackConfigProperty(
            alarms=[_Endpoint.AlarmProperty(alarm_name=each.alarm_name) for each in alarms]
        )
        made = _Endpoint(
            self,
            "Endpoint",
            endpoint_name=self._name,
            endpoint_config_name=config.attr_endpoint_config_name,
            deployment_config=_Endpoint.DeploymentConfigProperty(
                blue_green_update_policy=moving, auto_rollback_configuration=back
            ),
        )
        made.node.add_dependency(self._logs())
        return made

    def _logs(self) -> aws_logs.LogGroup:
        """Under the name that SageMaker would make it by, for ever, at its first line."""
        return log_group(self, "Logs", self._log_group)

    @property
    def _log_group(self) -> str:
        return f"/aws/sagemaker/Endpoints/{self._name}"

    def _group(self) -> aws_ec2.SecurityGroup:
        """Of the interfaces by which SageMaker fetches the artifact: nobody calls them."""
        group = aws_ec2.SecurityGroup(
            self,
            "Group",
            vpc=self._network.vpc,
            description=f"Instances of endpoint {self._endpoint.name}",
            allow_all_outbound=False,
        )
        group.add_egress_rule(aws_ec2.Peer.any_ipv4(), aws_ec2.Port.tcp(443), "S3")
        return group


def _routing(shift: Shift) -> aws_sagemaker.CfnEndpoint.TrafficRoutingConfigProperty:
    bake = int(shift.bake.total_seconds())
    if isinstance(shift, AllAtOnce):
        return _Endpoint.TrafficRoutingConfigProperty(type="ALL_AT_ONCE", wait_interval_in_seconds=bake)
    step = _Endpoint.CapacitySizeProperty(type="CAPACITY_PERCENT", value=shift.percent)
    if isinstance(shift, Canary):
        return _Endpoint.TrafficRoutingConfigProperty(type="CANARY", canary_size=step, wait_interval_in_seconds=bake)
    return _Endpoint.TrafficRoutingConfigProperty(type="LINEAR", linear_step_size=step, wait_interval_in_seconds=bake)
