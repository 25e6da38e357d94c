"""Training fleet: a multi-node AWS Batch queue, FSx for Lustre scratch, and a checkpoint bucket for spot."""

from typing import Any, Final

from aws_cdk import (
    Annotations,
    CfnOutput,
    CfnParameter,
    Duration,
    RemovalPolicy,
    Stack,
    aws_batch,
    aws_ec2,
    aws_fsx,
    aws_iam,
    aws_logs,
    aws_s3,
)
from constructs import Construct

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config import TrainingFleet
from nxpipe.pipeline.config.capacity import CapacityBlock, TrainingSpot
from nxpipe.pipeline.config.device_measures import NAMESPACE
from nxpipe.pipeline.config.training_fleet import Scratch
from nxpipe.stacks.build_farm import (
    UPDATE_POLICY,
    instance_profile,
    instance_role,
    job_role,
    limit_logs,
    log_configuration,
    retry_strategy,
)
from nxpipe.stacks.capacity_block import schedule_queue
from nxpipe.stacks.handles import NetworkHandle, StoreHandle, TrainHandle
from nxpipe.stacks.iam import allow_sessions, read_artifacts, read_object, wait_for_permissions
from nxpipe.stacks.launch import Machine, launch_template
from nxpipe.stacks.names import fleet_log
from nxpipe.stacks.project import PROJECT_TAG, current_time, log_group, tag_project, warn_of_ended_block
from nxpipe.stacks.user_data.scripts import TrainingHost

FOLDER: Final = "/scratch"  # on hosts and in containers


def file_system(
    scope: Construct, name: str, scratch: Scratch, subnet: aws_ec2.ISubnet, group: aws_ec2.ISecurityGroup
) -> aws_fsx.CfnFileSystem:
    """FSx for Lustre file system in the security group of the nodes, which allows all traffic between its members."""
    system = aws_fsx.CfnFileSystem(
        scope,
        "Scratch",
        file_system_type="LUSTRE",
        file_system_type_version="2.15",
        storage_capacity=scratch.size,
        subnet_ids=[subnet.subnet_id],
        security_group_ids=[group.security_group_id],
        lustre_configuration=aws_fsx.CfnFileSystem.LustreConfigurationProperty(
            deployment_type="SCRATCH_2", data_compression_type="LZ4"
        ),
        tags=[{"key": "Name", "value": f"{name}-scratch"}],
    )
    system.apply_removal_policy(RemovalPolicy.DESTROY)
    return system


_NONCURRENT_EXPIRY: Final = Duration.days(7)


def checkpoint_bucket(scope: Construct, fleet: str, store: StoreHandle) -> aws_s3.Bucket:
    return aws_s3.Bucket(
        scope,
        "Checkpoints",
        encryption=aws_s3.BucketEncryption.KMS,
        encryption_key=store.key,
        bucket_key_enabled=True,
        server_access_logs_bucket=store.logs,
        server_access_logs_prefix=f"checkpoints/{fleet}/",
        versioned=True,
        enforce_ssl=True,
        minimum_tls_version=1.2,
        block_public_access=aws_s3.BlockPublicAccess.BLOCK_ALL,
        object_ownership=aws_s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
        removal_policy=RemovalPolicy.RETAIN,
        lifecycle_rules=[
            aws_s3.LifecycleRule(
                id="replaced-checkpoints",
                noncurrent_version_expiration=_NONCURRENT_EXPIRY,
                expired_object_delete_marker=True,
                abort_incomplete_multipart_upload_after=_NONCURRENT_EXPIRY,
            )
        ],
    )


def grant_checkpoints(bucket: aws_s3.IBucket, store: StoreHandle, role: aws_iam.IRole) -> None:
    """Permit a role to write, read and delete checkpoints; deleted versions are kept for a week."""
    through_s3 = {"StringEquals": {"kms:ViaService": f"s3.{Stack.of(role).region}.amazonaws.com"}}
    for statement in (
        aws_iam.PolicyStatement(
            actions=[
                "s3:AbortMultipartUpload",
                "s3:DeleteObject",
                "s3:GetObject",
                "s3:ListMultipartUploadParts",
                "s3:PutObject",
            ],
            resources=[bucket.arn_for_objects("*")],
        ),
        aws_iam.PolicyStatement(actions=["s3:ListBucket"], resources=[bucket.bucket_arn]),
        aws_iam.PolicyStatement(
            actions=["kms:Decrypt", "kms:GenerateDataKey"], resources=[store.key.key_arn], conditions=through_s3
        ),
    ):
        role.add_to_principal_policy(statement)


_LONGEST_JOB: Final = 14 * 24 * 3600  # seconds; close to the longest capacity block
_ATTEMPTS: Final = 10  # Batch's maximum
_LOCAL: Final = "/local"  # the instance store, on hosts and in containers
# The sentence of a host that gives up (user_data/host.sh). Jobs write into the same log group.
NOT_JOINED: Final = "nxpipe: this host cannot be set up and does not join the cluster"

_Environment = aws_batch.CfnComputeEnvironment
_Job = aws_batch.CfnJobDefinition


class TrainStack(Stack):
    """One training fleet: Batch queue, job definition, compute environment, and storage if configured."""

    handle: TrainHandle

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        fleet: TrainingFleet,
        image: str,
        network: NetworkHandle,
        store: StoreHandle,
        prefix: str,
        retention: int | None = None,
        **kwargs: Any,
    ) -> None:
        """`image` is an AMI with ECS and the Neuron driver. `prefix` is the store's key prefix in the bucket.
        `retention` is that of the log group, in days; None: that of other logs.
        """
        super().__init__(scope, id_, description=f"Training fleet {fleet.name} of {project}", **kwargs)
        self._project, self._fleet, self._network, self._store, self._prefix = project, fleet, network, store, prefix
        self._name, self._log = f"{project}-{fleet.name}", fleet_log(project, fleet.name)
        self._logs = log_group(self, "Logs", self._log, days=retention)
        self._row = INSTANCES[fleet.instance_types[0]]
        self._subnet = network.subnets[fleet.zone]
        self._scratch = (
            file_system(self, self._name, fleet.scratch, self._subnet, network.efa_group) if fleet.scratch else None
        )
        environment = self._environment(image, self._template(image))
        queue = self._queue(environment)
        job = self._job()
        if isinstance(fleet.capacity, CapacityBlock):
            schedule_queue(self, self._name, fleet.capacity, queue, environment)
        self.handle = TrainHandle(
            fleet=fleet.name,
            queue=aws_batch.JobQueue.from_job_queue_arn(self, "Training", queue.ref),
            failed_hosts=self._count_failed_hosts(),
        )
        tag_project(self, project)
        warn_of_ended_block(self, fleet.capacity)
        CfnOutput(self, "QueueArn", value=queue.ref, description="Job queue of the fleet")
        CfnOutput(self, "JobDefinitionArn", value=job.ref, description="Job definition; a submission gives the command")

    def _template(self, image: str) -> aws_ec2.CfnLaunchTemplate:
        self._role = instance_role(self)
        limit_logs(self._role, self._log)
        if self._fleet.ssm:
            allow_sessions(self._role)
        if self._fleet.uses_efa:
            read_object(self._store, self._role, f"{self._prefix}{self._fleet.efa.key}")
        self._profile = instance_profile(self, self._role)
        services = aws_ec2.SecurityGroup(
            self,
            "Nodes",
            vpc=self._network.vpc,
            description=f"Nodes of fleet {self._fleet.name}",
            allow_all_outbound=False,
        )
        services.add_egress_rule(aws_ec2.Peer.any_ipv4(), aws_ec2.Port.tcp(443), "services of AWS")
        machine = Machine(
            name=self._name,
            image=image,
            profile=self._profile,
            groups=[self._network.efa_group, services],
            user_data=self._user_data(),
            root_device="/dev/xvda",  # of Amazon Linux, which ECS images use
            root_gib=self._fleet.disk,
            root_iops=self._fleet.iops,
            root_throughput=self._fleet.throughput,
            tags={PROJECT_TAG: self._project},
        )
        return launch_template(
            self,
            "Template",
            machine,
            instance_type=self._row.name,
            capacity=self._fleet.capacity,
            efa=bool(self._row.efa_interfaces),
        )

    def _count_failed_hosts(self) -> str:
        """The metric of hosts that give up, from the fleet's log. They are outside of ECS, and Batch reports none.

        Its name has the fleet's: dimensions of a metric filter have no constant values.
        """
        name = f"{self._name}-failed-hosts"
        self._logs.add_metric_filter(
            "FailedHosts",
            filter_pattern=aws_logs.FilterPattern.literal(f'"{NOT_JOINED}"'),
            metric_namespace=NAMESPACE,
            metric_name=name,
            metric_value="1",
        )
        return name

    def _user_data(self) -> str:
        host = TrainingHost(region=self.region, log=self._log)
        if self._fleet.uses_efa:
            url = f"s3://{self._store.bucket.bucket_name}/{self._prefix}{self._fleet.efa.key}"
            host = host.with_efa(url, self._fleet.efa.sha256, cards=self._row.efa_interfaces or 0)
        if self._fleet.has_instance_store:
            host = host.with_instance_store(_LOCAL)
        if self._scratch:
            host = host.with_scratch(FOLDER, self._scratch.attr_dns_name, self._scratch.attr_lustre_mount_name)
        return host.user_data()

    def _environment(self, image: str, template: aws_ec2.CfnLaunchTemplate) -> aws_batch.CfnComputeEnvironment:
        spot = isinstance(self._fleet.capacity, TrainingSpot)
        placement = self._placement_group()
        resources = _Environment.ComputeResourcesProperty(
            type="SPOT" if spot else "EC2",
            allocation_strategy="SPOT_CAPACITY_OPTIMIZED" if spot else "BEST_FIT_PROGRESSIVE",
            minv_cpus=0,
            maxv_cpus=self._row.vcpus * self._fleet.nodes,
            instance_types=[self._row.name],
            instance_role=self._profile.attr_arn,
            subnets=[self._subnet.subnet_id],
            placement_group=placement.ref if placement else None,
            launch_template=_Environment.LaunchTemplateSpecificationProperty(
                launch_template_id=template.ref, version=template.attr_latest_version_number
            ),
            ec2_configuration=[
                _Environment.Ec2ConfigurationObjectProperty(image_type="ECS_AL2023", image_id_override=image)
            ],
        )
        environment = _Environment(
            self,
            "Environment",
            type="MANAGED",
            state="ENABLED",
            replace_compute_environment=False,
            update_policy=UPDATE_POLICY,
            compute_resources=resources,
        )
        wait_for_permissions(environment, self._role)
        return environment

    def _placement_group(self) -> aws_ec2.CfnPlacementGroup | None:
        """Cluster placement group; none for a capacity block, whose capacity is outside of placement groups."""
        capacity = self._fleet.capacity
        if isinstance(capacity, CapacityBlock) or capacity.placement == "none" or self._fleet.nodes == 1:
            return None
        return aws_ec2.CfnPlacementGroup(self, "Near", strategy="cluster")

    def _queue(self, environment: aws_batch.CfnComputeEnvironment) -> aws_batch.CfnJobQueue:
        block = self._fleet.capacity
        order = aws_batch.CfnJobQueue.ComputeEnvironmentOrderProperty(compute_environment=environment.ref, order=1)
        return aws_batch.CfnJobQueue(
            self,
            "Queue",
            job_queue_name=self._name,
            priority=1,
            state="DISABLED" if isinstance(block, CapacityBlock) and not block.is_open(current_time()) else "ENABLED",
            compute_environment_order=[order],
        )

    def _job(self) -> aws_batch.CfnJobDefinition:
        """Job definition without a command: jobs run the command of the image or of the submission."""
        role, store, prefix = job_role(self), self._store, self._prefix
        read_artifacts(store, role, prefix)
        environment = {"AWS_REGION": self.region, "NXPIPE_STORE_URL": f"s3://{store.bucket.bucket_name}/{prefix}"}
        if isinstance(self._fleet.capacity, TrainingSpot):
            bucket = checkpoint_bucket(self, self._fleet.name, store)
            grant_checkpoints(bucket, store, role)
            environment["NXPIPE_CHECKPOINTS"] = f"s3://{bucket.bucket_name}"
        if self._fleet.has_instance_store:
            environment["NXPIPE_LOCAL"] = _LOCAL
        if isinstance(self._fleet.capacity, CapacityBlock):
            environment["NXPIPE_ENDS_AT"] = f"{self._fleet.capacity.drained:%Y-%m-%dT%H:%M:%SZ}"
        container = self._container(role, environment)
        multinode = self._fleet.nodes > 1
        nodes = _Job.NodePropertiesProperty(
            num_nodes=self._fleet.nodes,
            main_node=0,
            node_range_properties=[
                _Job.NodeRangePropertyProperty(target_nodes=f"0:{self._fleet.nodes - 1}", container=container)
            ],
        )
        job = _Job(
            self,
            "Job",
            job_definition_name=self._name,
            type="multinode" if multinode else "container",
            platform_capabilities=["EC2"],
            propagate_tags=True,
            retry_strategy=retry_strategy(_ATTEMPTS),
            timeout=_Job.TimeoutProperty(attempt_duration_seconds=_LONGEST_JOB),
            node_properties=nodes if multinode else None,
            container_properties=None if multinode else container,
        )
        wait_for_permissions(job, role)
        return job

    def _container(
        self, role: aws_iam.IRole, environment: dict[str, str]
    ) -> aws_batch.CfnJobDefinition.ContainerPropertiesProperty:
        """Container with all devices, vCPUs and memory of its host."""
        cards = self._row.efa_interfaces or 0 if self._fleet.uses_efa else 0  # ECS refuses a device that is not there
        devices = [f"/dev/neuron{chip}" for chip in range(self._row.chips)]
        devices += [f"/dev/infiniband/uverbs{card}" for card in range(cards)]
        folders = {"local": _LOCAL} if self._fleet.has_instance_store else {}
        folders |= {"scratch": FOLDER} if self._scratch else {}
        return _Job.ContainerPropertiesProperty(
            image=self._fleet.image or self._unnamed_image(),
            job_role_arn=role.role_arn,
            instance_type=self._row.name if self._fleet.nodes > 1 else None,
            environment=[_Job.EnvironmentProperty(name=name, value=value) for name, value in environment.items()],
            resource_requirements=[
                _Job.ResourceRequirementProperty(type="VCPU", value=str(self._row.vcpus)),
                _Job.ResourceRequirementProperty(type="MEMORY", value=str(self._fleet.job_memory_mib)),
            ],
            linux_parameters=_Job.LinuxParametersProperty(
                devices=[_Job.DeviceProperty(host_path=path, container_path=path) for path in devices],
                init_process_enabled=True,
                shared_memory_size=self._fleet.shared_memory_mib,  # Docker's default is 64 MiB
            ),
            # EFA registers the buffers that it sends from, and registered memory is locked memory.
            ulimits=[_Job.UlimitProperty(name="memlock", soft_limit=-1, hard_limit=-1)],
            volumes=[
                _Job.VolumesProperty(name=name, host=_Job.VolumesHostProperty(source_path=path))
                for name, path in folders.items()
            ]
            or None,
            mount_points=[
                _Job.MountPointsProperty(source_volume=name, container_path=path) for name, path in folders.items()
            ]
            or None,
            log_configuration=log_configuration(self._logs),
            privileged=False,
        )

    def _unnamed_image(self) -> str:
        """The project's repository, by a digest that a deployment must give: its tags are immutable."""
        Annotations.of(self).add_warning_v2(
            "nxpipe:training-image-not-named",
            f"fleet {self._fleet.name} names no image, so this stack cannot be deployed yet; push the training "
            "container, and set `image` of the fleet to its digest",
        )
        digest = CfnParameter(
            self,
            "ImageDigest",
            type="String",
            allowed_pattern="sha256:[0-9a-f]{64}",
            description="Digest of the training container in the project's repository, if the fleet has no `image`",
            constraint_description="the digest of an image, sha256:...",
        )
        registry = f"{self.account}.dkr.ecr.{self.region}.{self.url_suffix}"
        return f"{registry}/{self._store.repository.repository_name}@{digest.value_as_string}"
