"""Who may act by resource policies and trust policies: encrypted requests, named services, tokens of GitHub's jobs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tests.iam.calls import Call
from tests.iam.evaluator import Principal, Request, Statement, applies, as_list, decides
from tests.iam.takers import SERVICES, takes
from tests.iam.templates import ACCOUNT, REGION, Templates

_ENCRYPTED: Final = {"s3": "s3:GetObject", "sns": "sns:Publish", "elasticfilesystem": "elasticfilesystem:ClientMount"}
_POINT: Final = {"elasticfilesystem:AccessPointArn": "a point"}


def open_transport(resources: Mapping[str, Sequence[Statement]]) -> Iterator[str]:
    """Buckets, topics and file systems refuse requests without encryption, of administrators as well."""
    administrator = Principal("AWS", f"arn:aws:iam::{ACCOUNT}:role/administrator")
    everything: list[Statement] = [{"Effect": "Allow", "Action": "*", "Resource": "*"}]
    for owner, statements in resources.items():
        service = owner.split(":")[2]
        keys = {"aws:SecureTransport": "false", **({"s3:TlsVersion": "1.1"} if service == "s3" else {})}
        for resource in (owner, f"{owner}/x") if service == "s3" else (owner,):
            for key, value in keys.items() if service in _ENCRYPTED else ():
                context = {"aws:SecureTransport": "true", **_POINT, key: value}
                if decides(Request(_ENCRYPTED[service], resource, context), administrator, everything, statements):
                    yield f"{resource} answers requests with {key} {value}"


# Services that act by themselves, by resource policies


_TLS: Final = {"aws:SecureTransport": "true"}


def _services(templates: Templates) -> Iterator[tuple[str, Call, Sequence[Statement]]]:
    """What services do without a role of this account: the service, its call, and the policy that permits it."""
    resources, logs = templates.policies_of_resources(), "arn:aws:s3:::demo-storage-logs"
    topic = templates.arn("demo-observe", templates.find("AWS::SNS::Topic", "demo-observe"))
    key = templates.arn("demo-observe", templates.find("AWS::KMS::Key", "demo-observe"))
    own = {"aws:SourceAccount": ACCOUNT, "aws:SecureTransport": "true"}
    for service in ("cloudwatch", "budgets"):
        yield service, Call.of("sns:Publish", topic, own), resources[topic]
        for operation in ("Decrypt", "GenerateDataKey"):
            yield service, Call.of(f"kms:{operation}", key, own), resources[key]
    for stack, _, properties in templates.resources("AWS::Events::Rule"):
        for target in templates.resolve(stack, properties["Targets"]):
            if "RoleArn" not in target:  # SNS: EventBridge sends no condition keys for a topic and its key
                yield "events", Call.of("sns:Publish", target["Arn"], _TLS), resources[target["Arn"]]
                yield "events", Call.of("kms:Decrypt", key), resources[key]
    to_s3 = {**own, "s3:TlsVersion": "1.3"}
    for bucket, prefix in (
        ("demo-storage-artifacts", "artifacts"),
        ("demo-train-spare-checkpoints", "checkpoints/spare"),
    ):
        written = {**to_s3, "aws:SourceArn": f"arn:aws:s3:::{bucket}"}
        yield "logging.s3", Call.of("s3:PutObject", f"{logs}/{prefix}/x", written), resources[logs]
    # Elastic Load Balancing writes below the id of the account that has the load balancer.
    delivered = f"{logs}/balancers/search/AWSLogs/{ACCOUNT}/elasticloadbalancing/x.log.gz"
    yield "logdelivery.elasticloadbalancing", Call.of("s3:PutObject", delivered, to_s3), resources[logs]


def _foreign(service: str, call: Call) -> Call:
    """The same call on behalf of another account."""
    if service == "logdelivery.elasticloadbalancing":
        return Call(call.action, call.resource.replace(ACCOUNT, _STRANGER), call.context)
    return call.having("aws:SourceAccount", _STRANGER)


def wrong_services(templates: Templates) -> Iterator[str]:
    """A service may act for this account and for no other; another service may not."""
    for service, call, statements in _services(templates):
        principal = Principal("Service", f"{service}.amazonaws.com")
        if not decides(call.request, principal, [], statements):
            yield f"{service} may not {call.action} on {call.resource}"
        if decides(_foreign(service, call).request, principal, [], statements):
            yield f"{service} may {call.action} on {call.resource} for another account"
        if decides(call.request, Principal("Service", "other.amazonaws.com"), [], statements):
            yield f"any service may {call.action} on {call.resource}"


def unexplained(templates: Templates) -> Iterator[str]:
    """Grants of resource policies that no service needs, except that the account's policies decide about a key."""
    calls = list(_services(templates))
    for owner, statements in templates.policies_of_resources().items():
        for statement in statements:
            if statement["Effect"] != "Allow":
                continue
            for alone, kind, principal in _alone(statement):
                if (kind, principal) == ("AWS", f"arn:aws:iam::{ACCOUNT}:root") and alone["Action"] == "kms:*":
                    continue
                used = any(
                    principal == f"{service}.amazonaws.com" and policy == statements and applies(alone, call.request)
                    for service, call, policy in calls
                )
                if "*" in alone["Action"] or not used:
                    yield f"{owner} lets {principal} {alone['Action']}, which nothing needs"


def _alone(statement: Statement) -> Iterator[tuple[Statement, str, str]]:
    """A statement for each of its principals, actions and resources."""
    named = statement["Principal"]
    principals = named if isinstance(named, Mapping) else {"AWS": named}
    for kind, ids in principals.items():
        for principal in as_list(ids):
            for action in as_list(statement["Action"]):
                for resource in as_list(statement["Resource"]):
                    yield {**statement, "Action": action, "Resource": resource}, kind, principal


# Types of resources whose policies this package reads.
_READ: Final = {
    *("AWS::IAM::ManagedPolicy", "AWS::IAM::Policy", "AWS::IAM::Role"),
    *("AWS::EFS::FileSystem", "AWS::KMS::Key", "AWS::S3::BucketPolicy", "AWS::SNS::TopicPolicy"),
}
_WITHOUT_DOCUMENT: Final = {"AWS::Lambda::Permission", "AWS::IAM::User", "AWS::IAM::Group", "AWS::IAM::UserPolicy"}


def unread(templates: Templates) -> Iterator[str]:
    """Resources that grant something and are of a type that this package does not read."""
    for stack, template in templates.stacks.items():
        for id_, resource in template["Resources"].items():
            unknown = resource["Type"] not in _READ and _has_policy(resource.get("Properties", {}))
            if unknown or resource["Type"] in _WITHOUT_DOCUMENT or resource["Type"].startswith("Custom::"):
                yield f"{stack}/{id_} is a {resource['Type']} with a policy, which the evaluation does not read"


def _has_policy(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "Statement" in value or any(map(_has_policy, value.values()))
    return isinstance(value, list) and any(map(_has_policy, value))


# Who may take roles

_STRANGER: Final = "210987654321"
# Services whose requests to take a role do not name the account: a role is given to them by iam:PassRole only.
_WITHOUT_ACCOUNT: Final = {"ec2", "lambda"}


def wrong_trust_of_services(templates: Templates) -> Iterator[str]:
    """A role is taken by the service of the resource that names it, for this account, and by no other service."""
    taken = set()
    for take in takes(templates):
        taken.add(f"{take.role.stack}/{take.role.id}")
        service = SERVICES.get(take.type)
        if service is None:
            yield f"{take.role.stack}/{take.id} names a role, and no service is stated for a {take.type}"
            continue
        context = {"aws:SourceAccount": ACCOUNT}
        if service == "pods.eks":
            context["aws:SourceArn"] = f"arn:aws:eks:{REGION}:{ACCOUNT}:cluster/demo"
        for action in ("sts:AssumeRole", "sts:TagSession") if service == "pods.eks" else ("sts:AssumeRole",):
            yield from _wrong_trust(f"{take.role.stack}/{take.role.id}", take.role.trust, service, action, context)
    for name, role in templates.roles.items():
        if name not in taken and not any("Federated" in entry["Principal"] for entry in role.trust):
            yield f"no resource takes the role {name}"


def _wrong_trust(
    role: str, trust: Sequence[Statement], service: str, action: str, context: Mapping[str, str]
) -> Iterator[str]:
    principal = Principal("Service", f"{service}.amazonaws.com")
    if not decides(Request(action, "", context), principal, [], trust):
        yield f"{service} may not take {role}"
    for key, value in {"aws:SourceAccount": _STRANGER, "aws:SourceArn": "arn:aws:eks:eu-west-1:1:cluster/x"}.items():
        changed = Request(action, "", {**context, key: value})
        if key in context and service not in _WITHOUT_ACCOUNT and decides(changed, principal, [], trust):
            yield f"{service} may take {role} with {key} {value}"
    for statement in trust:
        if statement["Principal"] != {"Service": principal.id}:
            yield f"{role} is also trusted to {statement['Principal']}"


# Tokens of GitHub's jobs

_ISSUER: Final = "token.actions.githubusercontent.com"
_SUBJECTS: Final = {
    "Role": "environment:release",
    "ReadRole": "pull_request",
    "PromoteStagingRole": "environment:staging",
    "PromoteProductionRole": "environment:production",
}


def wrong_trust_of_jobs(templates: Templates) -> Iterator[str]:
    """A role of GitHub's jobs accepts the tokens of its own environment in its own repository, and no other token."""
    github = Principal("Federated", f"arn:aws:iam::{ACCOUNT}:oidc-provider/{_ISSUER}")
    claims = [
        (f"repo:{repository}:{context}", audience)
        for repository in ("example@1/models@2", "example/models", "example@9/models@2", "example@1/models@9")
        for context in (*_SUBJECTS.values(), "ref:refs/heads/main", "environment:releases")
        for audience in ("sts.amazonaws.com", "other")
    ]
    for start, context in _SUBJECTS.items():
        trust = templates.role("demo-release", start).trust
        accepted = [
            (subject, audience)
            for subject, audience in claims
            if decides(
                Request("sts:AssumeRoleWithWebIdentity", "", {f"{_ISSUER}:sub": subject, f"{_ISSUER}:aud": audience}),
                github,
                [],
                trust,
            )
        ]
        if accepted != [(f"repo:example@1/models@2:{context}", "sts.amazonaws.com")]:
            yield f"{start} trusts {accepted}"
