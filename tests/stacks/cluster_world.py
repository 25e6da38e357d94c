"""A project with a cluster, from its configuration to its stacks."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from aws_cdk import RemovalPolicy

from nxpipe.pipeline.config.cloud import ClosedNetwork
from nxpipe.pipeline.config.cluster import Cluster
from nxpipe.pipeline.config.locks import ADDONS, ClusterLock
from nxpipe.stacks.eks import ClusterStack
from nxpipe.stacks.network import NetworkStack
from nxpipe.stacks.storage import CacheStack, StoreStack
from tests.stacks.local import HERE, REGION, new_app

ADMIN: Final = "arn:aws:iam::123456789012:role/platform"
BLOCK: Final[dict[str, Any]] = {
    "kind": "capacity-block",
    "id": "cr-0a1b2c3d4e5f60718",
    "start": datetime(2098, 11, 1, 11, 30, tzinfo=UTC),
    "end": datetime(2098, 11, 8, 11, 30, tzinfo=UTC),
}
SERVE: Final[dict[str, Any]] = {
    "name": "serve",
    "instance_type": "inf2.xlarge",
    "zone": "us-east-2a",
    "capacity": {"kind": "spot"},
    "size": {"min": 1, "max": 4},
}
TRAIN: Final[dict[str, Any]] = {
    "name": "train",
    "instance_type": "trn1.32xlarge",
    "zone": "us-east-2b",
    "capacity": {"kind": "on-demand"},
    "size": {"min": 0, "max": 2},
}
LOCK: Final = ClusterLock.model_validate(
    {
        "region": REGION,
        "kubernetes": "1.34",
        "neuron": {"release": "1.34.1-20261012", "image": "ami-0123456789abcdef0"},
        "system": {"release": "1.34.1-20261013", "image": "ami-0fedcba9876543210"},
        "addons": {name: f"v1.{place}.0-eksbuild.1" for place, name in enumerate(ADDONS)},
    }
)


@dataclass(frozen=True)
class World:
    network: NetworkStack
    store: StoreStack
    cache: CacheStack
    cluster: ClusterStack


def described(*groups: dict[str, Any], **more: Any) -> Cluster:
    least = {"kubernetes": "1.34", "admins": [ADMIN], "groups": groups or (SERVE, TRAIN)}
    return Cluster.model_validate(least | more)


def make(*groups: dict[str, Any], lock: ClusterLock = LOCK, **more: Any) -> World:
    app = new_app()
    zones = ("us-east-2a", "us-east-2b")
    network = NetworkStack(app, "demo-network", project="demo", network=ClosedNetwork(), zones=zones, env=HERE)
    store = StoreStack(app, "demo-storage", project="demo", env=HERE, removal_policy=RemovalPolicy.DESTROY)
    cache = CacheStack(
        app,
        "demo-cache",
        project="demo",
        network=network.handle,
        store=store.handle,
        versions=("2.32.0",),
        env=HERE,
    )
    cluster = ClusterStack(
        app,
        "demo-cluster",
        project="demo",
        cluster=described(*groups, **more),
        lock=lock,
        network=network.handle,
        store=store.handle,
        prefix="models/",
        cache=cache.handle,
        env=HERE,
    )
    return World(network, store, cache, cluster)
