"""Conditions of policies. A statement whose condition is not met does not apply. Moto denies in that case, so that a
statement "deny requests without TLS" denies everything.

The local server uses plain HTTP; every request counts as TLS 1.3. A condition on an unknown key is not met.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from moto.iam.access_control import IAMPolicyStatement, PermissionResult

_CONTEXT: Final = {"aws:securetransport": "true", "s3:tlsversion": "1.3"}

_TESTS: Final[dict[str, Callable[[str, str], bool]]] = {
    "Bool": lambda found, desired: found == desired.lower(),
    "NumericLessThan": lambda found, desired: float(found) < float(desired),
    "StringEquals": lambda found, desired: found == desired,
    "StringLike": fnmatchcase,
    "StringNotEquals": lambda found, desired: found != desired,
}


def holds(condition: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a statement with this condition applies to our requests."""
    return all(_is_met(operator, key, desired) for operator, keys in condition.items() for key, desired in keys.items())


def _is_met(operator: str, key: str, desired: Any) -> bool:
    found, test = _CONTEXT.get(key.lower()), _TESTS.get(operator.removesuffix("IfExists"))
    if found is None or test is None:
        return found is None and operator.endswith("IfExists")
    values = [str(entry) for entry in (desired if isinstance(desired, list) else [desired])]
    return any(test(found, value) for value in values)


def apply() -> None:
    stock = IAMPolicyStatement.is_action_permitted

    def is_action_permitted(self: Any, *args: Any, **kwargs: Any) -> PermissionResult:
        condition = self._statement.get("Condition")
        if condition is None:
            return stock(self, *args, **kwargs)
        if not holds(condition):
            return PermissionResult.NEUTRAL
        plain = IAMPolicyStatement({name: value for name, value in self._statement.items() if name != "Condition"})
        return stock(plain, *args, **kwargs)

    IAMPolicyStatement.is_action_permitted = is_action_permitted
