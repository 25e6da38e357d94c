"""What roles may do: an action that changes something names what it changes."""

import re
from collections.abc import Iterator
from typing import Final

from nxpipe.stacks.reading.statements import Statement, managed_arns, statements
from nxpipe.stacks.reading.template import Templates, listed, settings, text
from nxpipe.stacks.rules.finding import Facts, Finding

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
