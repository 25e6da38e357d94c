"""Lint rules about data and permissions: private buckets, TLS, write actions, stable logical ids, traffic weights."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from nxpipe.stacks.lint.finding import Facts, Finding
from nxpipe.stacks.lint.template import (
    Properties,
    Resource,
    Template,
    Templates,
    is_true,
    listed,
    settings,
    tables,
    text,
)

PRIVATE = "NXP-DATA-1"

_WAYS: Final = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")


def private(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for bucket in all_.of("AWS::S3::Bucket"):
        blocked = settings(bucket.properties, "PublicAccessBlockConfiguration")
        ways = [way for way in _WAYS if not is_true(blocked.get(way))]
        if ways:
            what = f"the bucket can become public: {', '.join(ways)} {'is' if len(ways) == 1 else 'are'} not set"
            yield Finding(PRIVATE, bucket, "PublicAccessBlockConfiguration", what, "set all four to true")
        if not any(_refuses_plain_text(policy, "PolicyDocument") for policy in _policies(all_, bucket)):
            what = "the bucket answers requests in plain text"
            yield Finding(PRIVATE, bucket, "", what, "deny all actions when aws:SecureTransport is false")
    for system in all_.of("AWS::EFS::FileSystem"):
        if not is_true(system.properties.get("Encrypted")):
            what = "the file system is not encrypted"
            yield Finding(PRIVATE, system, "Encrypted", what, "set it to true; that makes a new file system")
        if not _refuses_plain_text(system, "FileSystemPolicy"):
            what = "the file system is mounted in plain text too"
            yield Finding(
                PRIVATE, system, "FileSystemPolicy", what, "deny what comes when aws:SecureTransport is false"
            )


def _policies(all_: Templates, bucket: Resource) -> Iterator[Resource]:
    for policy in all_.of("AWS::S3::BucketPolicy"):
        found = all_.follow(policy.properties.get("Bucket"), policy)
        if found is not None and found.key == bucket.key:
            yield policy


def _refuses_plain_text(holder: Resource, key: str) -> bool:
    return any(_denies(statement) for statement in tables(settings(holder.properties, key), "Statement"))


def _denies(statement: Properties) -> bool:
    condition = settings(settings(statement, "Condition"), "Bool").get("aws:SecureTransport")
    everyone = statement.get("Principal") in ("*", {"AWS": "*"})
    return statement.get("Effect") == "Deny" and everyone and str(condition).lower() == "false"


WEIGHTS: Final = "NXP-KEEP-2"

RULE: Final = "FrontWeights610644FE"
TEXT: Final[Properties] = {
    "Actions": [
        {
            "ForwardConfig": {
                "TargetGroupStickinessConfig": {"Enabled": False},
                "TargetGroups": [
                    {"TargetGroupArn": {"Ref": "Frontblue4D7292A6"}, "Weight": 100},
                    {"TargetGroupArn": {"Ref": "Frontgreen6BD8991D"}, "Weight": 0},
                ],
            },
            "Type": "forward",
        }
    ],
    "Conditions": [{"Field": "path-pattern", "PathPatternConfig": {"Values": ["*"]}}],
    "ListenerArn": {"Ref": "FrontBalancerListener5590D880"},
    "Priority": 100,
}


def unchanged_rule(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for template in all_.all if facts.project else ():
        if template.stack.startswith(f"{facts.project}-serve-"):
            yield from _changed(template)


def _changed(template: Template) -> Iterator[Finding]:
    rule = template.resources.get(RULE)
    if rule is None:
        type_ = "AWS::ElasticLoadBalancingV2::ListenerRule"
        rule = Resource(template.stack, template.region, RULE, type_, f"{template.stack}/{RULE}", {})
    differing = sorted(key for key in {*TEXT, *rule.properties} if TEXT.get(key) != rule.properties.get(key))
    if differing:
        what = "the rule's text has changed, and its deployment would put back the weights of the first day"
        mend = "give it its old text back; weights are moved by rollouts alone"
        yield Finding(WEIGHTS, rule, ", ".join(differing), what, mend)


_POLICIES = ("AWS::IAM::ManagedPolicy", "AWS::IAM::Policy", "AWS::IAM::RolePolicy")


@dataclass(frozen=True)
class Statement:
    resource: Resource  # the role or policy that holds it
    place: str
    body: Properties

    @property
    def allows(self) -> bool:
        return self.body.get("Effect") == "Allow"

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(text(each) for each in listed(self.body.get("Action")))

    @property
    def resources(self) -> tuple[str, ...]:
        return tuple(text(each) for each in listed(self.body.get("Resource")))


def statements(all_: Templates) -> Iterator[Statement]:
    for role in all_.of("AWS::IAM::Role"):
        for index, inline in enumerate(tables(role.properties, "Policies")):
            yield from _of(inline, role, f"Policies/{index}/")
    for policy in all_.of(*_POLICIES):
        yield from _of(policy.properties, policy, "")


def _of(holder: Properties, resource: Resource, prefix: str) -> Iterator[Statement]:
    for index, body in enumerate(tables(settings(holder, "PolicyDocument"), "Statement")):
        yield Statement(resource, f"{prefix}PolicyDocument/Statement/{index}", body)


def managed_arns(role: Resource) -> tuple[str, ...]:
    """The managed policies that a role has."""
    return tuple(text(each) for each in listed(role.properties.get("ManagedPolicyArns")))


WILDCARD = "NXP-IAM-1"
SIGNER = "NXP-IAM-2"

_READS: Final = re.compile(
    r"[a-z0-9-]+:(Get|List|Describe|BatchGet|BatchCheck|Head|Lookup|Filter|Search|View|Validate)\w*\*?"
)
# Actions for which IAM knows no resource: all that a statement can do is to add a condition.
_WITHOUT_RESOURCES: Final = frozenset(
    {
        "cloudwatch:PutMetricData",
        "ec2messages:AcknowledgeMessage",
        "ec2messages:DeleteMessage",
        "ec2messages:FailMessage",
        "ec2messages:SendReply",
        "ssm:PutConfigurePackageResult",
        "ssmmessages:CreateControlChannel",
        "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel",
        "ssmmessages:OpenDataChannel",
        "xray:PutTelemetryRecords",
        "xray:PutTraceSegments",
    }
)
_BROAD: Final = re.compile(r":policy/(?:\S*(?:FullAccess|AdministratorAccess|PowerUserAccess)\S*)$")
# The whole of a service, or all resources of one type: arn:aws:ecs:us-east-2:123456789012:cluster/*
_EVERYTHING: Final = re.compile(r"\*|arn:[^:]*:(?!s3:)[^:]*:[^:]*:[^:]*:(?:[a-z-]+[:/])?\*|arn:[^:]*:s3:::\*(?:/\*)?")
_ONLY_THEN: Final = re.compile(r"\$\{[^}]*\}")  # what only the deployment knows, whose name may have colons
# What is meant by a condition, where a thing has no name before it is made. The tag is the project's own (PROJECT_TAG).
_NAMED_BY: Final = ("aws:resourcetag/nxpipe:project", "ec2:subnet", "ec2:vpc")


def no_wildcard(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for statement in statements(all_):
        writes, everything = _writes(statement), _everything(statement)
        if statement.allows and writes and everything:
            yield Finding(
                WILDCARD,
                statement.resource,
                statement.place,
                f"{_some(writes)} may be done to {everything}",
                "name what it is done to",
            )
    for role in all_.of("AWS::IAM::Role"):
        broad = [arn for arn in managed_arns(role) if _BROAD.search(arn)]
        if broad:
            what = f"it has {_some(broad)}, which may change whatever there is"
            yield Finding(WILDCARD, role, "ManagedPolicyArns", what, "grant the actions that are needed, by resource")


def one_signer(all_: Templates, facts: Facts) -> Iterator[Finding]:
    """Who holds one duty and is taken over could otherwise sign for all of them: a build for production, say."""
    first: dict[str, Statement] = {}
    for statement in statements(all_):
        if not statement.allows or "kms:sign" not in map(str.lower, statement.actions):
            continue
        for key in statement.resources:
            other = first.setdefault(key, statement)
            if other.resource.path != statement.resource.path:
                yield Finding(
                    SIGNER,
                    statement.resource,
                    statement.place,
                    f"it signs with {key}, and so does {other.resource.path}",
                    "give each duty a key of its own: [signing] key for builds, [[signing.promoting]] for each channel",
                )


def _writes(statement: Statement) -> list[str]:
    if "NotAction" in statement.body:
        return ["whatever is not listed"]
    return [action for action in statement.actions if not _READS.fullmatch(action) and action not in _WITHOUT_RESOURCES]


def _everything(statement: Statement) -> str | None:
    if "NotResource" in statement.body:
        return "whatever is not listed"
    broad = (each for each in statement.resources if _EVERYTHING.fullmatch(_ONLY_THEN.sub("known", each)))
    return next((each for each in broad if each == "*" or not _named(statement)), None)


def _named(statement: Statement) -> bool:
    conditions = settings(statement.body, "Condition")
    return any(
        key.lower() in _NAMED_BY and not any("*" in text(each) for each in listed(meant))
        for operator in ("ArnEquals", "StringEquals")
        for key, meant in settings(conditions, operator).items()
    )


def _some(names: list[str]) -> str:
    first, rest = names[0], len(names) - 1
    return first if not rest else f"{first} and {rest} more"


KEEP: Final = "NXP-KEEP-1"

# By the name of the stack after the project's. Adding a line is how something new is put under guard.
STATEFUL_IDS: Final[Mapping[str, Mapping[str, str]]] = {
    "storage": {
        "Artifacts82DD59A1": "AWS::S3::Bucket",
        "Images2D38C313": "AWS::ECR::Repository",
        "Key961B73FD": "AWS::KMS::Key",
        "Logs6819BB44": "AWS::S3::Bucket",
    },
    "train-*": {
        "Checkpoints620E2F20": "AWS::S3::Bucket",
    },
}
_SOMETIMES: Final = frozenset({"Checkpoints620E2F20"})  # only a fleet on spot instances has one


def stateful_ids(stack: str, project: str) -> Mapping[str, str] | None:
    """The ids that a stack must keep; None for a stack that is not the project's."""
    name = stack.removeprefix(f"{project}-")
    if name == stack:
        return None
    return next((ids for pattern, ids in STATEFUL_IDS.items() if fnmatchcase(name, pattern)), {})


def losses(templates: Templates, project: str) -> Iterator[tuple[Resource, str, str]]:
    """A resource, what would become of it, and what to do."""
    for template in templates.all:
        ids = stateful_ids(template.stack, project)
        if ids is not None:
            yield from _missing(template, ids)
            yield from _loose(template, ids)


def _missing(template: Template, ids: Mapping[str, str]) -> Iterator[tuple[Resource, str, str]]:
    for id_, type_ in ids.items():
        found = template.resources.get(id_)
        if found is None and id_ in _SOMETIMES:
            continue
        if found is None or found.type != type_:
            gone = Resource(template.stack, template.region, id_, type_, f"{template.stack}/{id_}", {})
            what = f"{id_} is not in the template any more: what it holds would be left behind, or replaced by nothing"
            yield gone, what, "give the construct its old name and place back"
        elif not found.kept:
            what = "it would be deleted with its stack, or when it is replaced"
            yield found, what, "set its removal policy to RETAIN"


def _loose(template: Template, ids: Mapping[str, str]) -> Iterator[tuple[Resource, str, str]]:
    for resource in template.resources.values():
        if resource.kept and resource.id not in ids:
            what = f"{resource.id} is to be kept, and is not among the ids that are guarded"
            yield (
                resource,
                what,
                "add it to KEPT in stacks/lint/data_rules.py if it is new; else give its construct the old name back",
            )


def keeps_logical_ids(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for resource, what, mend in losses(all_, facts.project) if facts.project else ():
        yield Finding(KEEP, resource, "", what, mend)
