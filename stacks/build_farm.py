"""Build farm on AWS Batch. Training fleets and proofs share its roles, retry strategy and log configuration."""

from typing import Any, Final

from aws_cdk import ArnFormat, CfnOutput, Stack, aws_batch, aws_ec2, aws_iam, aws_logs
from constructs import Construct

from nxpipe.pipeline.config.cloud import Farm
from nxpipe.stacks.handles import FarmHandle, NetworkHandle, ReleaseHandle, StoreHandle
from nxpipe.stacks.iam import own_account_service, publishing, submitting, wait_for_permissions
from nxpipe.stacks.launch import tag_specifications
from nxpipe.stacks.project import PROJECT_TAG, log_group, tag_project
from nxpipe.stacks.references import role_by_value

_Job = aws_batch.CfnJobDefinition

# An update of the compute environment does not terminate running jobs for 5 days, the longest time that Batch allows.
UPDATE_POLICY: Final = aws_batch.CfnComputeEnvironment.UpdatePolicyProperty(
    job_execution_timeout_minutes=5 * 24 * 60, terminate_jobs_on_update=False
)


def instance_role(scope: Construct) -> aws_iam.Role:
    """Role of Batch's instances, with AWS's managed policy: Batch names the ECS cluster that instances join."""
    return aws_iam.Role(
        scope,
        "InstanceRole",
        path="/nxpipe/",
        assumed_by=aws_iam.ServicePrincipal("ec2.amazonaws.com"),
        managed_policies=[
            aws_iam.ManagedPolicy.from_aws_managed_policy_name("service-role/AmazonEC2ContainerServiceforEC2Role")
        ],
    )


def instance_profile(scope: Construct, role: aws_iam.Role) -> aws_iam.CfnInstanceProfile:
    """Instance profile of a role that has all its statements already."""
    profile = aws_iam.CfnInstanceProfile(scope, "Profile", path="/nxpipe/", roles=[role.role_name])
    wait_for_permissions(profile, role)
    return profile


def limit_logs(role: aws_iam.Role, name: str) -> None:
    """Limit instances to one log group: AWS's managed policy permits them to write into every log."""
    streams = Stack.of(role).format_arn(
        service="logs",
        resource="log-group",
        resource_name=f"{name}:*",
        arn_format=ArnFormat.COLON_RESOURCE_NAME,
    )
    role.add_to_principal_policy(
        aws_iam.PolicyStatement(
            effect=aws_iam.Effect.DENY,
            actions=["logs:CreateLogStream", "logs:PutLogEvents"],
            not_resources=[streams],
        )
    )


def job_role(scope: Construct) -> aws_iam.Role:
    """Role that containers of this account's ECS tasks assume."""
    return aws_iam.Role(scope, "JobRole", path="/nxpipe/", assumed_by=own_account_service(scope, "ecs-tasks"))


def log_configuration(group: aws_logs.ILogGroup) -> aws_batch.CfnJobDefinition.LogConfigurationProperty:
    options = {"awslogs-group": group.log_group_name, "awslogs-stream-prefix": "job"}
    return _Job.LogConfigurationProperty(log_driver="awslogs", options=options)


def retry_strategy(attempts: int) -> aws_batch.CfnJobDefinition.RetryStrategyProperty:
    """Retry a job whose instance was lost; do not retry a job that failed by itself."""
    retry = _Job.EvaluateOnExitProperty(action="RETRY", on_status_reason="Host EC2*")
    exit_ = _Job.EvaluateOnExitProperty(action="EXIT", on_reason="*")
    return _Job.RetryStrategyProperty(attempts=attempts, evaluate_on_exit=[retry, exit_])


# x86, because the Neuron compiler is; 4 to 8 GiB per vCPU. Several families, because spot capacity varies by family.
_FAMILIES: Final = ("m7i", "m6i", "r7i", "r6i")
_DISK_GIB: Final = 300  # for the image, a model's weights, and its programs
_VCPUS: Final = 16  # default of a job
_MEMORY_MIB: Final = 60_000  # available to a container on an instance with 64 GiB
_LONGEST_JOB: Final = 12 * 3600  # seconds
_ATTEMPTS: Final = 5

_Template = aws_ec2.CfnLaunchTemplate
_Environment = aws_batch.CfnComputeEnvironment


class FarmStack(Stack):
    """Batch job queue, job definition, and a compute environment of spot instances."""

    handle: FarmHandle

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        farm: Farm,
        network: NetworkHandle,
        store: StoreHandle,
        prefix: str,
        release: ReleaseHandle | None = None,
        **kwargs: Any,
    ) -> None:
        """`prefix` is the store's key prefix, such as "models/"; the role of `release` may submit jobs."""
        super().__init__(scope, id_, description=f"Build farm of {project}", **kwargs)
        self._project = project
        queue = self._queue(self._environment(farm, network))
        job = self._job(farm, store, prefix)
        self.handle = FarmHandle(
            queue=aws_batch.JobQueue.from_job_queue_arn(self, "Builds", queue.ref),
            job_definition=aws_batch.EcsJobDefinition.from_job_definition_arn(self, "Build", job.ref),
        )
        policy = self._submitting(queue, job, release)
        tag_project(self, project)
        CfnOutput(self, "QueueArn", value=queue.ref, description="Job queue for builds")
        CfnOutput(self, "JobDefinitionArn", value=job.ref, description="Default job definition")
        CfnOutput(self, "SubmittingPolicyArn", value=policy.managed_policy_arn, description="Policy to submit builds")

    def _environment(self, farm: Farm, network: NetworkHandle) -> aws_batch.CfnComputeEnvironment:
        """Compute environment. Updates are in place: running jobs finish, and new jobs get new instances."""
        template = self._launch_template()
        resources = _Environment.ComputeResourcesProperty(
            type="SPOT",
            allocation_strategy="SPOT_PRICE_CAPACITY_OPTIMIZED",
            minv_cpus=0,
            maxv_cpus=farm.max_vcpus,
            instance_types=list(_FAMILIES),
            instance_role=instance_profile(self, instance_role(self)).attr_arn,
            subnets=[subnet.subnet_id for subnet in network.subnets.values()],
            security_group_ids=[self._group(network).security_group_id],
            launch_template=_Environment.LaunchTemplateSpecificationProperty(
                launch_template_id=template.ref, version=template.attr_latest_version_number
            ),
            ec2_configuration=[_Environment.Ec2ConfigurationObjectProperty(image_type="ECS_AL2023")],
            update_to_latest_image_version=True,
        )
        return _Environment(
            self,
            "Environment",
            type="MANAGED",
            state="ENABLED",
            replace_compute_environment=False,
            update_policy=UPDATE_POLICY,
            compute_resources=resources,
        )

    def _launch_template(self) -> aws_ec2.CfnLaunchTemplate:
        """Launch template. Its hop limit hides the instance's credentials from jobs, which use the ECS agent's."""
        name = f"{self._project}-build-farm"
        disk = _Template.EbsProperty(
            volume_type="gp3", volume_size=_DISK_GIB, encrypted=True, delete_on_termination=True
        )
        data = _Template.LaunchTemplateDataProperty(
            metadata_options=_Template.MetadataOptionsProperty(
                http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=1
            ),
            block_device_mappings=[_Template.BlockDeviceMappingProperty(device_name="/dev/xvda", ebs=disk)],
            monitoring=_Template.MonitoringProperty(enabled=True),
            tag_specifications=tag_specifications(name, {PROJECT_TAG: self._project}),
        )
        return _Template(self, "Template", launch_template_name=name, launch_template_data=data)

    def _group(self, network: NetworkHandle) -> aws_ec2.SecurityGroup:
        """Security group without ingress. Egress is HTTPS to any address: S3 has public ones behind its gateway."""
        group = aws_ec2.SecurityGroup(
            self,
            "Group",
            vpc=network.vpc,
            description=f"Builders of {self._project}",
            allow_all_outbound=False,
        )
        group.add_egress_rule(aws_ec2.Peer.any_ipv4(), aws_ec2.Port.tcp(443), "services of AWS")
        return group

    def _queue(self, environment: aws_batch.CfnComputeEnvironment) -> aws_batch.CfnJobQueue:
        order = aws_batch.CfnJobQueue.ComputeEnvironmentOrderProperty(compute_environment=environment.ref, order=1)
        return aws_batch.CfnJobQueue(
            self,
            "Queue",
            job_queue_name=f"{self._project}-builds",
            priority=1,
            state="ENABLED",
            compute_environment_order=[order],
        )

    def _job(self, farm: Farm, store: StoreHandle, prefix: str) -> aws_batch.CfnJobDefinition:
        """Job definition that builds all models of the image's nxpipe.toml; a submission may override the command."""
        role, publish = self._job_role(store, prefix)
        container = _Job.ContainerPropertiesProperty(
            image=farm.image,
            command=["nxpipe", "build"],
            job_role_arn=role.role_arn,
            environment=[
                _Job.EnvironmentProperty(name="NXPIPE_STORE_URL", value=f"s3://{store.bucket.bucket_name}/{prefix}"),
                _Job.EnvironmentProperty(name="AWS_REGION", value=self.region),
            ],
            resource_requirements=[
                _Job.ResourceRequirementProperty(type="VCPU", value=str(_VCPUS)),
                _Job.ResourceRequirementProperty(type="MEMORY", value=str(_MEMORY_MIB)),
            ],
            linux_parameters=_Job.LinuxParametersProperty(init_process_enabled=True),  # reaps compiler processes
            log_configuration=log_configuration(log_group(self, "Logs", f"/nxpipe/{self._project}/builds")),
            privileged=False,
        )
        job = _Job(
            self,
            "Job",
            job_definition_name=f"{self._project}-build",
            type="container",
            platform_capabilities=["EC2"],
            propagate_tags=True,
            container_properties=container,
            retry_strategy=retry_strategy(_ATTEMPTS),
            timeout=_Job.TimeoutProperty(attempt_duration_seconds=_LONGEST_JOB),
        )
        job.node.add_dependency(publish)
        return job

    def _submitting(
        self, queue: aws_batch.CfnJobQueue, job: aws_batch.CfnJobDefinition, release: ReleaseHandle | None
    ) -> aws_iam.ManagedPolicy:
        """Policy to submit jobs. It is in this stack, so that the deployment of a new job revision also permits it."""
        return aws_iam.ManagedPolicy(
            self,
            "Submitting",
            description=f"Build on the farm of {self._project}",
            path="/nxpipe/",
            roles=[role_by_value(self, release.role)] if release else None,
            statements=submitting(self, self._project, [queue.ref], [job.ref]),
        )

    def _job_role(self, store: StoreHandle, prefix: str) -> tuple[aws_iam.Role, aws_iam.ManagedPolicy]:
        role = job_role(self)
        policy = aws_iam.ManagedPolicy(
            self,
            "Publishing",
            description=f"Publish artifacts of {self._project}",
            path="/nxpipe/",
            roles=[role],
            statements=publishing(store, prefix),
        )
        return role, policy
