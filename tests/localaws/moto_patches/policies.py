"""Conditions of policies. Moto denies wherever a condition is not met, so that "deny what does not come by TLS" denies
everything. A statement whose condition is not met says nothing.

The local server speaks plain HTTP; every request counts as if it had come by TLS 1.3. A condition on anything that is
not known here is not met.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from moto.iam.access_control import IAMPolicyStatement, PermissionResult

_CONTEXT: Final = {"aws:securetransport": "true", "s3:tlsversion": "1.3"}

_TESTS: Final[dict[str, Callable[[str, str], bool]]] = {
    "Bool": lambda found, wanted: found == wanted.lower(),
    "NumericLessThan": lambda found, wanted: float(found) < float(wanted),
    "StringEquals": lambda found, wanted: found == wanted,
    "StringLike": fnmatchcase,
    "StringNotEquals": lambda found, wanted: found != wanted,
}


def holds(condition: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a statement with this condition speaks of our requests."""
    return all(_is_met(operator, key, wanted) for operator, keys in condition.items() for key, wanted in keys.items())


def _is_met(operator: str, key: str, wanted: Any) -> bool:
    found, test = _CONTEXT.get(key.lower()), _TESTS.get(operator.removesuffix("IfExists"))
    if found is None or test is None:
        return found is None and operator.endswith("IfExists")
    values = [str(each) for each in (wanted if isinstance(wanted, list) else [wanted])]
    return any(test(found, each) for each in values)


def mend() -> None:
    stock = IAMPolicyStatement.is_action_permitted

    def is_action_permitted(self: Any, *args: Any, **kwargs: Any) -> PermissionResult:
        condition = self._statement.get("Condition")
        if condition is None:
            return stock(self, *args, **kwargs)
        if not holds(condition):
            return PermissionResult.NEUTRAL
        plain = IAMPolicyStatement({name: each for name, each in self._statement.items() if name != "Condition"})
        return stock(plain, *args, **kwargs)

    IAMPolicyStatement.is_action_permitted = is_action_permitted
