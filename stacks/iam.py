"""IAM: policy statements of fleets, publishers, promoters, submitters and pods; roles of GitHub Actions jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from aws_cdk import CfnOutput, CfnResource, Duration, Stack, aws_iam
from constructs import Construct, IConstruct

from nxpipe.pipeline.config import Signing
from nxpipe.pipeline.config.cloud import Release
from nxpipe.stacks.handles import CacheHandle, ReleaseHandle, StoreHandle
from nxpipe.stacks.names import PROJECT_TAG, cluster_name
from nxpipe.stacks.project import tag_project


def own_account_service(scope: IConstruct, service: str) -> aws_iam.ServicePrincipal:
    """A service, by a name such as "events", when it acts for something of this account."""
    ours = {"StringEquals": {"aws:SourceAccount": Stack.of(scope).account}}
    return aws_iam.ServicePrincipal(f"{service}.amazonaws.com", conditions=ours)


def pod_role(scope: Construct, id_: str, project: str, what: str) -> aws_iam.Role:
    """Taken by pods of this project's cluster only."""
    stack = Stack.of(scope)
    arn = f"arn:{stack.partition}:eks:{stack.region}:{stack.account}:cluster/{cluster_name(project)}"
    ours = {"StringEquals": {"aws:SourceAccount": stack.account}, "ArnEquals": {"aws:SourceArn": arn}}
    pods = aws_iam.ServicePrincipal("pods.eks.amazonaws.com", conditions=ours)
    return aws_iam.Role(scope, id_, path="/nxpipe/", description=what, assumed_by=aws_iam.SessionTagsPrincipal(pods))


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


CREATED_ONCE: Final = ("ac/", "cas/", "evidence/", "parts/", "sig/")
REFRESHED: Final = "cas/"  # what is copied onto itself, so that no collection takes it (section 7)
EVIDENCE: Final = "evidence/"  # the same of what is said again about an artifact that was given up (section 19)
MULTIPART: Final = "cas/"  # what may be larger than one request
SIGNING_ALGORITHM: Final = "ECDSA_SHA_256"  # the one algorithm of docs/reference/store-format.md that KMS has
REPLACED: Final = ("failures/", "index/", "leases/", "neuron-artifacts/", "reports/", "runs/")


def publishing(store: StoreHandle, prefix: str) -> list[aws_iam.PolicyStatement]:
    """Statements for a store at `prefix` of the bucket: "" or "models/", say."""
    bucket = store.bucket
    s3 = f"s3.{Stack.of(bucket).region}.amazonaws.com"
    return [
        aws_iam.PolicyStatement(
            sid="AddRecords",
            actions=["s3:PutObject"],
            resources=[bucket.arn_for_objects(f"{prefix}{folder}*") for folder in CREATED_ONCE],
            conditions={"Null": {"s3:if-none-match": "false"}},
        ),
        # Parts are sent without a condition; what puts them together has one.
        aws_iam.PolicyStatement(
            sid="SendParts",
            actions=["s3:PutObject"],
            resources=[bucket.arn_for_objects(f"{prefix}{MULTIPART}*")],
            conditions={"Bool": {"s3:ObjectCreationOperation": "false"}},
        ),
        refreshing_by_copy(store, prefix),
        refreshing_by_copy(store, prefix, EVIDENCE, sid="KeepEvidenceYoung"),
        aws_iam.PolicyStatement(
            sid="AddObjects",
            actions=["s3:PutObject"],
            resources=[bucket.arn_for_objects(f"{prefix}{folder}*") for folder in REPLACED],
        ),
        aws_iam.PolicyStatement(
            sid="BreakOff",
            actions=["s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"],
            resources=[bucket.arn_for_objects(f"{prefix}{folder}*") for folder in (MULTIPART, *REPLACED)],
        ),
        aws_iam.PolicyStatement(sid="Read", actions=["s3:GetObject"], resources=[bucket.arn_for_objects(f"{prefix}*")]),
        # Without the permission to list, S3 answers "denied" for an object that is absent; so no condition on prefixes.
        aws_iam.PolicyStatement(
            sid="TellWhatIsAbsent",
            actions=["s3:ListBucket", "s3:ListBucketMultipartUploads"],
            resources=[bucket.bucket_arn],
        ),
        # To decrypt is needed for writing too: S3 does so when it puts the parts of an upload together.
        aws_iam.PolicyStatement(
            sid="Encrypt",
            actions=["kms:Decrypt", "kms:GenerateDataKey"],
            resources=[store.key.key_arn],
            conditions={"StringEquals": {"kms:ViaService": s3}},
        ),
    ]


def refreshing_by_copy(
    store: StoreHandle, prefix: str, folder: str = REFRESHED, *, sid: str = "KeepYoung"
) -> aws_iam.PolicyStatement:
    """Whoever names a blob again copies it onto itself. IAM cannot say "itself", but that the bytes come from the
    same folder of this store and from nowhere else.
    """
    bucket = store.bucket
    return aws_iam.PolicyStatement(
        sid=sid,
        actions=["s3:PutObject"],
        resources=[bucket.arn_for_objects(f"{prefix}{folder}*")],
        conditions={"StringLike": {"s3:x-amz-copy-source": f"{bucket.bucket_name}/{prefix}{folder}*"}},
    )


def signing_with(key: str) -> list[aws_iam.PolicyStatement]:
    """With one key, by its ARN."""
    return [
        aws_iam.PolicyStatement(
            sid="Sign",
            actions=["kms:Sign"],
            resources=[key],
            conditions={"StringEquals": {"kms:SigningAlgorithm": SIGNING_ALGORITHM}},
        )
    ]


def reading_public_keys(keys: Sequence[str]) -> list[aws_iam.PolicyStatement]:
    """To look up the public halves of keys, without which nobody knows whose signature it is."""
    actions = ["kms:GetPublicKey"]
    return [aws_iam.PolicyStatement(sid="TellWhoSigned", actions=actions, resources=list(keys))] if keys else []


def kms_key(said: str | None) -> str | None:
    """The ARN of a key that signs, if it is one of KMS."""
    kind, _, arn = (said or "").partition(":")
    return arn if kind == "kms" else None


_PINS: Final = "pins/held-"


def reading(store: StoreHandle, prefix: str) -> list[aws_iam.PolicyStatement]:
    """Statements for a store at `prefix` of the bucket: "" or "models/", say."""
    bucket = store.bucket
    return [
        aws_iam.PolicyStatement(sid="Read", actions=["s3:GetObject"], resources=[bucket.arn_for_objects(f"{prefix}*")]),
        # Without the permission to list, S3 answers "denied" for an object that is absent; so no condition on prefixes.
        aws_iam.PolicyStatement(sid="TellWhatIsAbsent", actions=["s3:ListBucket"], resources=[bucket.bucket_arn]),
        _key(store, "Decrypt", "kms:Decrypt"),
    ]


def promoting(store: StoreHandle, prefix: str, channel: str) -> list[aws_iam.PolicyStatement]:
    """A generation is created, so that of two at the same time one is told that it came second; none is replaced."""
    objects, log = store.bucket.arn_for_objects, f"{prefix}channels/{channel}/"
    pins = objects(f"{prefix}{_PINS}*")
    return [
        aws_iam.PolicyStatement(
            sid="AddGenerations",
            actions=["s3:PutObject"],
            resources=[objects(f"{log}log/*"), pins],
            conditions={"Null": {"s3:if-none-match": "false"}},
        ),
        aws_iam.PolicyStatement(sid="MoveHead", actions=["s3:PutObject"], resources=[objects(f"{log}head")]),
        refreshing_by_copy(store, prefix),  # of what was published long ago
        aws_iam.PolicyStatement(sid="LetGo", actions=["s3:DeleteObject"], resources=[pins]),
        _key(store, "Encrypt", "kms:GenerateDataKey"),
    ]


def _key(store: StoreHandle, sid: str, action: str) -> aws_iam.PolicyStatement:
    s3 = f"s3.{Stack.of(store.bucket).region}.amazonaws.com"
    conditions = {"StringEquals": {"kms:ViaService": s3}}
    return aws_iam.PolicyStatement(sid=sid, actions=[action], resources=[store.key.key_arn], conditions=conditions)


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


_ISSUER: Final = "token.actions.githubusercontent.com"
_AUDIENCE: Final = "sts.amazonaws.com"
LONGEST_RELEASE: Final = Duration.hours(6)  # GitHub ends a job then


@dataclass(frozen=True)
class _Jobs:
    """`word` begins the names of their role, `subject` is what their tokens say beside the repository."""

    word: str
    subject: str
    does: str
    variable: str  # where GitHub keeps the role's name
    longest: Duration = LONGEST_RELEASE


def _in(environment: str, word: str, does: str) -> _Jobs:
    subject = f"environment:{environment}"
    return _Jobs(word, subject, does, f"NXPIPE_ROLE_ARN of the environment {environment}")


class ReleaseStack(Stack):
    """Roles that GitHub's word opens, and what each may do."""

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
        **kwargs: Any,
    ) -> None:
        """`signing` names the keys: one for what is built, and one for each channel, which its jobs alone may use."""
        super().__init__(scope, id_, description=f"Releases of {project} from GitHub", **kwargs)
        self._provider, self._repository = self._provider_of(release), release.repository

        def signs(channel: str | None = None) -> list[aws_iam.PolicyStatement]:
            """With the key of this duty alone. Who promotes sees by the key of builds that they have signed."""
            if signing is None:
                return []
            builds, own = kms_key(signing.key), kms_key(signing.key_of(channel) if channel else signing.key)
            known = [key for key in dict.fromkeys((own, builds)) if key]
            return [*(signing_with(own) if own else []), *reading_public_keys(known)]

        publish = _in(release.environment, "", f"Publish artifacts of {project}")
        self.handle = ReleaseHandle(role=self._role(publish, [*publishing(store, prefix), *signs()]))
        variable = "NXPIPE_READ_ROLE_ARN of the repository"
        plan = _Jobs("Read", "pull_request", f"Read artifacts of {project}", variable, Duration.hours(1))
        self._role(plan, reading(store, prefix))
        for channel in release.channels:
            word = f"Promote{channel.title().replace('-', '')}"
            promote = _in(channel, word, f"Promote artifacts of {project} to {channel}")
            self._role(promote, [*reading(store, prefix), *promoting(store, prefix, channel), *signs(channel)])
        tag_project(self, project)

    def _role(self, jobs: _Jobs, statements: list[aws_iam.PolicyStatement]) -> aws_iam.Role:
        said = {f"{_ISSUER}:aud": _AUDIENCE, f"{_ISSUER}:sub": f"repo:{self._repository}:{jobs.subject}"}
        role = aws_iam.Role(
            self,
            f"{jobs.word}Role",
            description=f"{jobs.does}, from {self._repository}",
            path="/nxpipe/",
            max_session_duration=jobs.longest,
            assumed_by=aws_iam.WebIdentityPrincipal(self._provider, {"StringEquals": said}),
        )
        aws_iam.ManagedPolicy(
            self,
            f"{jobs.word}Policy",
            description=jobs.does,
            path="/nxpipe/",
            roles=[role],
            statements=statements,
        )
        CfnOutput(self, f"{jobs.word}RoleArn", value=role.role_arn, description=f"The variable {jobs.variable}")
        return role

    def _provider_of(self, release: Release) -> str:
        """GitHub's provider: an account has room for one, so one that is there already is used.

        It has no thumbprints: AWS trusts GitHub's certificate by its own authorities.
        """
        if release.provider is not None:
            return release.provider
        made = aws_iam.CfnOIDCProvider(self, "GitHub", url=f"https://{_ISSUER}", client_id_list=[_AUDIENCE])
        arn: str = made.attr_arn
        return arn
