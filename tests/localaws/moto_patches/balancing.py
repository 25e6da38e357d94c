"""Load balancers: deletion protection, validation of weights, and the current balancers of a target group."""

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
    """Refuse target groups that do not exist; moto does so in all other calls."""
    actions = kwargs.get("actions") or (args[4] if len(args) > 4 else None) or []
    self._validate_actions([FakeAction(dict(action)) for action in actions])
    return stock(self, arn, *args, **kwargs)


def _modify_target_group(stock: Any, self: ELBV2Response) -> ActionResult:
    result: ActionResult = stock(self)
    if (enabled := self._get_param("HealthCheckEnabled")) is not None:
        group = self.elbv2_backend.target_groups[self._get_param("TargetGroupArn")]
        group.health_check_enabled = enabled
    return result


def _set_security_groups(stock: Any, self: ELBV2Response) -> ActionResult:
    """Keep whether the rules apply to PrivateLink; they do unless it is set to "off"."""
    result: ActionResult = stock(self)
    balancer = self.elbv2_backend.load_balancers[self._get_param("LoadBalancerArn")]
    setting = self._get_param("EnforceSecurityGroupInboundRulesOnPrivateLinkTraffic")
    if setting is not None:
        balancer.enforce_security_group_inbound_rules_on_private_link_traffic = setting
    return result


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
    """Raise if one of several balancers does not exist; moto returns another one for it."""
    existing = list(self.load_balancers.values())
    if any(arn not in self.load_balancers for arn in arns or ()):
        raise LoadBalancerNotFoundError()
    if any(name not in {entry.name for entry in existing} for name in names or ()):
        raise LoadBalancerNotFoundError()
    return stock(self, arns, names)


def apply() -> None:
    around(ELBv2Backend, "_validate_actions", _validate_actions)
    around(ELBv2Backend, "delete_load_balancer", _delete_load_balancer)
    around(ELBv2Backend, "describe_load_balancers", _describe_balancers)
    around(ELBv2Backend, "modify_listener", _modify_listener)
    around(ELBV2Response, "set_security_groups", _set_security_groups)
    around(ELBV2Response, "modify_target_group", _modify_target_group)
    # moto only ever appends to its own list
    FakeTargetGroup.load_balancer_arns = property(_balancers_of, lambda self, value: None)
