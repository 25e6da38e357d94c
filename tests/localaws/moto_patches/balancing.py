"""Load balancers: a protected one is not deleted, weights are what a listener takes, and a target group tells which
balancers send to it now."""

from typing import Any, Final

from moto.core.responses import ActionResult
from moto.elbv2.exceptions import ELBClientError, LoadBalancerNotFoundError
from moto.elbv2.models import ELBv2Backend, FakeAction, FakeTargetGroup, elbv2_backends
from moto.elbv2.responses import ELBV2Response

from tests.localaws.moto_patches._around import around

_MOST_WEIGHT: Final = 999
_MOST_GROUPS: Final = 5


def _delete_load_balancer(stock: Any, self: ELBv2Backend, arn: str) -> None:
    balancer = self.load_balancers.get(arn)
    if balancer is not None and balancer.attrs.get("deletion_protection.enabled") == "true":
        raise ELBClientError(
            "OperationNotPermitted",
            f"Load balancer '{arn}' cannot be deleted because deletion protection is enabled",
        )
    stock(self, arn)


def _validate_actions(stock: Any, self: ELBv2Backend, actions: list[FakeAction]) -> None:
    stock(self, actions)
    for action in actions:
        groups = action.data.get("ForwardConfig", {}).get("TargetGroups", [])
        if len(groups) > _MOST_GROUPS:
            raise ELBClientError("TooManyTargetGroups", f"A forward action has at most {_MOST_GROUPS} target groups")
        for group in groups:
            if not 0 <= int(group["Weight"]) <= _MOST_WEIGHT:
                raise ELBClientError("ValidationError", f"Weight must be between 0 and {_MOST_WEIGHT}")


def _modify_listener(stock: Any, self: ELBv2Backend, arn: str, *args: Any, **kwargs: Any) -> Any:
    """Moto takes target groups that do not exist here, and only here."""
    actions = kwargs.get("actions") or (args[4] if len(args) > 4 else None) or []
    self._validate_actions([FakeAction(dict(each)) for each in actions])
    return stock(self, arn, *args, **kwargs)


def _modify_target_group(stock: Any, self: ELBV2Response) -> ActionResult:
    told: ActionResult = stock(self)
    if (enabled := self._get_param("HealthCheckEnabled")) is not None:
        group = self.elbv2_backend.target_groups[self._get_param("TargetGroupArn")]
        group.health_check_enabled = enabled
    return told


def _balancers_of(group: FakeTargetGroup) -> list[str]:
    backend = elbv2_backends[group.account_id][group.region_name]
    return [
        balancer.arn
        for balancer in backend.load_balancers.values()
        if any(
            group.arn in backend._get_target_group_arns_from(action.data)
            for listener in balancer.listeners.values()
            for rule in listener.rules.values()
            for action in rule.actions
        )
    ]


def _describe_balancers(stock: Any, self: ELBv2Backend, arns: list[str] | None, names: list[str] | None) -> Any:
    """Moto answers with another balancer for one of several that is not there."""
    there = list(self.load_balancers.values())
    if any(arn not in self.load_balancers for arn in arns or ()):
        raise LoadBalancerNotFoundError()
    if any(name not in {one.name for one in there} for name in names or ()):
        raise LoadBalancerNotFoundError()
    return stock(self, arns, names)


def mend() -> None:
    around(ELBv2Backend, "_validate_actions", _validate_actions)
    around(ELBv2Backend, "delete_load_balancer", _delete_load_balancer)
    around(ELBv2Backend, "describe_load_balancers", _describe_balancers)
    around(ELBv2Backend, "modify_listener", _modify_listener)
    around(ELBV2Response, "modify_target_group", _modify_target_group)
    # moto appends to a list of its own, which nothing ever leaves
    FakeTargetGroup.load_balancer_arns = property(_balancers_of, lambda self, value: None)
