"""Finds what a cluster is made of: releases of its nodes, versions of its add-ons, digests of its images."""

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.config.locks import ADDONS, ClusterLock, LockedNodes
from nxpipe.pipeline.util.aws import asking
from nxpipe.pipeline.util.errors import AwsError

Clients: TypeAlias = Callable[[str, str], Any]

_NODES: Final = "/aws/service/eks/optimized-ami/{kubernetes}/amazon-linux-2023/x86_64/{kind}/recommended"


def find_cluster(region: str, kubernetes: str, images: tuple[str, ...], client: Clients) -> ClusterLock:
    """What EKS recommends today for a version of Kubernetes, and what the tags of images name."""
    ssm, eks = client("ssm", region), client("eks", region)
    return ClusterLock(
        region=region,
        kubernetes=kubernetes,
        neuron=_nodes(ssm, kubernetes, "neuron", region),
        system=_nodes(ssm, kubernetes, "standard", region),
        addons={name: _addon(eks, name, kubernetes, region) for name in ADDONS},
        images={image: _digest(image, client) for image in images},
    )


def _nodes(ssm: Any, kubernetes: str, kind: str, region: str) -> LockedNodes:
    names = {
        what: f"{_NODES.format(kubernetes=kubernetes, kind=kind)}/{what}" for what in ("image_id", "release_version")
    }
    with asking(f"name the release of {kind} nodes for Kubernetes {kubernetes} in {region}"):
        found = ssm.get_parameters(Names=list(names.values()))["Parameters"]
    values = {each["Name"]: each["Value"] for each in found}
    if missing := [name for name in names.values() if name not in values]:
        raise AwsError(
            f"{region} has no {kind} nodes for Kubernetes {kubernetes}: there is no parameter {missing[0]}; "
            "set `kubernetes` in [cluster] to a version that EKS has"
        )
    return LockedNodes(release=values[names["release_version"]], image=values[names["image_id"]])


def _addon(eks: Any, name: str, kubernetes: str, region: str) -> str:
    with asking(f"list the versions of the add-on {name} in {region}"):
        found = eks.describe_addon_versions(addonName=name, kubernetesVersion=kubernetes)["addons"]
    for version, fit in _fits(found):
        if fit.get("clusterVersion") == kubernetes and fit.get("defaultVersion"):
            return version
    raise AwsError(
        f"{region} names no version of the add-on {name} for Kubernetes {kubernetes}; "
        "set `kubernetes` in [cluster] to a version that EKS has"
    )


def _fits(addons: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for addon in addons:
        for version in addon["addonVersions"]:
            for fit in version["compatibilities"]:
                yield version["addonVersion"], fit


def _digest(image: str, client: Clients) -> str:
    """Of the image that a tag names now. One for several architectures has a digest of its own, which is this one."""
    registry, _, rest = image.partition("/")
    repository, _, tag = rest.rpartition(":")
    account, _, _, region, *_ = registry.split(".")
    with asking(f"find the image {image}"):
        found = client("ecr", region).describe_images(
            registryId=account, repositoryName=repository, imageIds=[{"imageTag": tag}]
        )["imageDetails"]
    digest: str = found[0]["imageDigest"]
    return digest
