"""The tables about the AWS account: network, budget, AMIs, alarms, GitHub roles, jobs on Batch, accepted findings."""

from datetime import date, timedelta
from ipaddress import ip_network
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from nxpipe.pipeline.config.capacity import NEVER_SPOT, ServingType
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
    Sdk,
    Slug,
    Subnet,
    Vpc,
    Zone,
    duration,
)
from nxpipe.pipeline.config.schema import Absent, Table, Unit, one_of, refuse, text

_KIND = "The network of the instances and its egress."


def divisible(cidr: str) -> str:
    """Check EC2's bounds for a VPC and for its subnets, each a sixteenth of it."""
    if not 16 <= ip_network(cidr).prefixlen <= 24:
        raise refuse('a block from /16 to /24, such as "10.20.0.0/16"; each zone gets a sixteenth of it')
    return cidr


_Divided = Annotated[
    Cidr,
    AfterValidator(divisible),
    Field(description="The address range of the network.", examples=["10.20.0.0/16"]),
]
_Zones = Annotated[
    tuple[Zone, ...] | None,
    Field(strict=False, min_length=1, max_length=6),
    DISTINCT,
    Absent("the region's a and b"),
    Field(
        description="The availability zones with a subnet; append new ones at the end.",
        examples=[["us-east-2a", "us-east-2b"]],
    ),
]


class ClosedNetwork(Table):
    """A VPC without internet access: AWS services are reached through VPC endpoints."""

    kind: Literal["closed"] = Field(default="closed", description=_KIND, examples=["closed"])
    cidr: _Divided = "10.20.0.0/16"
    zones: _Zones = None


class NatNetwork(Table):
    """A VPC with outbound internet access through a NAT gateway in each zone."""

    kind: Literal["nat"] = Field(description=_KIND, examples=["nat"])
    cidr: _Divided = "10.20.0.0/16"
    zones: _Zones = None


class ExistingSubnet(Table):
    """An existing subnet."""

    zone: Zone = Field(description="The availability zone.", examples=["us-east-2a"])
    id: Subnet = Field(description="The id of the subnet.", examples=["subnet-0a1b2c3d4e5f60718"])


class ExistingNetwork(Table):
    """An existing VPC with its own routes and endpoints; its egress is not checked."""

    kind: Literal["existing"] = Field(description=_KIND, examples=["existing"])
    vpc: Vpc = Field(description="The id of the VPC.", examples=["vpc-0a1b2c3d4e5f60718"])
    cidr: Cidr = Field(description="The address range of the VPC.", examples=["10.20.0.0/16"])
    subnets: Annotated[tuple[ExistingSubnet, ...], LIST] = Field(
        description="The subnets of the instances, one per zone, as `[[network.subnets]]`."
    )


Network: TypeAlias = Annotated[ClosedNetwork | NatNetwork | ExistingNetwork, Field(discriminator="kind")]


class Budget(Table):
    """The cost limit of the project."""

    monthly: Annotated[int | None, Field(ge=1), Unit("US dollars"), Absent("no limit")] = Field(
        default=None,
        description="The monthly limit for all fleets at their desired sizes. Synthesis fails above it, and "
        "an alarm fires on actual costs.",
        examples=[20000],
    )


_Ami = Annotated[str, text("ami-[0-9a-f]{8,17}", 'the id of an AMI, such as "ami-0a1b2c3d4e5f60718"')]
_Owner = Annotated[
    str, text("self|amazon|[0-9]{12}", '"self", "amazon", or an AWS account in quotes, such as "123456789012"')
]
_Minor = Annotated[str, text(r"[0-9]+\.[0-9]+", 'a version in quotes, such as "3.12"')]


class Amis(Table):
    """The AMIs of instances."""

    sdk: Annotated[tuple[Sdk, ...], LIST, DISTINCT] = Field(
        default=("2.32.0",),
        description="The versions of the Neuron SDK in use. AMIs have the first version; each version has a "
        "part of the cluster's compile cache. Keep a replaced version until no instance uses it.",
        examples=[["2.33.0", "2.32.0"]],
    )
    image: Annotated[_Ami | None, Absent("AWS's multi-framework Neuron DLAMI")] = Field(
        default=None,
        description="An AMI for serving fleets in place of AWS's, in the project's region and with the first version "
        "in `sdk`. `nxpipe ami lock` checks it.",
        examples=["ami-0a1b2c3d4e5f60718"],
    )
    owner: Annotated[_Owner | None, Absent("no `image`")] = Field(
        default=None,
        description='The account that must own `image`; "self" is the account of the credentials.',
        examples=["self"],
    )
    python: Annotated[_Minor | None, Absent("that of the operating system that `image` or its base names")] = Field(
        default=None,
        description="The version of `python3` in `image`, for the agent; set it together with `glibc`.",
        examples=["3.12"],
    )
    glibc: Annotated[_Minor | None, Absent("that of the operating system that `image` or its base names")] = Field(
        default=None, description="The version of the C library in `image`.", examples=["2.39"]
    )
    lock: Folder = Field(
        default="nxpipe.amis.lock",
        description="The lock file of `nxpipe ami lock`, with one AMI per region and kind. A relative path "
        "starts at this file.",
        examples=["nxpipe.amis.lock"],
    )

    @model_validator(mode="after")
    def _check_image(self) -> Self:
        for one, other in (("image", "owner"), ("python", "glibc")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                absent = one if getattr(self, one) is None else other
                raise refuse(f"both of {one} and {other}, or neither", found=f"no {absent}")
        if self.python is not None and self.image is None:
            raise refuse("python and glibc only beside the image that they describe", found="no image")
        return self


# The values that PutRetentionPolicy accepts.
_RETENTIONS: Final = (
    1,
    3,
    5,
    7,
    14,
    30,
    60,
    90,
    120,
    150,
    180,
    365,
    400,
    545,
    731,
    1096,
    1827,
    2192,
    2557,
    2922,
    3288,
    3653,
)


class Observe(Table):
    """The notification of alarms, and the logs of fleets."""

    emails: Annotated[tuple[Email, ...], MAYBE_EMPTY, DISTINCT] = Field(
        default=(), description="The e-mail addresses that receive alarms.", examples=[["oncall@example.com"]]
    )
    log_retention: Annotated[int, Unit("days")] = Field(
        default=90,
        description="The retention of the fleets' log groups: one of the numbers that CloudWatch Logs accepts.",
        examples=[30],
    )

    @field_validator("log_retention")
    @classmethod
    def _accepted(cls, days: int) -> int:
        if days not in _RETENTIONS:
            raise refuse(f"one of {', '.join(map(str, _RETENTIONS))} (days)")
        return days


class Release(Table):
    """The GitHub repository whose jobs may publish artifacts through OpenID Connect, without stored credentials."""

    repository: Annotated[
        str, text("[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", 'a repository such as "OWNER/NAME"', longest=140)
    ] = Field(description="The repository.", examples=["example/models"])
    owner_id: Annotated[int | None, Field(ge=1), Absent("the subject without ids, of older repositories")] = Field(
        default=None,
        description="The numeric id of the repository's owner, for tokens with an immutable subject: those of "
        "repositories that were created or renamed since 2026-07-15. `gh api repos/OWNER/NAME --jq .owner.id` prints "
        "it.",
        examples=[123456],
    )
    repository_id: Annotated[int | None, Field(ge=1), Absent("the subject without ids, of older repositories")] = Field(
        default=None,
        description="The numeric id of the repository; set it together with `owner_id`. "
        "`gh api repos/OWNER/NAME --jq .id` prints it.",
        examples=[456789],
    )
    environment: Annotated[str, text("[A-Za-z0-9_-]+", "the name of a GitHub environment", longest=100)] = Field(
        default="release", description="The GitHub environment of the jobs that may publish.", examples=["release"]
    )
    channels: Annotated[tuple[Slug, ...], MAYBE_EMPTY, DISTINCT] = Field(
        default=("staging", "production"),
        description="The channels that jobs may promote to, each from the GitHub environment of the same name.",
        examples=[["staging", "production"]],
    )
    provider: Annotated[OidcProvider | None, Absent("it is created")] = Field(
        default=None,
        description="The ARN of GitHub's OpenID Connect provider, if the account has one; an account can have"
        " only one.",
        examples=["arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"],
    )

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        if (self.owner_id is None) != (self.repository_id is None):
            absent = "owner_id" if self.owner_id is None else "repository_id"
            raise refuse("both of owner_id and repository_id, or neither", found=f"no {absent}")
        return self

    @property
    def subject(self) -> str:
        """The part of a token's `sub` claim that names the repository.

        Names can be registered again after a repository or an account is deleted; ids are never reused.
        """
        if self.owner_id is None:
            return f"repo:{self.repository}"
        owner, _, name = self.repository.partition("/")
        return f"repo:{owner}@{self.owner_id}/{name}@{self.repository_id}"


class Farm(Table):
    """The build farm in AWS Batch: compile jobs on machines without accelerators."""

    max_vcpus: Annotated[int, Field(ge=4, le=10000)] = Field(
        default=256, description="The maximum number of vCPUs.", examples=[256]
    )
    image: Image = Field(
        description="The container of compile jobs, pinned by digest.",
        examples=[f"123456789012.dkr.ecr.us-east-2.amazonaws.com/nxpipe@sha256:{'0' * 64}"],
    )


class Prove(Table):
    """The queues of `nxpipe prove --on batch` in AWS Batch: one per instance type, which runs one job at a time."""

    image: Image = Field(
        description="The container of the jobs, pinned by digest: nxpipe and the Neuron runtime.",
        examples=[f"123456789012.dkr.ecr.us-east-2.amazonaws.com/prove@sha256:{'0' * 64}"],
    )
    instance_types: Annotated[tuple[ServingType, ...], LIST, DISTINCT] = Field(
        default=("inf2.xlarge", "inf2.8xlarge", "inf2.24xlarge", "inf2.48xlarge"),
        description="The instance types to choose from; a job runs on the smallest that the artifact fits. Few regions "
        "have Trn types, so the default has none.",
        examples=[["inf2.xlarge", "trn1.2xlarge", "trn1.32xlarge"]],
    )
    capacity: Annotated[str, one_of(("on-demand", "spot"))] = Field(
        default="on-demand",
        description="The purchase option. A job whose spot instance is reclaimed starts anew.",
        examples=["spot"],
    )
    time_limit: Annotated[timedelta, duration("5m", "1d")] = Field(
        default=timedelta(hours=1),
        description="The maximum duration of a job, after which AWS Batch ends it.",
        examples=["2h"],
    )
    sdk: Annotated[Sdk | None, Absent("the first version in [amis]")] = Field(
        default=None,
        description="The Neuron SDK of the container. The driver of the locked AMI is at least as new.",
        examples=["2.32.0"],
    )

    @field_validator("capacity")
    @classmethod
    def _sold(cls, capacity: str, info: ValidationInfo) -> str:
        unsold = [name for name in info.data.get("instance_types", ()) if name in NEVER_SPOT]
        if capacity == "spot" and unsold:
            raise refuse(f'"on-demand"; EC2 sells no {unsold[0]} on the spot market')
        return capacity


class Acknowledge(Table):
    """An accepted finding of `nxpipe infra lint`, as `[[acknowledge]]`."""

    rule: Annotated[str, text("[A-Za-z0-9][A-Za-z0-9._:-]*", 'the id of a rule such as "NXP-NET-1"', longest=128)] = (
        Field(description="The rule id.", examples=["NXP-NET-1"])
    )
    resource: Annotated[str, text("[!-~]+", "the path of a construct, where * stands for anything", longest=255)] = (
        Field(default="*", description="The resources that it is accepted for.", examples=["search-serve-web/*"])
    )
    reason: Annotated[str, text(r"[^\x00-\x1f]{12,}", "a reason of at least 12 characters", longest=1000)] = Field(
        description="The reason.", examples=["behind the company's own proxy"]
    )
    expires: Day = Field(description="The date from which the finding fails again.", examples=[date(2027, 6, 1)])
