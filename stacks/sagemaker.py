"""SageMaker endpoint: model, execution role, and blue/green deployment to a new artifact.

The container cannot use the execution role, because network isolation is enabled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aws_cdk import CfnOutput, Stack, aws_cloudwatch, aws_ec2, aws_iam, aws_logs, aws_sagemaker
from constructs import Construct

from nxpipe.pipeline.config.endpoints import OLD_FLEET_KEPT, AllAtOnce, Canary, ModelEndpoint, Shift
from nxpipe.pipeline.config.sections import Guards
from nxpipe.stacks.handles import EndpointHandle, NetworkHandle, StoreHandle
from nxpipe.stacks.iam import own_account_service, read_artifacts, wait_for_permissions
from nxpipe.stacks.measures import ENDPOINT_MEASURES, Subject
from nxpipe.stacks.project import description_of, log_group, tag_project, tag_rehearsal

_METRICS: Final = ("AWS/SageMaker", "/aws/sagemaker/Endpoints")
_PULL: Final = ("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer")
_INTERFACES: Final = (
    "ec2:CreateNetworkInterface",
    "ec2:CreateNetworkInterfacePermission",
    "ec2:DeleteNetworkInterface",
    "ec2:DeleteNetworkInterfacePermission",
)
_DESCRIBED: Final = ("DhcpOptions", "NetworkInterfaces", "SecurityGroups", "Subnets", "Vpcs")

_Statement = aws_iam.PolicyStatement


@dataclass(frozen=True)
class HostedModel:
    """Image, artifact, log group and network of one endpoint."""

    image: str  # in ECR, possibly of another account
    artifacts: str  # the prefix in the bucket
    log_group: str
    subnets: Sequence[str]
    group: aws_ec2.ISecurityGroup
    has_volume: bool  # encrypted with the store's key; local disks encrypt themselves


def hosting_role(scope: Construct, hosted: HostedModel, store: StoreHandle) -> aws_iam.Role:
    """Role that SageMaker assumes to start an endpoint's instances."""
    role = aws_iam.Role(
        scope,
        "Role",
        description="Taken by SageMaker, to prepare the instances of an endpoint",
        path="/nxpipe/",
        assumed_by=own_account_service(scope, "sagemaker"),
    )
    read_artifacts(store, role, hosted.artifacts)
    stack = Stack.of(scope)
    statements = (
        *_image_statements(stack, hosted),
        *_network_statements(stack, hosted),
        *_monitoring_statements(stack, hosted),
        *([_volume_statement(store)] if hosted.has_volume else []),
    )
    for statement in statements:
        role.add_to_principal_policy(statement)
    return role


def _image_statements(stack: Stack, hosted: HostedModel) -> Iterator[aws_iam.PolicyStatement]:
    registry, _, path = hosted.image.partition("/")
    account, repository = registry.partition(".")[0], path.partition("@")[0]
    arn = f"arn:{stack.partition}:ecr:{stack.region}:{account}:repository/{repository}"
    yield _Statement(actions=list(_PULL), resources=[arn])
    yield _Statement(actions=["ecr:GetAuthorizationToken"], resources=["*"])


def _network_statements(stack: Stack, hosted: HostedModel) -> Iterator[aws_iam.PolicyStatement]:
    """Statements for network interfaces. They have no ARN in advance, so a condition limits them to the subnets."""
    prefix = f"arn:{stack.partition}:ec2:{stack.region}:{stack.account}"
    subnets = [f"{prefix}:subnet/{subnet}" for subnet in hosted.subnets]
    group = f"{prefix}:security-group/{hosted.group.security_group_id}"
    in_subnets = {"ArnEquals": {"ec2:Subnet": subnets}}
    yield _Statement(actions=list(_INTERFACES), resources=[f"{prefix}:network-interface/*"], conditions=in_subnets)
    yield _Statement(actions=["ec2:CreateNetworkInterface"], resources=[*subnets, group])
    yield _Statement(actions=[f"ec2:Describe{kind}" for kind in _DESCRIBED], resources=["*"])


def _monitoring_statements(stack: Stack, hosted: HostedModel) -> Iterator[aws_iam.PolicyStatement]:
    group = f"arn:{stack.partition}:logs:{stack.region}:{stack.account}:log-group:{hosted.log_group}"
    actions = ["CreateLogGroup", "CreateLogStream", "DescribeLogStreams", "PutLogEvents"]
    # The ARN of a group matches calls of the tagging API only; all others need the form with `:*`.
    yield _Statement(actions=[f"logs:{action}" for action in actions], resources=[f"{group}:*"])
    namespaces = {"StringEquals": {"cloudwatch:namespace": list(_METRICS)}}
    yield _Statement(actions=["cloudwatch:PutMetricData"], resources=["*"], conditions=namespaces)


def _volume_statement(store: StoreHandle) -> aws_iam.PolicyStatement:
    """Statement for grants on the key, restricted to AWS services: instances are in SageMaker's account."""
    for_aws = {"Bool": {"kms:GrantIsForAWSResource": "true"}}
    return _Statement(actions=["kms:CreateGrant"], resources=[store.key.key_arn], conditions=for_aws)


_VARIANT: Final = "all"  # constant: for a variant with a new name SageMaker would shift all calls at once
_FOLDER: Final = "/opt/ml/model"  # to which SageMaker copies the artifact
_MIN_TIMEOUT: Final = 600  # seconds: SageMaker's minimum for the duration of an update

_Model = aws_sagemaker.CfnModel
_Config = aws_sagemaker.CfnEndpointConfig
_Endpoint = aws_sagemaker.CfnEndpoint


class EndpointStack(Stack):
    """Model, endpoint configuration, endpoint and alarms of one [[endpoints]] entry."""

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
        """`prefix` is the store's key prefix in the bucket, such as "models/"."""
        description = description_of(f"Endpoint {endpoint.name}", project, rehearsal=endpoint.rehearsal)
        super().__init__(scope, id_, description=description, **kwargs)
        self._endpoint, self._network, self._store = endpoint, network, store
        self._name = f"{project}-{endpoint.name}"
        self._artifacts = f"{prefix}endpoints/{endpoint.name}/"
        dimensions = {"EndpointName": self._name, "VariantName": _VARIANT}
        alarms = self._alarms(Subject("", dimensions), guards)
        created = self._serve(self._config(self._model()), alarms)
        self.handle = EndpointHandle(endpoint.name, dimensions, alarms, endpoint.rehearsal)
        tag_project(self, project)
        if endpoint.rehearsal:
            tag_rehearsal(self)
        CfnOutput(self, "EndpointName", value=created.attr_endpoint_name, description="Name of the endpoint to invoke")

    def _alarms(self, subject: Subject, guards: Guards) -> list[aws_cloudwatch.Alarm]:
        alarms = []
        for measure in ENDPOINT_MEASURES:
            name = f"{self._name}-endpoint-{measure.key}"
            alarm = measure.alarm(self, measure.key, name=name, subject=subject, guards=guards)
            if alarm is not None:
                alarms.append(alarm)
        return alarms

    def _model(self) -> aws_sagemaker.CfnModel:
        group, subnets = self._group(), [subnet.subnet_id for subnet in self._network.subnets.values()]
        hosted = HostedModel(
            image=self._endpoint.image,
            artifacts=self._artifacts,
            log_group=self._log_group,
            subnets=subnets,
            group=group,
            has_volume=not self._endpoint.has_local_disks,
        )
        role = hosting_role(self, hosted, self._store)
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
        wait_for_permissions(model, role)  # SageMaker checks them at creation
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
        key = None if self._endpoint.has_local_disks else self._store.key.key_arn
        return _Config(self, "Config", production_variants=[variant], kms_key_id=key)

    def _serve(
        self, config: aws_sagemaker.CfnEndpointConfig, alarms: list[aws_cloudwatch.Alarm]
    ) -> aws_sagemaker.CfnEndpoint:
        timeout = max(int(self._endpoint.longest_update.total_seconds()), _MIN_TIMEOUT)
        update = _Endpoint.BlueGreenUpdatePolicyProperty(
            traffic_routing_configuration=_routing(self._endpoint.shift),
            termination_wait_in_seconds=int(OLD_FLEET_KEPT.total_seconds()),
            maximum_execution_timeout_in_seconds=timeout,
        )
        rollback = _Endpoint.AutoRollbackConfigProperty(
            alarms=[_Endpoint.AlarmProperty(alarm_name=alarm.alarm_name) for alarm in alarms]
        )
        endpoint = _Endpoint(
            self,
            "Endpoint",
            endpoint_name=self._name,
            endpoint_config_name=config.attr_endpoint_config_name,
            deployment_config=_Endpoint.DeploymentConfigProperty(
                blue_green_update_policy=update, auto_rollback_configuration=rollback
            ),
        )
        endpoint.node.add_dependency(self._logs())
        return endpoint

    def _logs(self) -> aws_logs.LogGroup:
        """Log group under the name that SageMaker uses; one that SageMaker creates itself has no expiry."""
        return log_group(self, "Logs", self._log_group)

    @property
    def _log_group(self) -> str:
        return f"/aws/sagemaker/Endpoints/{self._name}"

    def _group(self) -> aws_ec2.SecurityGroup:
        """Security group, without ingress, of the interfaces through which SageMaker downloads the artifact."""
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
