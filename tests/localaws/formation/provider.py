"""Providers: each deploys one type of resource with the boto3 calls that a user would make, to the same server."""

import os
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Final, TypeAlias

import boto3

from tests.localaws.formation.faults import Refused

Properties: TypeAlias = Mapping[str, Any]


def client_of(service: str, region: str) -> Any:
    """A cached client: loading a service description takes longer than a hundred calls."""
    return _client(service, region, os.environ.get("AWS_ENDPOINT_URL"))


@cache
def _client(service: str, region: str, _address: str | None) -> Any:
    return boto3.client(service, region_name=region)


@dataclass(frozen=True)
class PhysicalResource:
    """A resource that exists. `attributes` are the values for GetAtt; `state` is private to its provider."""

    id: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """The location of a resource, and what its stack declares about it."""

    account: str
    region: str
    partition: str
    stack: str
    logical: str
    policies: Mapping[str, Any] = field(default_factory=dict)
    begun: list[PhysicalResource] = field(default_factory=list)

    def begin(self, resource: PhysicalResource) -> None:
        """Record a resource that exists but is incomplete; it is removed if the rest of its creation fails."""
        self.begun.append(resource)

    def client(self, service: str) -> Any:
        return client_of(service, self.region)

    def name(self, longest: int, *, lower: bool = False, between: str = "-") -> str:
        """A name for a resource without one: stack, logical name and a random suffix."""
        ending = "".join(secrets.choice(string.ascii_uppercase + string.digits) for _ in range(12))
        begin = f"{self.stack}-{self.logical}"[: longest - 13].replace("-", between)
        result = f"{begin}{between}{ending}"
        return result.lower() if lower else result

    def arn(self, service: str, resource: str) -> str:
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"


class Provider:
    """The provider of one type. A property that is not listed fails the deployment; no property is dropped."""

    type: ClassVar[str]
    properties: ClassVar[frozenset[str]] = frozenset()
    fixed: ClassVar[frozenset[str]] = frozenset()  # properties whose change replaces the resource

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        raise NotImplementedError

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        changed = sorted(name for name in {*before, *desired} if before.get(name) != desired.get(name))
        raise Refused(f"{self.type} cannot be changed in place: {', '.join(changed)}")

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        raise NotImplementedError

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        """The properties as the service returns them, for the census."""
        raise NotImplementedError


PROVIDERS: Final[dict[str, Provider]] = {}


def provides(kind: type[Provider]) -> type[Provider]:
    PROVIDERS[kind.type] = kind()
    return kind


def provider_of(type_: str, properties: Properties) -> Provider:
    """The provider that supports all of these properties; raises Refused with the names of those without support."""
    provider = PROVIDERS.get(type_)
    if provider is None:
        raise Refused(f"the local AWS has no provider for {type_}")
    if unknown := sorted(set(properties) - provider.properties):
        raise Refused(f"the local AWS does not support {', '.join(unknown)} of {type_}")
    return provider
