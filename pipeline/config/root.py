"""The whole file."""

from pydantic import Field

from pipeline.config.fleets import Fleet
from pipeline.config.models import Model
from pipeline.config.sections import Build, Project, Rollout, Signing, Verify
from pipeline.config.store import Store
from pipeline.config.table import Table


class Config(Table):
    """nxpipe.toml: the one description that the command, the stacks and the fleets read."""

    project: Project = Field(description="What the file describes, and where it is deployed.")
    store: Store = Field(default_factory=Store, description="Where artifacts are kept.")
    models: tuple[Model, ...] = Field(default=(), strict=False, description="What is compiled.")
    fleets: tuple[Fleet, ...] = Field(default=(), strict=False, description="What runs where.")
    rollout: Rollout = Field(default_factory=Rollout, description="How traffic moves to a new version.")
    build: Build = Field(default_factory=Build, description="How the models are compiled.")
    verify: Verify = Field(default_factory=Verify, description="When an artifact is near enough to PyTorch.")
    signing: Signing = Field(default_factory=Signing, description="Who vouches for an artifact.")
