"""What a build on the farm may do with Batch: submit one job to one queue, watch, and end what is the project's."""

from aws_cdk import Stack, aws_iam

from nxpipe.stacks.names import PROJECT_TAG


def submitting(stack: Stack, project: str, queue: str, job: str) -> list[aws_iam.PolicyStatement]:
    """`queue` and `job` are ARNs, that of the job with its revision.

    A job has no ARN before it is submitted, so those that may be ended are known by the project's tag. It is given to
    them as they are submitted, which IAM allows or not by the queue and the definition.
    """
    return [
        aws_iam.PolicyStatement(sid="Submit", actions=["batch:SubmitJob"], resources=[queue, job]),
        aws_iam.PolicyStatement(
            sid="MarkAsOurs",
            actions=["batch:TagResource"],
            resources=[queue, job],
            conditions={"StringEquals": {f"aws:RequestTag/{PROJECT_TAG}": project}},
        ),
        aws_iam.PolicyStatement(
            sid="EndOurs",
            actions=["batch:TerminateJob"],
            resources=[stack.format_arn(service="batch", resource="job", resource_name="*")],
            conditions={"StringEquals": {f"aws:ResourceTag/{PROJECT_TAG}": project}},
        ),
        # For these IAM knows no resources.
        aws_iam.PolicyStatement(
            sid="Watch",
            actions=[
                "batch:DescribeJobDefinitions",
                "batch:DescribeJobQueues",
                "batch:DescribeJobs",
                "batch:ListJobs",
            ],
            resources=["*"],
        ),
    ]
