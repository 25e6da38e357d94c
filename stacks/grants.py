"""What fleets may do with artifacts and with the cache: said where a role meets a handle, action by action.

The key is granted for what S3 does on a role's behalf only: no fleet calls KMS itself.
"""

from aws_cdk import CfnResource, Stack, aws_iam

from nxpipe.stacks.handles import CacheHandle, StoreHandle


def read_artifacts(store: StoreHandle, role: aws_iam.IRole, prefix: str = "") -> None:
    """Resolve names, fetch and verify, in a store at `prefix` of the bucket: "" or "models/", say."""
    statements = (
        aws_iam.PolicyStatement(actions=["s3:GetObject"], resources=[store.bucket.arn_for_objects(f"{prefix}*")]),
        # Without the permission to list, S3 answers "denied" for an object that is absent.
        aws_iam.PolicyStatement(actions=["s3:ListBucket"], resources=[store.bucket.bucket_arn]),
        aws_iam.PolicyStatement(
            actions=["kms:Decrypt"],
            resources=[store.key.key_arn],
            conditions={"StringEquals": {"kms:ViaService": f"s3.{Stack.of(role).region}.amazonaws.com"}},
        ),
    )
    for statement in statements:
        role.add_to_principal_policy(statement)


def mount_cache(cache: CacheHandle, version: str, role: aws_iam.IRole) -> None:
    """Read and write what one version of the compiler made, and see nothing of the others."""
    point = cache.access_points[version].access_point_arn
    role.add_to_principal_policy(
        aws_iam.PolicyStatement(
            actions=["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"],
            resources=[cache.file_system.file_system_arn],
            conditions={
                "StringEquals": {"elasticfilesystem:AccessPointArn": point},
                "Bool": {"elasticfilesystem:AccessedViaMountTarget": "true"},
            },
        )
    )


def wait_for_permissions(made: CfnResource, role: aws_iam.IRole) -> None:
    """What takes the role on begins with all that it may do, and ends before that is taken away."""
    if policy := role.node.try_find_child("DefaultPolicy"):
        made.node.add_dependency(policy)
