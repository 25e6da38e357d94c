"""Who carries out a type of resource: by the calls that a user would make, to the same server."""

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
    """One for all: reading a service's description takes longer than a hundred calls."""
    return _client(service, region, os.environ.get("AWS_ENDPOINT_URL"))


@cache
def _client(service: str, region: str, _address: str | None) -> Any:
    return boto3.client(service, region_name=region)


@dataclass(frozen=True)
class Made:
    """A resource that exists. Attributes are what GetAtt reads; what is kept is for its provider alone."""

    id: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """Where a resource is to be, and what its stack says of it."""

    account: str
    region: str
    partition: str
    stack: str
    logical: str
    policies: Mapping[str, Any] = field(default_factory=dict)
    begun: list[Made] = field(default_factory=list)

    def begin(self, made: Made) -> None:
        """It is there now, if not yet as wanted: should the rest fail, it is to be removed."""
        self.begun.append(made)

    def client(self, service: str) -> Any:
        return client_of(service, self.region)

    def name(self, longest: int, *, lower: bool = False, between: str = "-") -> str:
        """For a resource that has none: the stack, the logical name, and something that nobody else has."""
        ending = "".join(secrets.choice(string.ascii_uppercase + string.digits) for _ in range(12))
        begin = f"{self.stack}-{self.logical}"[: longest - 13].replace("-", between)
        found = f"{begin}{between}{ending}"
        return found.lower() if lower else found

    def arn(self, service: str, resource: str) -> str:
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"


class Provider:
    """Of one type. A property that is not listed fails the deployment: nothing is dropped in silence."""

    type: ClassVar[str]
    properties: ClassVar[frozenset[str]] = frozenset()
    fixed: ClassVar[frozenset[str]] = frozenset()  # whose change makes a new resource

    def create(self, wanted: Properties, at: Site) -> Made:
        raise NotImplementedError

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        changed = sorted(name for name in {*before, *wanted} if before.get(name) != wanted.get(name))
        raise Refused(f"{self.type} cannot be changed in place: {', '.join(changed)}")

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        raise NotImplementedError

    def read(self, made: Made, at: Site) -> Properties:
        """The properties as the service tells them, for the census."""
        raise NotImplementedError


PROVIDERS: Final[dict[str, Provider]] = {}


def provides(kind: type[Provider]) -> type[Provider]:
    PROVIDERS[kind.type] = kind()
    return kind


def provider_of(type_: str, properties: Properties) -> Provider:
    """Who carries out all of this, or a refusal that names what nobody does."""
    found = PROVIDERS.get(type_)
    if found is None:
        raise Refused(f"the local AWS has no provider for {type_}")
    if unknown := sorted(set(properties) - found.properties):
        raise Refused(f"the local AWS does not carry out {', '.join(unknown)} of {type_}")
    return found
