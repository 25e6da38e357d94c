"""The root of nxpipe.toml: one field per table; and its serving fleets by name."""

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field

from nxpipe.pipeline.config.cloud import Acknowledge, Amis, Budget, ClosedNetwork, Farm, Network, Observe, Release
from nxpipe.pipeline.config.cluster import Cluster
from nxpipe.pipeline.config.endpoints import ModelEndpoint
from nxpipe.pipeline.config.kinds import Slug
from nxpipe.pipeline.config.models import Model
from nxpipe.pipeline.config.schema import Absent, NamedTables, Table
from nxpipe.pipeline.config.sections import Build, ChannelRules, Project, Rollout, Signing, Verify
from nxpipe.pipeline.config.serving_fleet import ServingFleet
from nxpipe.pipeline.config.store import Store
from nxpipe.pipeline.config.training_fleet import TrainingFleet
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.text import did_you_mean

Fleet: TypeAlias = Annotated[ServingFleet | TrainingFleet, Field(discriminator="kind")]


class Config(Table):
    """nxpipe.toml, which the commands, the stacks and the fleets read."""

    project: Project = Field(description="The project and its deployment.")
    store: Store = Field(default_factory=Store, description="The artifact store.")
    models: tuple[Model, ...] = Field(default=(), strict=False, description="The models to compile.")
    fleets: tuple[Fleet, ...] = Field(default=(), strict=False, description="The fleets of instances.")
    endpoints: tuple[ModelEndpoint, ...] = Field(default=(), strict=False, description="The SageMaker endpoints.")
    network: Network = Field(default_factory=ClosedNetwork, description="The network of the fleets.")
    rollout: Rollout = Field(default_factory=Rollout, description="Canary rollouts.")
    build: Build = Field(default_factory=Build, description="The compilation of models.")
    verify: Verify = Field(default_factory=Verify, description="The thresholds of verification.")
    channels: Annotated[dict[Slug, ChannelRules], AfterValidator(NamedTables)] = Field(
        default_factory=NamedTables, description="The rules of channels."
    )
    signing: Signing = Field(default_factory=Signing, description="Signatures of artifacts and of channels.")
    budget: Budget = Field(default_factory=Budget, description="The cost limit of the project.")
    # The defaults are valid by themselves: a command without AMIs does not run the rules of [amis].
    amis: Amis = Field(default_factory=Amis.model_construct, description="The AMIs of instances.")
    observe: Observe = Field(default_factory=Observe, description="The notification of alarms.")
    release: Annotated[Release | None, Absent("no role for GitHub is created")] = Field(
        default=None, description="The GitHub repository that may publish."
    )
    farm: Annotated[Farm | None, Absent("no build farm is created")] = Field(
        default=None, description="The build farm."
    )
    cluster: Annotated[Cluster | None, Absent("no cluster is created")] = Field(
        default=None, description="An EKS cluster."
    )
    acknowledge: tuple[Acknowledge, ...] = Field(
        default=(), strict=False, description="The accepted findings of `nxpipe infra lint`."
    )


def serving_fleets(config: Config) -> dict[str, ServingFleet]:
    return {fleet.name: fleet for fleet in config.fleets if isinstance(fleet, ServingFleet)}


def serving_fleet(config: Config, name: str, option: str) -> ServingFleet:
    """The fleet of that name; `option` is the option or argument that holds it."""
    fleets = serving_fleets(config)
    if name not in fleets:
        hint = did_you_mean(name, fleets) or f"; there are {', '.join(fleets) or 'none'}"
        raise InputInvalid(f"{option}: nxpipe.toml has no serving fleet {name!r}{hint}")
    return fleets[name]
