"""Fields of serving and of training fleets: names, root volume, sessions."""

from typing import Annotated, Final, TypeAlias

from pydantic import Field, ValidationInfo

from nxpipe.pipeline.config.kinds import Slug
from nxpipe.pipeline.config.schema import Unit, refuse

FleetName = Annotated[Slug, Field(description="The name of the fleet in stacks and commands.", examples=["search"])]
FleetModel = Annotated[Slug, Field(description="The `name` of one of the models.", examples=["bert"])]
FleetChannel = Annotated[
    Slug, Field(description="The channel whose current artifact the fleet runs.", examples=["production"])
]
Sessions = Annotated[
    bool,
    Field(
        description="Allow sessions of Session Manager on the instances, which need no key, no open port and no route "
        "from outside. A closed network gets the endpoints that they need.",
        examples=[True],
    ),
]

# Limits of EBS volumes of type gp3.
_IOPS_PER_GIB: Final = 500
_IOPS_PER_MIB_S: Final = 4
SYSTEM_GIB: Final = 100  # for the image's libraries
LARGEST_GIB: Final = 65536

Iops: TypeAlias = Annotated[
    int,
    Field(ge=3000, le=80000, description="The IOPS of the root volume, at most 500 per GiB.", examples=[6000]),
]
Throughput: TypeAlias = Annotated[
    int,
    Field(
        ge=125,
        le=2000,
        description="The throughput of the root volume, at most a quarter of `iops`.",
        examples=[1000],
    ),
    Unit("MiB/s"),
]


def require_iops_of_the_size(iops: int, info: ValidationInfo) -> int:
    disk: int | None = info.data.get("disk")
    if disk is not None and iops > disk * _IOPS_PER_GIB:
        raise refuse(f"at most {disk * _IOPS_PER_GIB}; EBS allows {_IOPS_PER_GIB} for each GiB of `disk`")
    return iops


def require_throughput_of_the_iops(throughput: int, info: ValidationInfo) -> int:
    iops: int | None = info.data.get("iops")
    if iops is not None and throughput * _IOPS_PER_MIB_S > iops:
        raise refuse(
            f"at most {iops // _IOPS_PER_MIB_S}, or `iops` of at least {throughput * _IOPS_PER_MIB_S}; EBS allows "
            f"1 MiB/s for {_IOPS_PER_MIB_S} IOPS"
        )
    return throughput
