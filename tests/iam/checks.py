"""The roles of a project against the calls of users and machines: none is refused, and no more is granted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from tests.iam.calls import Call
from tests.iam.documented import ACCEPTED, NOT_GRANTED, compile_cache, documented
from tests.iam.evaluator import Statement, applies, as_list, decides, like
from tests.iam.machines import (
    SESSIONS,
    calls_of_functions,
    calls_of_machines,
    calls_of_rules,
    calls_of_schedules,
    calls_of_training_user_data,
    calls_of_user_data,
)
from tests.iam.principals import (
    open_transport,
    unexplained,
    unread,
    wrong_services,
    wrong_trust_of_jobs,
    wrong_trust_of_services,
)
from tests.iam.takers import hurried
from tests.iam.templates import ACCOUNT, REGION, Role, Templates


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


def duties(templates: Templates, sessions: Mapping[str, set[Call]]) -> list[Duty]:
    """Every role with the calls of all that use it: recorded ones, those of templates, and documented ones."""
    found: dict[str, Duty] = {}
    sources = (_of_commands(templates, sessions), _of_templates(templates), _of_documentation(templates))
    for name, role, calls in (entry for source in sources for entry in source):
        before = found.get(f"{role.stack}/{role.id}", Duty(name, role, frozenset()))
        found[f"{role.stack}/{role.id}"] = replace(before, calls=before.calls | calls)
    return list(found.values())


_Entries: TypeAlias = Iterator[tuple[str, Role, set[Call]]]


def _of_commands(templates: Templates, sessions: Mapping[str, set[Call]]) -> _Entries:
    """Roles of commands and agents, whose calls are recorded, and what their instances do at the first boot."""
    published, fetched = sessions["publish"], sessions["fetch"]
    release, serve = "demo-release", "demo-serve-search"
    # A job of the farm builds and publishes; it signs nothing.
    built = {call for call in published if call.action not in ("kms:Sign", "kms:GetPublicKey")}
    submitted = sessions["submit"] | sessions["submit_proof"]
    yield "publish", templates.role(release, "Role"), published | submitted
    yield "prove job", templates.role("demo-prove", "JobRole"), sessions["prove"]
    yield "farm job", templates.role("demo-build-farm", "JobRole"), built | sessions["work_on_farm"]
    yield "plan", templates.role(release, "ReadRole"), sessions["plan"]
    for channel in ("staging", "production"):
        role = templates.role(release, f"Promote{channel.title()}Role")
        yield f"promote {channel}", role, sessions[f"promote_{channel}"]
    booted = calls_of_user_data(templates, serve) | compile_cache(templates, serve) | SESSIONS
    yield "instance", templates.role(serve, "Role"), sessions["serve"] | booted
    yield "standby instance", templates.role(serve, "StandbyRole"), set()  # its image has the model
    yield "pod", templates.role("demo-cluster", "Artifacts"), fetched
    yield "training job", templates.role("demo-train-tune", "JobRole"), fetched
    yield "training job in a block", templates.role("demo-train-block", "JobRole"), fetched
    yield "training job on spot", templates.role("demo-train-spare", "JobRole"), fetched | sessions["checkpoint"]


def _of_templates(templates: Templates) -> _Entries:
    """Roles of state machines, rules, schedules, functions and hosts, whose calls the templates state."""
    reads = (calls_of_machines, calls_of_rules, calls_of_functions, calls_of_schedules)
    for stack in templates.stacks:
        for read in reads:
            for _, role, calls in read(templates, stack):
                yield _name(role), role, calls
        if stack.startswith("demo-train-"):
            role = templates.role(stack, "InstanceRole")
            yield _name(role), role, calls_of_training_user_data(templates, stack)


def _of_documentation(templates: Templates) -> _Entries:
    for entry in documented(templates):
        yield _name(entry.role), entry.role, set(entry.calls)


def _name(role: Role) -> str:
    """Such as "cluster NodeRole": the stack, and the logical id without its hash."""
    return f"{role.stack.removeprefix('demo-')} {role.id[:-8]}"


_RUNS: Final = "jobs of the build farm have the same policy, and leave their outcomes there"
_TRUSTED: Final = "without [[signing.trusted]] a promotion reads the public key of builds from KMS"
_CHILDREN: Final = "lists the children of an array once one has started; no job starts here"
_UPLOADS: Final = "a program that fails or is interrupted ends or resumes its upload"
_SECRETS: Final = "the guide lists kms:DescribeKey only; modules for customer managed keys also grant this; untried"
SPARE: Final = (
    *(Spare("cluster ControlRole", f"kms:{name}", "*", _SECRETS) for name in ("Decrypt", "Encrypt", "ListGrants")),
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
    every, used = duties(templates, sessions), set[Spare]()
    found = [fault for duty in every for fault in _faults_of(duty, resources, used)]
    unused = [entry for entry in (*SPARE, *TOLERATED) if entry not in used]
    found += [f"the exception for {entry.action} of {entry.role} is not needed" for entry in unused]
    found += [*_without_duty(templates, every), *_wrong_managed(every, resources), *_withheld(every, resources)]
    found += [*open_transport(resources), *wrong_services(templates), *unexplained(templates), *unread(templates)]
    return [*found, *wrong_trust_of_jobs(templates), *wrong_trust_of_services(templates), *hurried(templates)]


def _without_duty(templates: Templates, every: Sequence[Duty]) -> Iterator[str]:
    covered = {f"{duty.role.stack}/{duty.role.id}": duty for duty in every}
    for name, role in templates.roles.items():
        if name not in covered:
            yield f"no duty is stated for the role {name}"
        elif role.identity and not covered[name].calls:
            yield f"no call is stated for the role {name}, which has permissions"


def _wrong_managed(every: Sequence[Duty], resources: Mapping[str, Sequence[Statement]]) -> Iterator[str]:
    """AWS managed policies are listed with a reason, and each role that has one needs it."""
    attached = set()
    for duty in every:
        for name in duty.role.managed:
            attached.add(name)
            if name not in ACCEPTED:
                yield f"{duty.name} has the AWS managed policy {name}, which is not accepted"
            others = [*duty.role.own, *(s for other, p in duty.role.managed.items() if other != name for s in p)]
            if all(may(duty, call, resources, others) for call in duty.calls):
                yield f"{duty.name} has the AWS managed policy {name}, which none of its calls needs"
    yield from (f"no role has the accepted AWS managed policy {name}" for name in ACCEPTED.keys() - attached)


def _withheld(every: Sequence[Duty], resources: Mapping[str, Sequence[Statement]]) -> Iterator[str]:
    for duty in every:
        for name, call in NOT_GRANTED:
            if name == duty.name and may(duty, call, resources):
                yield f"{name} may {call.action}, which is documented and not to be granted"


def _faults_of(duty: Duty, resources: Mapping[str, Sequence[Statement]], used: set[Spare]) -> Iterator[str]:
    for call in sorted(duty.calls):
        if not may(duty, call, resources):
            fault = f"{duty.name} may not {call.action} on {call.resource} with {dict(call.context)}"
            yield from _unless(TOLERATED, duty, call.action, call.resource, used, fault)
    wider = set().union(*(neighbours(call) | _of_people(duty, call) for call in duty.calls))
    for call in sorted(wider - duty.calls):
        if may(duty, call, resources, duty.role.own):
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


def may(
    duty: Duty,
    call: Call,
    resources: Mapping[str, Sequence[Statement]],
    identity: Sequence[Statement] | None = None,
) -> bool:
    """The decision about a call, by all policies of the role or by those that are given."""
    owner = call.resource.partition("/")[0] if call.action.startswith("s3:") else call.resource
    return decides(
        call.request,
        duty.role.principal,
        duty.role.identity if identity is None else identity,
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
    "/nxpipe/demo/": "/nxpipe/other/",
    "nodegroup/demo/": "nodegroup/other/",
    "cluster/demo": "cluster/other",
    ":repository/": ":repository/other-",
}


_STORE: Final = "arn:aws:s3:::demo-storage-artifacts"  # all keys of it may be listed
# Condition keys that limit a call and whose values other calls do not have.
_LIMITS: Final = {
    "aws:TagKeys",
    "cloudwatch:namespace",
    "ec2:Subnet",
    "elasticfilesystem:AccessPointArn",
    "elasticfilesystem:AccessedViaMountTarget",
    "kms:GrantIsForAWSResource",
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
    for key in _LIMITS & context.keys():
        other: str | tuple[str, ...] = "false" if isinstance(context[key], str) else ("false",)
        found |= {call.having(key, other), call.without(key)}
    if call.action == "s3:ListBucket" and _STORE not in call.resource and "s3:prefix" in context:
        found |= {call.having("s3:prefix", "others/x"), call.without("s3:prefix")}
    if "autoscaling:MinSize" in context:  # the minimum is 0 or the fleet's, and the maximum stays
        found |= {call.without("autoscaling:MinSize"), call.having("autoscaling:MinSize", "3")}
        found.add(call.having("autoscaling:MaxSize", "9"))
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
