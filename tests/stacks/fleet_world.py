"""A project with one serving fleet, from its nxpipe.toml to its stacks."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from aws_cdk import RemovalPolicy

from nxpipe.pipeline.config import Config, ServingFleet, load_config
from nxpipe.stacks.network import NetworkStack
from nxpipe.stacks.serving.stack import ServeStack, Software
from nxpipe.stacks.storage import StoreStack
from tests.stacks.local import HERE, new_app, template_of

IMAGE: Final = "ami-0123456789abcdef0"
OTHER_IMAGE: Final = "ami-0fedcba9876543210"
CERTIFICATE: Final = "arn:aws:acm:us-east-2:123456789012:certificate/0a1b2c3d"
SIZE: Final = "{ min = 1, desired = 2, max = 4 }"
_CONFIG: Final = """
[project]
name = "demo"
region = "us-east-2"
account = "123456789012"
[[models]]
name = "bert"
id = "acme/bert"
task = "fill-mask"
target = "{target}"
[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "production"
instance_types = {types}
capacity = {capacity}
size = {size}
{more}
"""


def configured(
    folder: Path,
    *,
    types: tuple[str, ...] = ("inf2.xlarge",),
    capacity: str = '{ kind = "on-demand" }',
    more: str = 'command = ["server"]',
    size: str = SIZE,
) -> Config:
    path = folder / "nxpipe.toml"
    path.write_text(_CONFIG.format(target=types[0], types=json.dumps(types), capacity=capacity, more=more, size=size))
    return load_config(path, {})


@dataclass(frozen=True)
class World:
    network: NetworkStack
    store: StoreStack
    serve: ServeStack

    @property
    def stacks(self) -> tuple[NetworkStack, StoreStack, ServeStack]:
        return (self.network, self.store, self.serve)

    @property
    def template(self) -> dict[str, Any]:
        return template_of(self.serve)

    def of(self, type_: str) -> dict[str, dict[str, Any]]:
        """The properties of all resources of one type, by their logical ids."""
        found = self.template["Resources"].items()
        return {id_: value["Properties"] for id_, value in found if value["Type"] == type_}


def world(config: Config, folder: Path, *, image: str = IMAGE, agent: str = "a" * 64) -> World:
    app = new_app()
    (fleet,) = config.fleets
    assert isinstance(fleet, ServingFleet)
    project = config.project.name
    network = NetworkStack(
        app, "demo-network", project=project, network=config.network, zones=("us-east-2a", "us-east-2b"), env=HERE
    )
    store = StoreStack(app, "demo-storage", project=project, removal_policy=RemovalPolicy.DESTROY, env=HERE)
    serve = ServeStack(
        app,
        "demo-serve-search",
        config=config,
        fleet=fleet,
        software=Software(image=image, root_device="/dev/sda1", agent=agent, folder=folder),
        network=network.handle,
        store=store.handle,
        prefix="models/",
        env=HERE,
    )
    return World(network, store, serve)


@cache
def read_only(**asked: Any) -> World:
    """A world for reading templates, shared by all tests with equal arguments; no test may add to it."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        return world(configured(folder, **asked), folder)
