"""The whole file."""

from typing import Annotated

from pydantic import Field

from nxpipe.pipeline.config.cloud import Acknowledge, Amis, Budget, ClosedNetwork, Farm, Network, Observe, Release
from nxpipe.pipeline.config.cluster import Cluster
from nxpipe.pipeline.config.endpoints import ModelEndpoint
from nxpipe.pipeline.config.fleets import Fleet
from nxpipe.pipeline.config.models import Model
from nxpipe.pipeline.config.schema import Absent, Table
from nxpipe.pipeline.config.sections import Build, Project, Rollout, Signing, Verify
from nxpipe.pipeline.config.store import Store


class Config(Table):
    """nxpipe.toml: the one description that the command, the stacks and the fleets read."""

    project: Project = Field(description="What the file describes, and where it is deployed.")
    store: Store = Field(default_factory=Store, description="Where artifacts are kept.")
    models: tuple[Model, ...] = Field(default=(), strict=False, description="What is compiled.")
    fleets: tuple[Fleet, ...] = Field(default=(), strict=False, description="What runs where.")
    endpoints: tuple[ModelEndpoint, ...] = Field(
        default=(), strict=False, description="What SageMaker runs, instead of instances of our own."
    )
    network: Network = Field(default_factory=ClosedNetwork, description="Where the fleets are.")
    rollout: Rollout = Field(default_factory=Rollout, description="How traffic moves to a new version.")
    build: Build = Field(default_factory=Build, description="How the models are compiled.")
    verify: Verify = Field(default_factory=Verify, description="When an artifact is near enough to PyTorch.")
    signing: Signing = Field(default_factory=Signing, description="Who vouches for an artifact.")
    budget: Budget = Field(default_factory=Budget, description="What the project may cost.")
    amis: Amis = Field(default_factory=Amis, description="The machine images that instances start from.")
    observe: Observe = Field(default_factory=Observe, description="Who hears of alarms.")
    release: Annotated[Release | None, Absent("no role for GitHub is made")] = Field(
        default=None, description="The GitHub repository that may publish."
    )
    farm: Annotated[Farm | None, Absent("no machines to compile on are made")] = Field(
        default=None, description="Machines that compile."
    )
    cluster: Annotated[Cluster | None, Absent("no cluster is made")] = Field(
        default=None, description="Kubernetes beside the fleets, or in their place."
    )
    acknowledge: tuple[Acknowledge, ...] = Field(
        default=(), strict=False, description="Findings of the guards that are accepted."
    )
