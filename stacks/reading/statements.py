"""The statements of IAM policies that identities have, wherever templates keep them."""

from collections.abc import Iterator
from dataclasses import dataclass

from nxpipe.stacks.reading.template import Properties, Resource, Templates, listed, settings, tables, text

_POLICIES = ("AWS::IAM::ManagedPolicy", "AWS::IAM::Policy", "AWS::IAM::RolePolicy")


@dataclass(frozen=True)
class Statement:
    resource: Resource  # the role or policy that holds it
    place: str
    body: Properties

    @property
    def allows(self) -> bool:
        return self.body.get("Effect") == "Allow"

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(text(each) for each in listed(self.body.get("Action")))

    @property
    def resources(self) -> tuple[str, ...]:
        return tuple(text(each) for each in listed(self.body.get("Resource")))


def statements(all_: Templates) -> Iterator[Statement]:
    for role in all_.of("AWS::IAM::Role"):
        for index, inline in enumerate(tables(role.properties, "Policies")):
            yield from _of(inline, role, f"Policies/{index}/")
    for policy in all_.of(*_POLICIES):
        yield from _of(policy.properties, policy, "")


def _of(holder: Properties, resource: Resource, prefix: str) -> Iterator[Statement]:
    for index, body in enumerate(tables(settings(holder, "PolicyDocument"), "Statement")):
        yield Statement(resource, f"{prefix}PolicyDocument/Statement/{index}", body)


def managed_arns(role: Resource) -> tuple[str, ...]:
    """The managed policies that a role has."""
    return tuple(text(each) for each in listed(role.properties.get("ManagedPolicyArns")))
