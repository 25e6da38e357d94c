"""Queues of `nxpipe prove --on batch`: for each instance type an AWS Batch queue that runs one job at a time."""

from collections.abc import Sequence
from typing import Any, Final

from aws_cdk import ArnFormat, CfnOutput, Stack, aws_batch, aws_ec2, aws_iam
from constructs import Construct

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config.capacity import job_memory_mib
from nxpipe.pipeline.config.cloud import Prove
from nxpipe.stacks.build_farm import (
    UPDATE_POLICY,
    instance_profile,
    instance_role,
    job_role,
    limit_logs,
    log_configuration,
    retry_strategy,
)
from nxpipe.stacks.handles import NetworkHandle, ReleaseHandle, StoreHandle
from nxpipe.stacks.iam import proving, submitting, wait_for_permissions
from nxpipe.stacks.launch import Machine, launch_template
from nxpipe.stacks.names import SHORT_JOBS_TAG, proving_queue
from nxpipe.stacks.project import PROJECT_TAG, log_group, tag_project
from nxpipe.stacks.references import role_by_value

_DISK_GIB: Final = 500  # for the image, and an artifact's weights and programs
_ATTEMPTS: Final = 3  # of a job whose instance is lost

_Environment = aws_batch.CfnComputeEnvironment
_Job = aws_batch.CfnJobDefinition


class ProveStack(Stack):
    """A compute environment of one instance, a job queue and a job definition for each instance type."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        prove: Prove,
        image: str,
        network: NetworkHandle,
        store: StoreHandle,
        prefix: str,
        release: ReleaseHandle | None = None,
        **kwargs: Any,
    ) -> None:
        """`image` is an AMI with ECS and the Neuron driver. `prefix` is the store's key prefix, such as "models/"; the
        role of `release` may submit jobs.
        """
        super().__init__(scope, id_, description=f"Proofs on devices of {project}", **kwargs)
        self._project, self._prove, self._image = project, prove, image
        self._log = f"/nxpipe/{project}/proofs"
        self._logs = log_group(self, "Logs", self._log)
        self._instances = instance_role(self)
        limit_logs(self._instances, self._log)
        self._profile = instance_profile(self, self._instances)
        self._subnets = [subnet.subnet_id for subnet in network.subnets.values()]
        self._template = self._launch_template(network)
        role, policy = self._job_role(store, prefix)
        url = f"s3://{store.bucket.bucket_name}/{prefix}"
        queues, jobs = [], []
        for instance_type in prove.instance_types:
            part = Construct(self, instance_type.title().replace(".", ""))
            queues.append(self._queue(part, instance_type).ref)
            job = self._job(part, instance_type, role, url)
            job.node.add_dependency(policy)
            jobs.append(job.ref)
        permission = self._submitting(queues, jobs, release)
        tag_project(self, project)
        CfnOutput(
            self, "SubmittingPolicyArn", value=permission.managed_policy_arn, description="Policy to submit proofs"
        )

    def _launch_template(self, network: NetworkHandle) -> aws_ec2.CfnLaunchTemplate:
        """Launch template of all types. Its security group has no ingress; egress is HTTPS, to services of AWS."""
        group = aws_ec2.SecurityGroup(
            self, "Group", vpc=network.vpc, description=f"Provers of {self._project}", allow_all_outbound=False
        )
        group.add_egress_rule(aws_ec2.Peer.any_ipv4(), aws_ec2.Port.tcp(443), "services of AWS")
        machine = Machine(
            name=f"{self._project}-prove",
            image=self._image,
            profile=self._profile,
            groups=[group],
            user_data="",
            root_device="/dev/xvda",  # of Amazon Linux, which ECS images use
            root_gib=_DISK_GIB,
            tags={PROJECT_TAG: self._project},
        )
        return launch_template(self, "Template", machine, instance_type=None)

    def _queue(self, part: Construct, instance_type: str) -> aws_batch.CfnJobQueue:
        """Job queue with an environment of at most one instance, which ends when no job needs it."""
        spot = self._prove.capacity == "spot"
        resources = _Environment.ComputeResourcesProperty(
            type="SPOT" if spot else "EC2",
            allocation_strategy="SPOT_CAPACITY_OPTIMIZED" if spot else "BEST_FIT_PROGRESSIVE",
            minv_cpus=0,
            maxv_cpus=INSTANCES[instance_type].vcpus,
            instance_types=[instance_type],
            instance_role=self._profile.attr_arn,
            subnets=self._subnets,
            launch_template=_Environment.LaunchTemplateSpecificationProperty(
                launch_template_id=self._template.ref, version=self._template.attr_latest_version_number
            ),
            ec2_configuration=[
                _Environment.Ec2ConfigurationObjectProperty(image_type="ECS_AL2023", image_id_override=self._image)
            ],
        )
        environment = _Environment(
            part,
            "Environment",
            type="MANAGED",
            state="ENABLED",
            replace_compute_environment=False,
            update_policy=UPDATE_POLICY,
            compute_resources=resources,
            tags={SHORT_JOBS_TAG: "true"},
        )
        wait_for_permissions(environment, self._instances)
        order = aws_batch.CfnJobQueue.ComputeEnvironmentOrderProperty(compute_environment=environment.ref, order=1)
        return aws_batch.CfnJobQueue(
            part,
            "Queue",
            job_queue_name=proving_queue(self._project, instance_type),
            priority=1,
            state="ENABLED",
            compute_environment_order=[order],
        )

    def _job(self, part: Construct, instance_type: str, role: aws_iam.Role, store: str) -> aws_batch.CfnJobDefinition:
        """Job definition with all devices, vCPUs and memory of an instance; a submission names the artifact."""
        row = INSTANCES[instance_type]
        devices = [f"/dev/neuron{chip}" for chip in range(row.chips)]
        variables = {"AWS_REGION": self.region, "NXPIPE_STORE_URL": store}
        container = _Job.ContainerPropertiesProperty(
            image=self._prove.image,
            command=["nxpipe", "prove", "--help"],
            job_role_arn=role.role_arn,
            environment=[_Job.EnvironmentProperty(name=name, value=value) for name, value in variables.items()],
            resource_requirements=[
                _Job.ResourceRequirementProperty(type="VCPU", value=str(row.vcpus)),
                _Job.ResourceRequirementProperty(type="MEMORY", value=str(job_memory_mib(instance_type))),
            ],
            linux_parameters=_Job.LinuxParametersProperty(
                devices=[_Job.DeviceProperty(host_path=path, container_path=path) for path in devices],
                init_process_enabled=True,  # reaps the processes of ranks
                shared_memory_size=row.host_memory_gib * 1024 // 2,  # Docker's default is 64 MiB
            ),
            ulimits=[_Job.UlimitProperty(name="memlock", soft_limit=-1, hard_limit=-1)],  # for transfers to devices
            log_configuration=log_configuration(self._logs),
            privileged=False,
        )
        return _Job(
            part,
            "Job",
            job_definition_name=proving_queue(self._project, instance_type),
            type="container",
            platform_capabilities=["EC2"],
            propagate_tags=True,
            container_properties=container,
            retry_strategy=retry_strategy(_ATTEMPTS),
            timeout=_Job.TimeoutProperty(attempt_duration_seconds=int(self._prove.time_limit.total_seconds())),
        )

    def _job_role(self, store: StoreHandle, prefix: str) -> tuple[aws_iam.Role, aws_iam.ManagedPolicy]:
        role = job_role(self)
        policy = aws_iam.ManagedPolicy(
            self,
            "Proving",
            description=f"Add evidence of devices to artifacts of {self._project}",
            path="/nxpipe/",
            roles=[role],
            statements=proving(store, prefix),
        )
        return role, policy

    def _submitting(
        self, queues: Sequence[str], jobs: Sequence[str], release: ReleaseHandle | None
    ) -> aws_iam.ManagedPolicy:
        """Policy to submit proofs and to read their logs; with the job definitions, so it names their revisions."""
        streams = self.format_arn(
            service="logs",
            resource="log-group",
            resource_name=f"{self._log}:*",
            arn_format=ArnFormat.COLON_RESOURCE_NAME,
        )
        return aws_iam.ManagedPolicy(
            self,
            "Submitting",
            description=f"Prove artifacts of {self._project} on devices",
            path="/nxpipe/",
            roles=[role_by_value(self, release.role)] if release else None,
            statements=[
                *submitting(self, self._project, queues, jobs, arrays=False),
                aws_iam.PolicyStatement(sid="ReadLogs", actions=["logs:GetLogEvents"], resources=[streams]),
            ],
        )
