"""The roles of a project against the calls of users and machines: none is refused, and no more is granted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.iam.calls import Call
from tests.iam.evaluator import Principal, Request, Statement, applies, as_list, decides, like
from tests.iam.machines import (
    calls_of_functions,
    calls_of_machines,
    calls_of_rules,
    calls_of_user_data,
)
from tests.iam.templates import ACCOUNT, REGION, Role, Templates

_ROLLOUT: Final = "demo-rollout-search"


@dataclass(frozen=True)
class Duty:
    """A role and all calls that are made with it."""

    name: str
    role: Role
    calls: frozenset[Call]


@dataclass(frozen=True)
class Spare:
    """An exception with its reason: a granted action that no recorded call needs, or a refusal that is tolerated."""

    role: str  # the name of a duty
    action: str
    resource: str
    reason: str


def duties(templates: Templates, sessions: Mapping[str, set[Call]]) -> Iterator[Duty]:
    """All roles that this package covers."""
    published = sessions["publish"]
    release = "demo-release"
    # A job of the farm builds and publishes; it signs nothing.
    built = {call for call in published if call.action not in ("kms:Sign", "kms:GetPublicKey")}
    built |= sessions["work_on_farm"]
    served = sessions["serve"] | calls_of_user_data(templates, "demo-serve-search")
    yield Duty("publish", templates.role(release, "Role"), frozenset(published | sessions["submit"]))
    yield Duty("farm job", templates.role("demo-build-farm", "JobRole"), frozenset(built))
    yield Duty("plan", templates.role(release, "ReadRole"), frozenset(sessions["plan"]))
    for channel in ("staging", "production"):
        role = templates.role(release, f"Promote{channel.title()}Role")
        yield Duty(f"promote {channel}", role, frozenset(sessions[f"promote_{channel}"]))
    yield Duty("instance", templates.role("demo-serve-search", "Role"), frozenset(served))
    yield Duty("pod", templates.role("demo-cluster", "Artifacts"), frozenset(sessions["fetch"]))
    yield Duty("training job", templates.role("demo-train-tune", "JobRole"), frozenset(sessions["fetch"]))
    spot = sessions["fetch"] | sessions["checkpoint"]
    yield Duty("training job on spot", templates.role("demo-train-spare", "JobRole"), frozenset(spot))
    for read in (calls_of_machines, calls_of_rules, calls_of_functions):
        by_role: dict[str, tuple[Role, set[Call]]] = {}
        for _, role, calls in read(templates, _ROLLOUT):
            by_role.setdefault(role.id, (role, set()))[1].update(calls)
        for id_, (role, calls) in by_role.items():
            yield Duty(id_.rstrip("0123456789ABCDEF"), role, frozenset(calls))


_RUNS: Final = "jobs of the build farm have the same policy, and leave their outcomes there"
_TRUSTED: Final = "without [[signing.trusted]] a promotion reads the public key of builds from KMS"
_CHILDREN: Final = "lists the children of an array once one has started; no job starts here"
_UPLOADS: Final = "a program that fails or is interrupted ends or resumes its upload"
SPARE: Final = (
    Spare("training job on spot", "s3:AbortMultipartUpload", "*", _UPLOADS),
    Spare("training job on spot", "s3:ListMultipartUploadParts", "*", _UPLOADS),
    Spare("publish", "batch:ListJobs", "*", _CHILDREN),
    Spare("publish", "s3:PutObject", "*/models/runs/*", _RUNS),
    Spare("promote staging", "kms:GetPublicKey", "*", _TRUSTED),
    Spare("promote production", "kms:GetPublicKey", "*", _TRUSTED),
)
_INDEX: Final = "a reader that may not remove a merged segment of the index reports it and goes on"
# Calls that may be refused, by any role.
TOLERATED: Final = (Spare("*", "s3:DeleteObject", "*/models/index/*", _INDEX),)


def faults(templates: Templates, sessions: Mapping[str, set[Call]]) -> list[str]:
    """What is wrong with the policies of the covered roles; empty if nothing is."""
    resources = templates.policies_of_resources()
    every, used = list(duties(templates, sessions)), set[Spare]()
    found = [fault for duty in every for fault in _faults_of(duty, resources, used)]
    unused = [entry for entry in (*SPARE, *TOLERATED) if entry not in used]
    found += [f"the exception for {entry.action} of {entry.role} is not needed" for entry in unused]
    return [*found, *_open_transport(resources), *_wrong_services(templates), *_wrong_trust(templates)]


def _faults_of(duty: Duty, resources: Mapping[str, Sequence[Statement]], used: set[Spare]) -> Iterator[str]:
    for call in sorted(duty.calls):
        if not may(duty, call, resources):
            fault = f"{duty.name} may not {call.action} on {call.resource} with {dict(call.context)}"
            yield from _unless(TOLERATED, duty, call.action, call.resource, used, fault)
    wider = set().union(*(neighbours(call) | _of_people(duty, call) for call in duty.calls))
    for call in sorted(wider - duty.calls):
        if may(duty, call, resources):
            yield f"{duty.name} may also {call.action} on {call.resource} with {dict(call.context)}"
    for policy, action, resource in sorted(_superfluous(duty)):
        fault = f"{duty.name} is granted {action} on {resource} by {policy}, which none of its calls needs"
        yield from _unless(SPARE, duty, action, resource, used, fault)


def _unless(
    exceptions: Sequence[Spare], duty: Duty, action: str, resource: str, used: set[Spare], fault: str
) -> Iterator[str]:
    """The fault, unless an exception is made for it."""
    for entry in exceptions:
        if like(entry.role, duty.name) and like(entry.action, action) and like(entry.resource, resource):
            used.add(entry)
            return
    yield fault


def may(duty: Duty, call: Call, resources: Mapping[str, Sequence[Statement]]) -> bool:
    owner = call.resource.partition("/")[0] if call.action.startswith("s3:") else call.resource
    return decides(
        call.request,
        duty.role.principal,
        duty.role.identity,
        resources.get(owner, []),
        needs_both=call.resource in resources and call.action.startswith("kms:"),
    )


def _superfluous(duty: Duty) -> Iterator[tuple[str, str, str]]:
    """Each action on each resource of each statement that no call matches, and each action with a wildcard."""
    for policy, statement in duty.role.statements:
        if statement["Effect"] != "Allow":
            continue
        for action in as_list(statement["Action"]):
            for resource in as_list(statement["Resource"]):
                alone = {**statement, "Action": action, "Resource": resource}
                if "*" in action or not any(applies(alone, call.request) for call in duty.calls):
                    yield policy, action, resource


# Calls that must be refused

_CREATED_ONCE: Final = ("ac", "cas", "channels/*/log", "evidence", "parts", "pins", "sig")
_FOLDERS: Final = {
    "/channels/production/": "/channels/experiments/",
    "/channels/staging/": "/channels/production/",
    "--green/": "--standby/",
    "/rollouts/search/": "/rollouts/other/",
}
_OTHER: Final = _FOLDERS | {
    ":demo-": ":other-",
    "/demo-": "/other-",
    "demo-storage-artifacts/models/": "demo-storage-artifacts/others/",
    "demo-storage-artifacts/": "demo-storage-logs/",
    ":demo-train-spare-": ":other-train-",
    "/nxpipe/demo/search:": "/nxpipe/demo/other:",
}


def neighbours(call: Call) -> set[Call]:
    """Calls that differ in one thing that a policy must look at: the resource, or a condition key."""
    found = {Call(call.action, changed, call.context) for changed in _other_resources(call)}
    context = dict(call.context)
    if "kms:ViaService" in context:
        found |= {call.without("kms:ViaService"), call.having("kms:ViaService", f"ec2.{REGION}.amazonaws.com")}
    if "kms:SigningAlgorithm" in context:
        found.add(call.having("kms:SigningAlgorithm", "ECDSA_SHA_512"))
    for key in context:
        if key.startswith(("aws:RequestTag/", "aws:ResourceTag/")):
            found |= {call.without(key), call.having(key, "other")}
    if "s3:if-none-match" in context and _is_created_once(call.resource):
        found.add(call.without("s3:if-none-match"))
    if "s3:x-amz-copy-source" in context:
        found.add(call.having("s3:x-amz-copy-source", "another-bucket/models/cas/sha256/x"))
        found.add(call.without("s3:x-amz-copy-source"))
    for key in ("elasticfilesystem:AccessPointArn", "elasticfilesystem:AccessedViaMountTarget"):
        if key in context:
            found.add(call.having(key, "false"))
    return found


def _of_people(duty: Duty, call: Call) -> set[Call]:
    """Only state machines write which environment is stable; a table has the record of one fleet."""
    if not duty.name.startswith("promote ") or not call.action.startswith("dynamodb:"):
        return set()
    other = call.having("dynamodb:LeadingKeys", ("other",))
    stable = call.having("dynamodb:Attributes", ("fleet", "stable"))
    return {other, stable} if call.action == "dynamodb:UpdateItem" else {other}


def _other_resources(call: Call) -> Iterator[str]:
    resource = call.resource
    for one, other in _OTHER.items():
        # Reading is limited to the store, not to a folder of it.
        if one in resource and not (call.action == "s3:GetObject" and one in _FOLDERS):
            yield resource.replace(one, other, 1)
    if f":{ACCOUNT}:" in resource:
        yield resource.replace(ACCOUNT, "210987654321")
    if "/key/" in resource or ":key/" in resource:
        yield f"{resource}-other"


def _is_created_once(resource: str) -> bool:
    return any(like(f"*/models/{folder}/*", resource) for folder in _CREATED_ONCE)


_ENCRYPTED: Final = {"s3": "s3:GetObject", "sns": "sns:Publish", "elasticfilesystem": "elasticfilesystem:ClientMount"}
_POINT: Final = {"elasticfilesystem:AccessPointArn": "a point"}


def _open_transport(resources: Mapping[str, Sequence[Statement]]) -> Iterator[str]:
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


# Services that act by themselves, and who may take roles


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
    written = {**own, "aws:SourceArn": "arn:aws:s3:::demo-storage-artifacts", "s3:TlsVersion": "1.3"}
    yield "logging.s3", Call.of("s3:PutObject", f"{logs}/artifacts/x", written), resources[logs]
    assumes = Call.of("sts:AssumeRole", "", {"aws:SourceAccount": ACCOUNT})
    for _, role, _ in calls_of_machines(templates, _ROLLOUT):
        yield "states", assumes, role.trust
    yield "events", assumes, templates.role(_ROLLOUT, "Waker").trust


def _wrong_services(templates: Templates) -> Iterator[str]:
    """A service may act for this account and for no other; another service may not."""
    for service, call, statements in _services(templates):
        principal = Principal("Service", f"{service}.amazonaws.com")
        if not decides(call.request, principal, [], statements):
            yield f"{service} may not {call.action} on {call.resource}"
        foreign = call.having("aws:SourceAccount", "210987654321").request
        if decides(foreign, principal, [], statements):
            yield f"{service} may {call.action} on {call.resource} for another account"
        if decides(call.request, Principal("Service", "other.amazonaws.com"), [], statements):
            yield f"any service may {call.action} on {call.resource}"


_ISSUER: Final = "token.actions.githubusercontent.com"
_SUBJECTS: Final = {
    "Role": "environment:release",
    "ReadRole": "pull_request",
    "PromoteStagingRole": "environment:staging",
    "PromoteProductionRole": "environment:production",
}


def _wrong_trust(templates: Templates) -> Iterator[str]:
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
