"""IAM's policy evaluation within one account: identity policies, resource policies, conditions; an explicit Deny wins.

An element, an operator or a wildcard form that this module does not implement raises UnknownElement: nothing in a
policy is ignored.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeAlias

Statement: TypeAlias = Mapping[str, Any]
Context: TypeAlias = Mapping[str, str | tuple[str, ...]]  # a tuple is a multivalued key
_NO_CONTEXT: Final[Context] = {}


class UnknownElement(Exception):
    """A policy has something that this evaluator does not implement."""


@dataclass(frozen=True)
class Principal:
    """The principal of a request. `kind` is AWS, Service or Federated; `id` an ARN or the name of a service."""

    kind: str
    id: str

    @property
    def account(self) -> str | None:
        return self.id.split(":")[4] if self.kind == "AWS" else None


@dataclass(frozen=True)
class Request:
    action: str
    resource: str
    context: Context = field(default_factory=dict)


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def statements_in(document: Mapping[str, Any]) -> list[Statement]:
    if unknown := set(document) - {"Version", "Statement", "Id"}:
        raise UnknownElement(f"policy document with {sorted(unknown)}")
    return as_list(document["Statement"])


# Wildcards


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    if "${" in pattern:
        raise UnknownElement(f"policy variable in {pattern!r}")
    parts = (".*" if char == "*" else "." if char == "?" else re.escape(char) for char in pattern)
    return re.compile("".join(parts), re.DOTALL)


def like(pattern: str, text: str) -> bool:
    """IAM's wildcards: `*` is any text, `?` any one character; all else, `[` as well, is literal."""
    return _pattern(pattern).fullmatch(text) is not None


def like_arn(pattern: str, arn: str) -> bool:
    """Each of an ARN's six parts is compared by itself: no wildcard reaches over a colon before the last part."""
    parts, found = pattern.split(":", 5), arn.split(":", 5)
    if len(parts) != 6:
        raise UnknownElement(f"not an ARN: {pattern!r}")
    return len(found) == 6 and all(map(like, parts, found))


def _like_resource(pattern: str, resource: str) -> bool:
    return pattern == "*" or (resource != "*" and like_arn(pattern, resource))


def _like_action(pattern: str, action: str) -> bool:
    return like(pattern.lower(), action.lower())


# Conditions


def _less_than(wanted: str, found: str) -> bool:
    return float(found) < float(wanted)


_COMPARISONS: Final[Mapping[str, Callable[[str, str], bool]]] = {
    "StringEquals": lambda wanted, found: wanted == found,
    "StringEqualsIgnoreCase": lambda wanted, found: wanted.lower() == found.lower(),
    "StringLike": like,
    "ArnEquals": like_arn,  # AWS: "ArnEquals and ArnLike behave identically"
    "ArnLike": like_arn,
    "Bool": lambda wanted, found: wanted.lower() == found.lower(),
    "NumericEquals": lambda wanted, found: float(wanted) == float(found),
    "NumericLessThan": _less_than,
}
_NEGATED: Final = {"StringNotEquals": "StringEquals", "StringNotLike": "StringLike", "ArnNotLike": "ArnLike"}
_SETS: Final = ("ForAllValues", "ForAnyValue")


def holds(statement: Statement, context: Context) -> bool:
    """Whether all conditions of a statement hold. Names of keys are case-insensitive."""
    known = {key.lower(): value for key, value in context.items()}
    return all(
        _holds(operator, [_text(entry) for entry in as_list(wanted)], known.get(key.lower()))
        for operator, keys in statement.get("Condition", {}).items()
        for key, wanted in keys.items()
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _holds(operator: str, wanted: Sequence[str], found: str | tuple[str, ...] | None) -> bool:
    if operator == "Null":
        return (wanted == ["true"]) == (found is None)
    quantifier, _, name = operator.rpartition(":")
    base = name.removesuffix("IfExists")
    negated = base in _NEGATED
    compare = _COMPARISONS.get(_NEGATED.get(base, base))
    if compare is None or quantifier not in ("", *_SETS):
        raise UnknownElement(f"condition operator {operator}")
    if found is None:
        return base != name or negated if not quantifier else quantifier == "ForAllValues"

    def matches(value: str) -> bool:
        return any(compare(entry, value) for entry in wanted) != negated

    if not quantifier:
        if not isinstance(found, str):
            raise UnknownElement(f"operator {operator} without ForAllValues or ForAnyValue on a multivalued key")
        return matches(found)
    values = [found] if isinstance(found, str) else found
    return all(map(matches, values)) if quantifier == "ForAllValues" else any(map(matches, values))


# Statements

_ELEMENTS: Final = {"Sid", "Effect", "Action", "NotAction", "Resource", "NotResource", "Principal", "Condition"}


def applies(statement: Statement, request: Request) -> bool:
    """Whether a statement is about the action, the resource and the context of a request."""
    if unknown := set(statement) - _ELEMENTS:
        raise UnknownElement(f"statement with {sorted(unknown)}")
    if statement["Effect"] not in ("Allow", "Deny"):
        raise UnknownElement(f"effect {statement['Effect']}")
    # The statements of a trust policy have no resource: they are about its own role.
    trust = "Principal" in statement and not {"Resource", "NotResource"} & set(statement)
    return (
        _listed(statement, "Action", _like_action, request.action)
        and (trust or _listed(statement, "Resource", _like_resource, request.resource))
        and holds(statement, request.context)
    )


def _listed(statement: Statement, name: str, compare: Callable[[str, str], bool], found: str) -> bool:
    if (name in statement) == (f"Not{name}" in statement):
        raise UnknownElement(f"statement without exactly one of {name} and Not{name}")
    patterns = as_list(statement.get(name, statement.get(f"Not{name}")))
    return any(compare(pattern, found) for pattern in patterns) == (name in statement)


def names(statement: Statement, principal: Principal) -> bool:
    """Whether a statement of a resource policy names the principal itself, or everybody."""
    wanted = statement["Principal"]
    if wanted == "*":
        return True
    if unknown := set(wanted) - {"AWS", "Service", "Federated"}:
        raise UnknownElement(f"principal {sorted(unknown)}")
    return any(entry in ("*", principal.id) for entry in as_list(wanted.get(principal.kind, [])))


def _delegates(statement: Statement, principal: Principal) -> bool:
    """Whether a statement names the principal's account, which leaves the decision to its identity policies."""
    account = principal.account
    wanted = statement["Principal"]
    roots = as_list(wanted.get("AWS", [])) if isinstance(wanted, Mapping) else []
    return account is not None and any(entry in (account, f"arn:aws:iam::{account}:root") for entry in roots)


def allowed(statements: Iterable[Statement], action: str, resource: str, context: Context = _NO_CONTEXT) -> bool:
    """The decision by the statements of one policy, whoever the principal is."""
    request = Request(action, resource, context)
    effects = {statement["Effect"] for statement in statements if applies(statement, request)}
    return effects == {"Allow"}


def decides(
    request: Request,
    principal: Principal,
    identity: Sequence[Statement],
    resource: Sequence[Statement] = (),
    *,
    needs_both: bool = False,
) -> bool:
    """The decision within one account.

    An Allow of either policy is enough, unless `needs_both`: an identity policy has effect on a KMS key only if the key
    policy delegates to the account.
    """
    own = [statement for statement in identity if applies(statement, request)]
    said = [statement for statement in resource if applies(statement, request)]
    named = [statement for statement in said if names(statement, principal)]
    delegating = [statement for statement in said if _delegates(statement, principal)]
    if any(statement["Effect"] == "Deny" for statement in (*own, *named, *delegating)):
        return False
    if named:
        return True
    return bool(own) and (bool(delegating) or not needs_both)
