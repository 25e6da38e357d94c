"""EC2 networks: security group rules have their own descriptions, and a resource in use is not deleted.

Moto deletes a VPC that has gateways, endpoints and groups, and keeps those; a wrong order of removal would go
unnoticed.
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
    """The description of a rule; moto has it for addresses only."""
    description: str | None = self.ip_range.get("Description") or self.source_group.get("Description")
    return description


def _describe_rules(stock: Any, self: EC2Response) -> ActionResult:
    """Set descriptions by rule id; moto selects by peer, and changes the rules of other ports, too."""
    descriptions = self._get_param("SecurityGroupRuleDescriptions", [])
    if not descriptions:
        passed: ActionResult = stock(self)
        return passed
    group = self.ec2_backend.get_security_group_from_id(self._get_param("GroupId"))
    if group is None:
        raise InvalidSecurityGroupNotFoundError(self._get_param("GroupId"))
    for description in descriptions:
        rule = group.get_rule(description["SecurityGroupRuleId"])
        end = rule.ip_range or rule.source_group
        end["Description"] = description.get("Description", "")
    return ActionResult({"Return": True})


def _modify_endpoint(stock: Any, self: EC2Response) -> ActionResult:
    """Modify an endpoint with its gateway routes, which moto creates but neither adds to nor removes."""
    endpoint = self.ec2_backend.vpc_end_points[self._get_param("VpcEndpointId")]
    before = set(endpoint.route_table_ids or ())
    result: ActionResult = stock(self)
    after, block = set(endpoint.route_table_ids or ()), endpoint.destination_prefix_list_id
    for table in sorted(after - before) if block else ():
        self.ec2_backend.create_route(table, None, gateway_id=endpoint.id, destination_prefix_list_id=block)
    for table in sorted(before - after) if block else ():
        self.ec2_backend.delete_route(table, block)
    if (private := self._get_param("PrivateDnsEnabled")) is not None:
        endpoint.private_dns_enabled = private
    if self._get_param("ResetPolicy"):
        endpoint.policy_document = None
    return result


def _refuse_if_used(resource: str, users: list[str]) -> None:
    if users:
        raise DependencyViolationError(f"{resource} has dependencies and cannot be deleted: {', '.join(sorted(users))}")


def _delete_group(stock: Any, self: EC2Backend, name: str | None = None, group_id: str | None = None) -> None:
    group = self.get_security_group_from_id(group_id) if group_id else None
    if group is not None:
        groups = [resource for resource in self.describe_security_groups() if resource.id != group_id]
        instances = (resource for resource in self.all_instances() if resource.state != "terminated")
        users = [resource.id for resource in groups if _refers_to(resource, group.id)]
        users += [
            resource.id for resource in instances if any(group.id == member.id for member in resource.security_groups)
        ]
        users += [resource.name for resource in _balancers(self) if group.id in resource.security_groups]
        _refuse_if_used(f"resource {group_id}", users)
    stock(self, name, group_id)


def _refers_to(security_group: SecurityGroup, group: str) -> bool:
    return any(
        rule.source_group.get("GroupId") == group
        for rule in [*security_group.ingress_rules, *security_group.egress_rules]
    )


def _delete_subnet(stock: Any, self: EC2Backend, subnet_id: str) -> Any:
    users = [
        resource.id
        for resource in self.all_instances()
        if resource.subnet_id == subnet_id and resource.state != "terminated"
    ]
    users += [
        resource.name for resource in _balancers(self) if any(subnet.id == subnet_id for subnet in resource.subnets)
    ]
    users += [
        resource.id
        for resource in self.nat_gateways.values()
        if resource.subnet_id == subnet_id and resource.state == "available"
    ]
    users += [resource.id for resource in _endpoints(self) if subnet_id in (resource.subnet_ids or [])]
    _refuse_if_used(f"The subnet '{subnet_id}'", users)
    return stock(self, subnet_id)


def _delete_vpc(stock: Any, self: EC2Backend, vpc_id: str) -> Any:
    users = [resource.id for resource in self.describe_internet_gateways(filters={"attachment.vpc-id": [vpc_id]})]
    users += [resource.id for resource in _endpoints(self) if resource.vpc_id == vpc_id]
    users += [
        resource.id
        for resource in self.describe_security_groups()
        if resource.vpc_id == vpc_id and resource.name != "default"
    ]
    _refuse_if_used(f"The vpc '{vpc_id}'", users)
    return stock(self, vpc_id)


def _endpoints(backend: EC2Backend) -> list[Any]:
    return [endpoint for endpoint in backend.vpc_end_points.values() if endpoint.state != "deleted"]


def _balancers(backend: EC2Backend) -> list[Any]:
    return list(elbv2_backends[backend.account_id][backend.region_name].load_balancers.values())


def apply() -> None:
    SecurityGroupRule.description = property(_description)
    for way in ("ingress", "egress"):
        around(EC2Response, f"update_security_group_rule_descriptions_{way}", _describe_rules)
    around(EC2Response, "modify_vpc_endpoint", _modify_endpoint)
    around(EC2Backend, "delete_security_group", _delete_group)
    around(EC2Backend, "delete_subnet", _delete_subnet)
    around(EC2Backend, "delete_vpc", _delete_vpc)
