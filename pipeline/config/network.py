"""The network that all fleets of a project are in."""

from ipaddress import ip_network
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from nxpipe.pipeline.config.forms import Absent, refuse
from nxpipe.pipeline.config.kinds import DISTINCT, LIST, Cidr, Subnet, Vpc, Zone
from nxpipe.pipeline.config.table import Table

_KIND = "Where instances are launched, and what they can reach from there."


def divisible(cidr: str) -> str:
    """EC2's bounds for a VPC and, as each subnet is a sixteenth of it, for its subnets."""
    if not 16 <= ip_network(cidr).prefixlen <= 24:
        raise refuse('a block from /16 to /24, such as "10.20.0.0/16": each zone gets a sixteenth of it')
    return cidr


_Divided = Annotated[
    Cidr,
    AfterValidator(divisible),
    Field(description="The addresses of the network.", examples=["10.20.0.0/16"]),
]
_Zones = Annotated[
    tuple[Zone, ...] | None,
    Field(strict=False, min_length=1, max_length=6),
    DISTINCT,
    Absent("the region's a and b"),
    Field(
        description="The availability zones that have a subnet; a new one goes to the end.",
        examples=[["us-east-2a", "us-east-2b"]],
    ),
]


class ClosedNetwork(Table):
    """A network without a way out: AWS's services are reached by endpoints, nothing else is reached at all."""

    kind: Literal["closed"] = Field(default="closed", description=_KIND, examples=["closed"])
    cidr: _Divided = "10.20.0.0/16"
    zones: _Zones = None


class NatNetwork(Table):
    """A network whose instances reach the internet through a NAT gateway in each zone, and are not reached from it."""

    kind: Literal["nat"] = Field(description=_KIND, examples=["nat"])
    cidr: _Divided = "10.20.0.0/16"
    zones: _Zones = None


class ExistingSubnet(Table):
    """A subnet that exists already."""

    zone: Zone = Field(description="Its availability zone.", examples=["us-east-2a"])
    id: Subnet = Field(description="The subnet.", examples=["subnet-0a1b2c3d4e5f60718"])


class ExistingNetwork(Table):
    """A VPC that exists already, with its routes and endpoints: what it lets through is not checked."""

    kind: Literal["existing"] = Field(description=_KIND, examples=["existing"])
    vpc: Vpc = Field(description="The VPC.", examples=["vpc-0a1b2c3d4e5f60718"])
    cidr: Cidr = Field(description="The addresses of the VPC.", examples=["10.20.0.0/16"])
    subnets: Annotated[tuple[ExistingSubnet, ...], LIST] = Field(
        description="The subnets that instances are launched in, one a zone; each is headed `[[network.subnets]]`."
    )


Network: TypeAlias = Annotated[ClosedNetwork | NatNetwork | ExistingNetwork, Field(discriminator="kind")]
