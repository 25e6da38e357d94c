"""Lint rules about data and permissions: private buckets, TLS, write actions, stable logical ids, traffic weights."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from nxpipe.stacks.lint.deployment_plan import fixed_properties
from nxpipe.stacks.lint.finding import Facts, Finding
from nxpipe.stacks.lint.template import (
    Properties,
    Resource,
    Template,
    Templates,
    intrinsic,
    is_true,
    listed,
    settings,
    tables,
    text,
)

PRIVATE = "NXP-DATA-1"

_SETTINGS: Final = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")


def private(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for bucket in all_.of("AWS::S3::Bucket"):
        blocked = settings(bucket.properties, "PublicAccessBlockConfiguration")
        unset = [name for name in _SETTINGS if not is_true(blocked.get(name))]
        if unset:
            what = f"the bucket can become public: {', '.join(unset)} {'is' if len(unset) == 1 else 'are'} not set"
            yield Finding(PRIVATE, bucket, "PublicAccessBlockConfiguration", what, "set all four to true")
        if not any(_requires_tls(policy, "PolicyDocument") for policy in _policies(all_, bucket)):
            what = "the bucket accepts requests without TLS"
            yield Finding(PRIVATE, bucket, "", what, "deny all actions when aws:SecureTransport is false")
    for system in all_.of("AWS::EFS::FileSystem"):
        if not is_true(system.properties.get("Encrypted")):
            what = "the file system is not encrypted"
            yield Finding(PRIVATE, system, "Encrypted", what, "set it to true; this replaces the file system")
        if not _requires_tls(system, "FileSystemPolicy"):
            what = "the file system can be mounted without TLS"
            yield Finding(
                PRIVATE, system, "FileSystemPolicy", what, "deny all actions when aws:SecureTransport is false"
            )


def _policies(all_: Templates, bucket: Resource) -> Iterator[Resource]:
    for policy in all_.of("AWS::S3::BucketPolicy"):
        target = all_.follow(policy.properties.get("Bucket"), policy)
        if target is not None and target.key == bucket.key:
            yield policy


def _requires_tls(holder: Resource, key: str) -> bool:
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
        what = (
            "the rule's template text has changed, so a deployment would reset the traffic weights to the initial ones"
        )
        remedy = "restore its text; only rollouts change the weights"
        yield Finding(WEIGHTS, rule, ", ".join(differing), what, remedy)


WEAK: Final = "NXP-REF-1"


def no_weak_reference(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for template in all_.all:
        for resource in template.resources.values():
            for key, value in resource.properties.items():
                for stack in sorted(set(_weakly_referenced(value))):
                    yield _of_weak_reference(resource, key, stack)


def _of_weak_reference(resource: Resource, key: str, stack: str) -> Finding:
    if key in fixed_properties().get(resource.type, ()):
        what = (
            f"Fn::GetStackOutput of {stack} in a property that cannot change in place: a change set does not know its "
            "value, and plans a replacement of the resource"
        )
        return Finding(WEAK, resource, key, what, "export the value there, and read it with Fn::ImportValue")
    what = (
        f"Fn::GetStackOutput of {stack} is read again only if the text of this resource changes, so a new value there "
        "leaves the old one here"
    )
    remedy = "read it with Fn::ImportValue, or with a template parameter of type AWS::SSM::Parameter::Value<String>"
    return Finding(WEAK, resource, key, what, remedy)


def _weakly_referenced(value: object) -> Iterator[str]:
    """Stacks whose outputs a value reads by Fn::GetStackOutput."""
    name, inner = intrinsic(value)
    if name == "Fn::GetStackOutput":
        yield text(inner.get("StackName")) if isinstance(inner, Mapping) else "another stack"
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _weakly_referenced(item)


_POLICIES = ("AWS::IAM::ManagedPolicy", "AWS::IAM::Policy", "AWS::IAM::RolePolicy")


@dataclass(frozen=True)
class Statement:
    """An IAM statement and its place in a template."""

    resource: Resource  # the role or policy that holds it
    place: str
    body: Properties

    @property
    def allows(self) -> bool:
        return self.body.get("Effect") == "Allow"

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(text(action) for action in listed(self.body.get("Action")))

    @property
    def resources(self) -> tuple[str, ...]:
        return tuple(text(arn) for arn in listed(self.body.get("Resource")))


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
    """ARNs of a role's managed policies."""
    return tuple(text(arn) for arn in listed(role.properties.get("ManagedPolicyArns")))


WILDCARD = "NXP-IAM-1"
SIGNER = "NXP-IAM-2"

_READS: Final = re.compile(
    r"[a-z0-9-]+:(Get|List|Describe|BatchGet|BatchCheck|Head|Lookup|Filter|Search|View|Validate)\w*\*?"
)
# Write actions without resource-level permissions; a statement can only add conditions. By UpdateInstanceInformation an
# instance registers itself with SSM, and AWS documents the permission for all resources.
_WITHOUT_RESOURCES: Final = frozenset(
    {
        "cloudwatch:PutMetricData",
        "ec2messages:AcknowledgeMessage",
        "ec2messages:DeleteMessage",
        "ec2messages:FailMessage",
        "ec2messages:SendReply",
        "ssm:PutConfigurePackageResult",
        "ssm:UpdateInstanceInformation",
        "ssmmessages:CreateControlChannel",
        "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel",
        "ssmmessages:OpenDataChannel",
        "xray:PutTelemetryRecords",
        "xray:PutTraceSegments",
    }
)
_BROAD: Final = re.compile(r":policy/(?:\S*(?:FullAccess|AdministratorAccess|PowerUserAccess)\S*)$")
# All of a service, or all resources of one type: arn:aws:ecs:us-east-2:123456789012:cluster/*
_EVERYTHING: Final = re.compile(r"\*|arn:[^:]*:(?!s3:)[^:]*:[^:]*:[^:]*:(?:[a-z-]+[:/])?\*|arn:[^:]*:s3:::\*(?:/\*)?")
_REFERENCE: Final = re.compile(r"\$\{[^}]*\}")  # a value known at deployment; its name may have colons
# Condition keys that select resources whose ARN is unknown before they exist. The tag is PROJECT_TAG.
_SELECTING_KEYS: Final = ("aws:resourcetag/nxpipe:project", "ec2:subnet", "ec2:vpc")


def no_wildcard(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for statement in statements(all_):
        writes, wildcard = _writes(statement), _wildcard(statement)
        if statement.allows and writes and wildcard:
            yield Finding(
                WILDCARD,
                statement.resource,
                statement.place,
                f"it allows {_abbreviated(writes)} on {wildcard}",
                "name the resources",
            )
    for role in all_.of("AWS::IAM::Role"):
        broad = [arn for arn in managed_arns(role) if _BROAD.search(arn)]
        if broad:
            what = f"it has {_abbreviated(broad)}, which allows all changes"
            yield Finding(WILDCARD, role, "ManagedPolicyArns", what, "grant the actions that are needed, by resource")


def one_signer(all_: Templates, facts: Facts) -> Iterator[Finding]:
    """Keys must not be shared: a compromised build role could otherwise sign for a production channel."""
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
        return ["every action that is not listed"]
    return [action for action in statement.actions if not _READS.fullmatch(action) and action not in _WITHOUT_RESOURCES]


def _wildcard(statement: Statement) -> str | None:
    """The first wildcard resource of a statement."""
    if "NotResource" in statement.body:
        return "every resource that is not listed"
    broad = (arn for arn in statement.resources if _EVERYTHING.fullmatch(_REFERENCE.sub("known", arn)))
    return next((arn for arn in broad if arn == "*" or not _is_selected(statement)), None)


def _is_selected(statement: Statement) -> bool:
    """True if a condition of the statement selects its resources."""
    conditions = settings(statement.body, "Condition")
    return any(
        key.lower() in _SELECTING_KEYS and not any("*" in text(value) for value in listed(values))
        for operator in ("ArnEquals", "StringEquals")
        for key, values in settings(conditions, operator).items()
    )


def _abbreviated(names: list[str]) -> str:
    first, others = names[0], len(names) - 1
    return first if not others else f"{first} and {others} more"


KEEP: Final = "NXP-KEEP-1"

# Logical ids of stateful resources, by stack name without the project. Add a line for each new stateful resource.
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
_OPTIONAL: Final = frozenset({"Checkpoints620E2F20"})  # of fleets on spot instances only


def stateful_ids(stack: str, project: str) -> Mapping[str, str] | None:
    """Logical ids that a stack must keep; None for a stack of another project."""
    name = stack.removeprefix(f"{project}-")
    if name == stack:
        return None
    return next((ids for pattern, ids in STATEFUL_IDS.items() if fnmatchcase(name, pattern)), {})


def losses(templates: Templates, project: str) -> Iterator[tuple[Resource, str, str]]:
    """Stateful resources that a deployment would lose or that are not listed: resource, fault, remedy."""
    for template in templates.all:
        ids = stateful_ids(template.stack, project)
        if ids is not None:
            yield from _missing(template, ids)
            yield from _unlisted(template, ids)


def _missing(template: Template, ids: Mapping[str, str]) -> Iterator[tuple[Resource, str, str]]:
    for id_, type_ in ids.items():
        resource = template.resources.get(id_)
        if resource is None and id_ in _OPTIONAL:
            continue
        if resource is None or resource.type != type_:
            gone = Resource(template.stack, template.region, id_, type_, f"{template.stack}/{id_}", {})
            what = f"{id_} is no longer in the template: a deployment would abandon its data"
            yield gone, what, "restore the construct's id and its place in the tree"
        elif not resource.kept:
            what = "it would be deleted with its stack or at its replacement"
            yield resource, what, "set its removal policy to RETAIN"


def _unlisted(template: Template, ids: Mapping[str, str]) -> Iterator[tuple[Resource, str, str]]:
    for resource in template.resources.values():
        if resource.kept and resource.id not in ids:
            what = f"{resource.id} is retained, but not listed as a stateful resource"
            yield (
                resource,
                what,
                "add it to STATEFUL_IDS in stacks/lint/data_rules.py if it is new; else restore the construct's id",
            )


def keeps_logical_ids(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for resource, what, remedy in losses(all_, facts.project) if facts.project else ():
        yield Finding(KEEP, resource, "", what, remedy)
