"""Rules of security groups tell their own descriptions, and what others still need is not deleted.

Moto lets a VPC go while gateways, endpoints and groups are in it, and keeps those for ever; then nobody learns that a
stack removes things in an order that AWS refuses.
"""

from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.exceptions import DependencyViolationError, InvalidSecurityGroupNotFoundError
from moto.ec2.models import EC2Backend
from moto.ec2.models.security_groups import SecurityGroup, SecurityGroupRule
from moto.ec2.responses import EC2Response
from moto.elbv2 import elbv2_backends

from tests.localaws.moto_patches._around import around


def _description(self: SecurityGroupRule) -> str | None:
    """Moto reads that of addresses only."""
    found: str | None = self.ip_range.get("Description") or self.source_group.get("Description")
    return found


def _describe_rules(stock: Any, self: EC2Response) -> ActionResult:
    """By the ids of the rules, which is exact; moto goes by their ends, and changes the rules of other ports, too."""
    told = self._get_param("SecurityGroupRuleDescriptions", [])
    if not told:
        passed: ActionResult = stock(self)
        return passed
    group = self.ec2_backend.get_security_group_from_id(self._get_param("GroupId"))
    if group is None:
        raise InvalidSecurityGroupNotFoundError(self._get_param("GroupId"))
    for each in told:
        rule = group.get_rule(each["SecurityGroupRuleId"])
        end = rule.ip_range or rule.source_group
        end["Description"] = each.get("Description", "")
    return ActionResult({"Return": True})


def _modify_endpoint(stock: Any, self: EC2Response) -> ActionResult:
    """With the routes of a gateway, which moto makes with an endpoint and then neither adds nor takes away."""
    endpoint = self.ec2_backend.vpc_end_points[self._get_param("VpcEndpointId")]
    before = set(endpoint.route_table_ids or ())
    told: ActionResult = stock(self)
    after, block = set(endpoint.route_table_ids or ()), endpoint.destination_prefix_list_id
    for table in sorted(after - before) if block else ():
        self.ec2_backend.create_route(table, None, gateway_id=endpoint.id, destination_prefix_list_id=block)
    for table in sorted(before - after) if block else ():
        self.ec2_backend.delete_route(table, block)
    if (private := self._get_param("PrivateDnsEnabled")) is not None:
        endpoint.private_dns_enabled = private
    if self._get_param("ResetPolicy"):
        endpoint.policy_document = None
    return told


def _needed(what: str, by: list[str]) -> None:
    if by:
        raise DependencyViolationError(f"{what} has dependencies and cannot be deleted: {', '.join(sorted(by))}")


def _delete_group(stock: Any, self: EC2Backend, name: str | None = None, group_id: str | None = None) -> None:
    group = self.get_security_group_from_id(group_id) if group_id else None
    if group is not None:
        others = [one for one in self.describe_security_groups() if one.id != group_id]
        instances = (one for one in self.all_instances() if one.state != "terminated")
        by = [one.id for one in others if _names(one, group.id)]
        by += [one.id for one in instances if any(group.id == each.id for each in one.security_groups)]
        by += [one.name for one in _balancers(self) if group.id in one.security_groups]
        _needed(f"resource {group_id}", by)
    stock(self, name, group_id)


def _names(one: SecurityGroup, group: str) -> bool:
    return any(rule.source_group.get("GroupId") == group for rule in [*one.ingress_rules, *one.egress_rules])


def _delete_subnet(stock: Any, self: EC2Backend, subnet_id: str) -> Any:
    by = [one.id for one in self.all_instances() if one.subnet_id == subnet_id and one.state != "terminated"]
    by += [one.name for one in _balancers(self) if any(each.id == subnet_id for each in one.subnets)]
    by += [one.id for one in self.nat_gateways.values() if one.subnet_id == subnet_id and one.state == "available"]
    by += [one.id for one in _endpoints(self) if subnet_id in (one.subnet_ids or [])]
    _needed(f"The subnet '{subnet_id}'", by)
    return stock(self, subnet_id)


def _delete_vpc(stock: Any, self: EC2Backend, vpc_id: str) -> Any:
    by = [one.id for one in self.describe_internet_gateways(filters={"attachment.vpc-id": [vpc_id]})]
    by += [one.id for one in _endpoints(self) if one.vpc_id == vpc_id]
    by += [one.id for one in self.describe_security_groups() if one.vpc_id == vpc_id and one.name != "default"]
    _needed(f"The vpc '{vpc_id}'", by)
    return stock(self, vpc_id)


def _endpoints(backend: EC2Backend) -> list[Any]:
    return [one for one in backend.vpc_end_points.values() if one.state != "deleted"]


def _balancers(backend: EC2Backend) -> list[Any]:
    return list(elbv2_backends[backend.account_id][backend.region_name].load_balancers.values())


def mend() -> None:
    SecurityGroupRule.description = property(_description)
    for way in ("ingress", "egress"):
        around(EC2Response, f"update_security_group_rule_descriptions_{way}", _describe_rules)
    around(EC2Response, "modify_vpc_endpoint", _modify_endpoint)
    around(EC2Backend, "delete_security_group", _delete_group)
    around(EC2Backend, "delete_subnet", _delete_subnet)
    around(EC2Backend, "delete_vpc", _delete_vpc)
