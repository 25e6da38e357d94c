"""IAM: policy statements of fleets, publishers, promoters, submitters and pods; roles of GitHub Actions jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from aws_cdk import Annotations, CfnOutput, Duration, Stack, aws_iam
from constructs import Construct, IConstruct

from nxpipe.pipeline.config import ServingFleet, Signing
from nxpipe.pipeline.config.cloud import Release
from nxpipe.stacks.handles import CacheHandle, ReleaseHandle, StoreHandle
from nxpipe.stacks.names import PROJECT_TAG, cluster_name, environment_channel
from nxpipe.stacks.project import tag_project
from nxpipe.stacks.references import by_value
from nxpipe.stacks.rollout.fleet_record import COLOURS


def own_account_service(scope: IConstruct, service: str) -> aws_iam.ServicePrincipal:
    """Principal of a service, such as "events", limited to requests on behalf of this account."""
    condition = {"StringEquals": {"aws:SourceAccount": Stack.of(scope).account}}
    return aws_iam.ServicePrincipal(f"{service}.amazonaws.com", conditions=condition)


def pod_role(scope: Construct, id_: str, project: str, description: str) -> aws_iam.Role:
    """Role that only pods of this project's cluster can assume."""
    stack = Stack.of(scope)
    arn = f"arn:{stack.partition}:eks:{stack.region}:{stack.account}:cluster/{cluster_name(project)}"
    conditions = {"StringEquals": {"aws:SourceAccount": stack.account}, "ArnEquals": {"aws:SourceArn": arn}}
    pods = aws_iam.SessionTagsPrincipal(aws_iam.ServicePrincipal("pods.eks.amazonaws.com", conditions=conditions))
    return aws_iam.Role(scope, id_, path="/nxpipe/", description=description, assumed_by=pods)


def read_artifacts(store: StoreHandle, role: aws_iam.IRole, prefix: str = "") -> None:
    """Permit a role to resolve, fetch and verify artifacts. `prefix` is the store's key prefix, such as "models/"."""
    statements = (
        aws_iam.PolicyStatement(actions=["s3:GetObject"], resources=[store.bucket.arn_for_objects(f"{prefix}*")]),
        # Without s3:ListBucket, S3 answers 403 instead of 404 for an absent object.
        aws_iam.PolicyStatement(actions=["s3:ListBucket"], resources=[store.bucket.bucket_arn]),
        aws_iam.PolicyStatement(
            actions=["kms:Decrypt"],
            resources=[store.key.key_arn],
            conditions={"StringEquals": {"kms:ViaService": f"s3.{Stack.of(role).region}.amazonaws.com"}},
        ),
    )
    for statement in statements:
        role.add_to_principal_policy(statement)


def read_object(store: StoreHandle, role: aws_iam.IRole, key: str) -> None:
    """Permit a role to read one object of the store's bucket."""
    role.add_to_principal_policy(
        aws_iam.PolicyStatement(actions=["s3:GetObject"], resources=[store.bucket.arn_for_objects(key)])
    )
    role.add_to_principal_policy(
        aws_iam.PolicyStatement(
            actions=["kms:Decrypt"],
            resources=[store.key.key_arn],
            conditions={"StringEquals": {"kms:ViaService": f"s3.{Stack.of(role).region}.amazonaws.com"}},
        )
    )


def mount_cache(cache: CacheHandle, version: str, role: aws_iam.IRole) -> None:
    """Permit a role to mount the compile cache of one SDK version, and no other."""
    point = Stack.of(role).format_arn(
        service="elasticfilesystem",
        resource="access-point",
        resource_name=by_value(role, cache.access_points[version].access_point_id),
    )
    role.add_to_principal_policy(
        aws_iam.PolicyStatement(
            actions=["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"],
            resources=[by_value(role, cache.file_system.file_system_arn)],
            conditions={
                "StringEquals": {"elasticfilesystem:AccessPointArn": point},
                "Bool": {"elasticfilesystem:AccessedViaMountTarget": "true"},
            },
        )
    )


def use_compile_cache(url: str, role: aws_iam.IRole) -> None:
    """Permit a role to read and write a compile cache in S3, such as "s3://my-caches/neuron"."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    arn = f"arn:{Stack.of(role).partition}:s3:::{bucket}"
    below = f"{prefix.rstrip('/')}/*".lstrip("/")
    role.add_to_principal_policy(
        aws_iam.PolicyStatement(actions=["s3:GetObject", "s3:PutObject"], resources=[f"{arn}/{below}"])
    )
    role.add_to_principal_policy(
        aws_iam.PolicyStatement(
            actions=["s3:ListBucket"], resources=[arn], conditions={"StringLike": {"s3:prefix": [below]}}
        )
    )


def allow_sessions(role: aws_iam.Role) -> None:
    """Permit SSM Agent to register the instance and to open sessions: AWS's minimum for Session Manager, without Run
    Command, Parameter Store and inventory, which AmazonSSMManagedInstanceCore permits. The channels have no ARN.
    """
    role.add_to_principal_policy(
        aws_iam.PolicyStatement(
            actions=[
                "ssm:UpdateInstanceInformation",
                "ssmmessages:CreateControlChannel",
                "ssmmessages:CreateDataChannel",
                "ssmmessages:OpenControlChannel",
                "ssmmessages:OpenDataChannel",
            ],
            resources=["*"],
        )
    )


def wait_for_permissions(resource: IConstruct, role: aws_iam.IRole) -> None:
    """Create a resource after its role's policy, and delete it before that policy.

    A resource that names a role waits for the role only: a service that takes the role at creation, or an instance that
    starts at once, would lack the permissions.
    """
    if policy := role.node.try_find_child("DefaultPolicy"):
        resource.node.add_dependency(policy)


CREATED_ONCE: Final = ("ac/", "cas/", "evidence/", "parts/", "sig/")
REFRESHED: Final = "cas/"  # copied onto themselves, which renews their age for garbage collection (section 7)
EVIDENCE: Final = "evidence/"  # renewed in the same way when it is published again (section 19)
MULTIPART: Final = "cas/"  # may exceed the size of one request
SIGNING_ALGORITHM: Final = "ECDSA_SHA_256"  # the only algorithm of docs/reference/store-format.md that KMS supports
REPLACED: Final = ("failures/", "index/", "leases/", "neuron-artifacts/", "reports/", "runs/")


def publishing(store: StoreHandle, prefix: str) -> list[aws_iam.PolicyStatement]:
    """Statements to publish artifacts. `prefix` is the store's key prefix in the bucket, such as "models/"."""
    objects = store.bucket.arn_for_objects
    return [
        *_creating(store, prefix, CREATED_ONCE),
        refreshing_by_copy(store, prefix, EVIDENCE, sid="RefreshEvidence"),
        aws_iam.PolicyStatement(
            sid="PutReplaceableObjects",
            actions=["s3:PutObject"],
            resources=[objects(f"{prefix}{folder}*") for folder in REPLACED],
        ),
        *_transferring(store, prefix),
    ]


def proving(store: StoreHandle, prefix: str) -> list[aws_iam.PolicyStatement]:
    """Statements to read artifacts, and to add evidence for them with the outputs that it names."""
    return [*_creating(store, prefix, (MULTIPART, EVIDENCE)), *_transferring(store, prefix)]


def _creating(store: StoreHandle, prefix: str, folders: Sequence[str]) -> list[aws_iam.PolicyStatement]:
    """Statements to create objects in some folders of a store, and to renew the age of blobs."""
    bucket = store.bucket
    return [
        aws_iam.PolicyStatement(
            sid="AddRecords",
            actions=["s3:PutObject"],
            resources=[bucket.arn_for_objects(f"{prefix}{folder}*") for folder in folders],
            conditions={"Null": {"s3:if-none-match": "false"}},
        ),
        # Uploads of parts carry no If-None-Match header; CompleteMultipartUpload does.
        aws_iam.PolicyStatement(
            sid="UploadParts",
            actions=["s3:PutObject"],
            resources=[bucket.arn_for_objects(f"{prefix}{MULTIPART}*")],
            conditions={"Bool": {"s3:ObjectCreationOperation": "false"}},
        ),
        refreshing_by_copy(store, prefix),
    ]


def _transferring(store: StoreHandle, prefix: str) -> list[aws_iam.PolicyStatement]:
    """Statements to read a store, and to end or resume uploads in parts."""
    bucket = store.bucket
    s3 = f"s3.{Stack.of(bucket).region}.amazonaws.com"
    return [
        aws_iam.PolicyStatement(
            sid="AbortUploads",
            actions=["s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"],
            resources=[bucket.arn_for_objects(f"{prefix}{MULTIPART}*")],
        ),
        aws_iam.PolicyStatement(sid="Read", actions=["s3:GetObject"], resources=[bucket.arn_for_objects(f"{prefix}*")]),
        # Without s3:ListBucket, S3 answers 403 instead of 404 for an absent object, hence no condition on prefixes.
        aws_iam.PolicyStatement(
            sid="ListBucket",
            actions=["s3:ListBucket", "s3:ListBucketMultipartUploads"],
            resources=[bucket.bucket_arn],
        ),
        # Writes need kms:Decrypt too: S3 decrypts parts when it completes a multipart upload.
        aws_iam.PolicyStatement(
            sid="Encrypt",
            actions=["kms:Decrypt", "kms:GenerateDataKey"],
            resources=[store.key.key_arn],
            conditions={"StringEquals": {"kms:ViaService": s3}},
        ),
    ]


def refreshing_by_copy(
    store: StoreHandle, prefix: str, folder: str = REFRESHED, *, sid: str = "RefreshBlobs"
) -> aws_iam.PolicyStatement:
    """Statement to renew an object's age by a copy onto itself.

    IAM conditions cannot require source and destination to be equal; this one requires the same folder of this store.
    """
    bucket = store.bucket
    return aws_iam.PolicyStatement(
        sid=sid,
        actions=["s3:PutObject"],
        resources=[bucket.arn_for_objects(f"{prefix}{folder}*")],
        conditions={"StringLike": {"s3:x-amz-copy-source": f"{bucket.bucket_name}/{prefix}{folder}*"}},
    )


def signing_with(key: str) -> list[aws_iam.PolicyStatement]:
    """Statement to sign with one KMS key. `key` is its ARN."""
    return [
        aws_iam.PolicyStatement(
            sid="Sign",
            actions=["kms:Sign"],
            resources=[key],
            conditions={"StringEquals": {"kms:SigningAlgorithm": SIGNING_ALGORITHM}},
        )
    ]


def reading_public_keys(keys: Sequence[str]) -> list[aws_iam.PolicyStatement]:
    """Statement to read public keys, which identify the signer of a signature. `keys` are ARNs."""
    actions = ["kms:GetPublicKey"]
    return [aws_iam.PolicyStatement(sid="GetPublicKey", actions=actions, resources=list(keys))] if keys else []


def kms_key(reference: str | None) -> str | None:
    """The ARN of a signing key of nxpipe.toml, if it is in KMS: "kms:ARN"."""
    kind, _, arn = (reference or "").partition(":")
    return arn if kind == "kms" else None


_PINS: Final = "pins/held-"


def reading(store: StoreHandle, prefix: str) -> list[aws_iam.PolicyStatement]:
    """Statements to read a store. `prefix` is its key prefix in the bucket, such as "models/"."""
    bucket = store.bucket
    return [
        aws_iam.PolicyStatement(sid="Read", actions=["s3:GetObject"], resources=[bucket.arn_for_objects(f"{prefix}*")]),
        # Without s3:ListBucket, S3 answers 403 instead of 404 for an absent object, hence no condition on prefixes.
        aws_iam.PolicyStatement(sid="ListBucket", actions=["s3:ListBucket"], resources=[bucket.bucket_arn]),
        _key(store, "Decrypt", "kms:Decrypt"),
    ]


def promoting(store: StoreHandle, prefix: str, channels: Sequence[str]) -> list[aws_iam.PolicyStatement]:
    """Statements to append generations to channels.

    A generation is created if absent: of two concurrent promotions the second one fails, and none is replaced.
    """
    objects, logs = store.bucket.arn_for_objects, [f"{prefix}channels/{channel}/" for channel in channels]
    pins = objects(f"{prefix}{_PINS}*")
    return [
        aws_iam.PolicyStatement(
            sid="AddGenerations",
            actions=["s3:PutObject"],
            resources=[*(objects(f"{log}log/*") for log in logs), pins],
            conditions={"Null": {"s3:if-none-match": "false"}},
        ),
        aws_iam.PolicyStatement(
            sid="MoveHead", actions=["s3:PutObject"], resources=[objects(f"{log}head") for log in logs]
        ),
        refreshing_by_copy(store, prefix),  # for blobs that were published long ago
        aws_iam.PolicyStatement(sid="DeleteOwnPins", actions=["s3:DeleteObject"], resources=[pins]),
        _key(store, "Encrypt", "kms:GenerateDataKey"),
    ]


def released_channels(channel: str, fleets: Sequence[ServingFleet]) -> list[str]:
    """The channels that a release to one channel moves: the channel, and those of the environments of its fleets."""
    return [
        channel,
        *(
            environment_channel(fleet.name, colour)
            for fleet in fleets
            if fleet.channel == channel
            for colour in COLOURS
        ),
    ]


def _key(store: StoreHandle, sid: str, action: str) -> aws_iam.PolicyStatement:
    s3 = f"s3.{Stack.of(store.bucket).region}.amazonaws.com"
    conditions = {"StringEquals": {"kms:ViaService": s3}}
    return aws_iam.PolicyStatement(sid=sid, actions=[action], resources=[store.key.key_arn], conditions=conditions)


def submitting(
    stack: Stack, project: str, queues: Sequence[str], jobs: Sequence[str], *, arrays: bool = True
) -> list[aws_iam.PolicyStatement]:
    """Statements to submit, tag, watch and terminate jobs. `queues` and `jobs` are ARNs, the latter with revisions;
    with `arrays` the children of array jobs may be listed.

    A job has no ARN before its submission, so permission to terminate it depends on the project's tag. The tag is set
    at submission, which IAM authorizes by queue and job definition.
    """
    return [
        aws_iam.PolicyStatement(sid="Submit", actions=["batch:SubmitJob"], resources=[*queues, *jobs]),
        aws_iam.PolicyStatement(
            sid="TagJobs",
            actions=["batch:TagResource"],
            resources=[*queues, *jobs],
            conditions={"StringEquals": {f"aws:RequestTag/{PROJECT_TAG}": project}},
        ),
        aws_iam.PolicyStatement(
            sid="TerminateOwnJobs",
            actions=["batch:TerminateJob"],
            resources=[stack.format_arn(service="batch", resource="job", resource_name="*")],
            conditions={"StringEquals": {f"aws:ResourceTag/{PROJECT_TAG}": project}},
        ),
        # These actions support no resource-level permissions.
        aws_iam.PolicyStatement(
            sid="DescribeJobs",
            actions=[
                "batch:DescribeJobDefinitions",
                "batch:DescribeJobQueues",
                "batch:DescribeJobs",
                *(["batch:ListJobs"] if arrays else []),
            ],
            resources=["*"],
        ),
    ]


_ISSUER: Final = "token.actions.githubusercontent.com"
_AUDIENCE: Final = "sts.amazonaws.com"
LONGEST_RELEASE: Final = Duration.hours(6)  # GitHub's limit for a job


@dataclass(frozen=True)
class _Jobs:
    """GitHub Actions jobs that share a role."""

    id_prefix: str  # of the logical ids of role, policy and output
    subject: str  # the `sub` claim of their tokens, without the repository
    description: str
    variable: str  # the GitHub variable that holds the role's ARN
    longest: Duration = LONGEST_RELEASE


def _jobs_of_environment(environment: str, id_prefix: str, description: str) -> _Jobs:
    subject = f"environment:{environment}"
    return _Jobs(id_prefix, subject, description, f"NXPIPE_ROLE_ARN of the environment {environment}")


class ReleaseStack(Stack):
    """Roles that GitHub Actions jobs assume by OIDC, and their policies."""

    handle: ReleaseHandle

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        release: Release,
        store: StoreHandle,
        prefix: str,
        signing: Signing | None = None,
        fleets: Sequence[ServingFleet] = (),
        **kwargs: Any,
    ) -> None:
        """`signing` names one key for builds and one for each channel; only the jobs of a channel may use its key.

        The stack of a fleet's rollouts attaches the permission to start them to the role of the fleet's channel.
        """
        super().__init__(scope, id_, description=f"Releases of {project} from GitHub", **kwargs)
        self._provider, self._release = self._provider_of(release), release
        if release.owner_id is None:
            self._warn_of_subject()

        def signing_statements(channel: str | None = None) -> list[aws_iam.PolicyStatement]:
            """Statements to sign with one key, and to verify signatures of builds."""
            if signing is None:
                return []
            builds, own = kms_key(signing.key), kms_key(signing.key_of(channel) if channel else signing.key)
            public = [key for key in dict.fromkeys((own, builds)) if key]
            return [*(signing_with(own) if own else []), *reading_public_keys(public)]

        publish = _jobs_of_environment(release.environment, "", f"Publish artifacts of {project}")
        publisher = self._role(publish, [*publishing(store, prefix), *signing_statements()])
        variable = "NXPIPE_READ_ROLE_ARN of the repository"
        plan = _Jobs("Read", "pull_request", f"Read artifacts of {project}", variable, Duration.hours(1))
        self._role(plan, reading(store, prefix))
        promoters = {}
        for channel in release.channels:
            id_prefix = f"Promote{channel.title().replace('-', '')}"
            promote = _jobs_of_environment(channel, id_prefix, f"Promote artifacts of {project} to {channel}")
            moving = promoting(store, prefix, released_channels(channel, fleets))
            promoters[channel] = self._role(promote, [*reading(store, prefix), *moving, *signing_statements(channel)])
        self.handle = ReleaseHandle(role=publisher, promoters=promoters)
        tag_project(self, project)

    def _warn_of_subject(self) -> None:
        repository = self._release.repository
        Annotations.of(self).add_warning_v2(
            "nxpipe:release:subject",
            f"[release] has no owner_id and repository_id: AWS refuses the jobs of {repository} if it was created or "
            "renamed since 2026-07-15, because its tokens name the repository by id. Set both ids; to read them, run: "
            f"gh api repos/{repository} --jq '.owner.id, .id'",
        )

    def _role(self, jobs: _Jobs, statements: list[aws_iam.PolicyStatement]) -> aws_iam.Role:
        claims = {f"{_ISSUER}:aud": _AUDIENCE, f"{_ISSUER}:sub": f"{self._release.subject}:{jobs.subject}"}
        role = aws_iam.Role(
            self,
            f"{jobs.id_prefix}Role",
            description=f"{jobs.description}, from {self._release.repository}",
            path="/nxpipe/",
            max_session_duration=jobs.longest,
            assumed_by=aws_iam.WebIdentityPrincipal(self._provider, {"StringEquals": claims}),
        )
        aws_iam.ManagedPolicy(
            self,
            f"{jobs.id_prefix}Policy",
            description=jobs.description,
            path="/nxpipe/",
            roles=[role],
            statements=statements,
        )
        CfnOutput(
            self,
            f"{jobs.id_prefix}RoleArn",
            value=role.role_arn,
            description=f"Value of the GitHub variable {jobs.variable}",
        )
        return role

    def _provider_of(self, release: Release) -> str:
        """ARN of GitHub's OIDC provider; an account can have only one, so an existing one is reused.

        It has no thumbprints: AWS verifies GitHub's certificate with its own authorities.
        """
        if release.provider is not None:
            return release.provider
        provider = aws_iam.CfnOIDCProvider(self, "GitHub", url=f"https://{_ISSUER}", client_id_list=[_AUDIENCE])
        arn: str = provider.attr_arn
        return arn
