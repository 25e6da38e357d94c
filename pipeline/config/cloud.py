"""The network that all fleets of a project are in."""

from datetime import date
from ipaddress import ip_network
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from nxpipe.pipeline.config.kinds import (
    DISTINCT,
    LIST,
    MAYBE_EMPTY,
    Cidr,
    Day,
    Email,
    Folder,
    Image,
    OidcProvider,
    Slug,
    Subnet,
    Vpc,
    Zone,
)
from nxpipe.pipeline.config.schema import Absent, Table, Unit, refuse, text

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


_Sdk = Annotated[str, text("[0-9]+(?:\\.[0-9]+){1,3}", 'a version of the Neuron SDK such as "2.32.0"', longest=32)]


class Budget(Table):
    """What the project may cost."""

    monthly: Annotated[int | None, Field(ge=1), Unit("US dollars"), Absent("no limit")] = Field(
        default=None,
        description="A month of all fleets at their desired sizes. What is over it is not synthesised, and an alarm "
        "tells of real costs.",
        examples=[20000],
    )


class Amis(Table):
    """The machine images that instances start from."""

    sdk: Annotated[tuple[_Sdk, ...], LIST, DISTINCT] = Field(
        default=("2.32.0",),
        description="The versions of the Neuron SDK in use: the images are of the first, and each has a part of the "
        "compile cache. One that was replaced stays in the list until no instance of it is left.",
        examples=[["2.33.0", "2.32.0"]],
    )
    lock: Folder = Field(
        default="nxpipe.amis.lock",
        description="The file that `nxpipe ami lock` writes: one image for each region and kind. A relative path "
        "starts at this file.",
        examples=["nxpipe.amis.lock"],
    )


class Observe(Table):
    """Who hears of alarms."""

    emails: Annotated[tuple[Email, ...], MAYBE_EMPTY, DISTINCT] = Field(
        default=(), description="Addresses that alarms are sent to.", examples=[["oncall@example.com"]]
    )


class Release(Table):
    """The GitHub repository whose jobs may publish artifacts, without a stored key."""

    repository: Annotated[
        str, text("[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", 'a repository such as "OWNER/NAME"', longest=140)
    ] = Field(description="The repository.", examples=["example/models"])
    environment: Annotated[str, text("[A-Za-z0-9_-]+", "the name of a GitHub environment", longest=100)] = Field(
        default="release", description="The environment of the jobs that may publish.", examples=["release"]
    )
    channels: Annotated[tuple[Slug, ...], MAYBE_EMPTY, DISTINCT] = Field(
        default=("staging", "production"),
        description="The channels that jobs may promote to, each in the environment of its name.",
        examples=[["staging", "production"]],
    )
    provider: Annotated[OidcProvider | None, Absent("it is made")] = Field(
        default=None,
        description="GitHub's OpenID Connect provider, when the account has it already: there is room for one.",
        examples=["arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"],
    )


class Farm(Table):
    """Machines without accelerators that compile: AWS Batch."""

    max_vcpus: Annotated[int, Field(ge=4, le=10000)] = Field(
        default=256, description="How many virtual processors compile at once at most.", examples=[256]
    )
    image: Image = Field(
        description="The container that runs `nxpipe build`, by its digest.",
        examples=[f"123456789012.dkr.ecr.us-east-2.amazonaws.com/nxpipe@sha256:{'0' * 64}"],
    )


class Acknowledge(Table):
    """A finding of the guards that is accepted; each is headed `[[acknowledge]]`."""

    rule: Annotated[str, text("[A-Za-z0-9][A-Za-z0-9._:-]*", 'the id of a rule such as "NXP-NET-1"', longest=128)] = (
        Field(description="The rule.", examples=["NXP-NET-1"])
    )
    resource: Annotated[str, text("[!-~]+", "the path of a construct, where * stands for anything", longest=255)] = (
        Field(default="*", description="What it is accepted for.", examples=["search-serve-web/*"])
    )
    reason: Annotated[str, text(r"[^\x00-\x1f]{12,}", "a reason of at least 12 characters", longest=1000)] = Field(
        description="Why it is accepted.", examples=["behind the company's own proxy"]
    )
    expires: Day = Field(description="From when on it is not accepted any more.", examples=[date(2027, 6, 1)])
