"""AWS Batch parts that the build farm and training fleets share: roles, retry strategy, job timeouts."""

from typing import Final

from aws_cdk import aws_batch, aws_iam
from constructs import Construct

from nxpipe.stacks.iam import for_us
from nxpipe.stacks.project import kept_log

_Job = aws_batch.CfnJobDefinition

# A change of the machines lets jobs that run go on; as long as Batch allows, after which it ends them.
WITH_GRACE: Final = aws_batch.CfnComputeEnvironment.UpdatePolicyProperty(
    job_execution_timeout_minutes=5 * 24 * 60, terminate_jobs_on_update=False
)


def instance_profile(scope: Construct) -> aws_iam.CfnInstanceProfile:
    """As Batch asks for it: the cluster that instances join is made by Batch, under a name that nobody knows before."""
    role = aws_iam.Role(
        scope,
        "InstanceRole",
        path="/nxpipe/",
        assumed_by=aws_iam.ServicePrincipal("ec2.amazonaws.com"),
        managed_policies=[
            aws_iam.ManagedPolicy.from_aws_managed_policy_name("service-role/AmazonEC2ContainerServiceforEC2Role")
        ],
    )
    return aws_iam.CfnInstanceProfile(scope, "Profile", path="/nxpipe/", roles=[role.role_name])


def job_role(scope: Construct) -> aws_iam.Role:
    """Taken by containers of this account's tasks."""
    return aws_iam.Role(scope, "JobRole", path="/nxpipe/", assumed_by=for_us(scope, "ecs-tasks"))


def logs(scope: Construct, name: str) -> aws_batch.CfnJobDefinition.LogConfigurationProperty:
    options = {"awslogs-group": kept_log(scope, "Logs", name).log_group_name, "awslogs-stream-prefix": "job"}
    return _Job.LogConfigurationProperty(log_driver="awslogs", options=options)


def repeated(attempts: int) -> aws_batch.CfnJobDefinition.RetryStrategyProperty:
    """An instance that went away is no fault of the job; what a program says once, it says again."""
    again = _Job.EvaluateOnExitProperty(action="RETRY", on_status_reason="Host EC2*")
    enough = _Job.EvaluateOnExitProperty(action="EXIT", on_reason="*")
    return _Job.RetryStrategyProperty(attempts=attempts, evaluate_on_exit=[again, enough])
