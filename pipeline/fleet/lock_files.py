"""Contents of lock files: machine images of a Neuron SDK version, and the components of an EKS cluster.

A lock file pins what AWS recommends today, so that the same configuration deploys the same images tomorrow.
"""

import re
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.config.locks import (
    ADDONS,
    FLEETS_PARAMETER,
    TRAINING_PARAMETER,
    ClusterLock,
    LockedImage,
    LockedNodes,
)
from nxpipe.pipeline.util.aws import asking
from nxpipe.pipeline.util.errors import AwsError

_NAME: Final = "Deep Learning AMI Neuron (Ubuntu 24.04) *"
_LIFETIME: Final = timedelta(days=2 * 365)  # EC2 deprecates a public image two years after its creation


def find_image(region: str, sdk: str, client: Callable[[str, str], Any]) -> LockedImage:
    """The newest image with this version of the SDK."""
    ec2 = client("ec2", region)
    newest = _newest(FLEETS_PARAMETER, region, client("ssm", region), ec2)
    if _holds(newest, sdk):
        return _locked(newest, region, sdk, FLEETS_PARAMETER)
    pattern = f"*Neuron SDK {sdk}*"
    with asking(f"list the images of Neuron SDK {sdk} in {region}"):
        response = ec2.describe_images(
            Owners=["amazon"],
            Filters=[{"Name": "name", "Values": [_NAME]}, {"Name": "description", "Values": [pattern]}],
        )
    images = [each for each in response["Images"] if _holds(each, sdk)]
    if not images:
        raise AwsError(
            f"{region} has no image of Neuron SDK {sdk}; the newest one is {newest['Name']}, "
            f"{newest.get('Description', 'no description')!r}; set `sdk` in [amis] to an existing version"
        )
    return _locked(max(images, key=_age), region, sdk, f"DescribeImages {pattern}")


def find_training_host(region: str, client: Callable[[str, str], Any]) -> LockedImage:
    """The newest image with ECS and the Neuron driver."""
    newest = _newest(TRAINING_PARAMETER, region, client("ssm", region), client("ec2", region))
    return _locked(newest, region, None, TRAINING_PARAMETER)


def _newest(parameter: str, region: str, ssm: Any, ec2: Any) -> dict[str, Any]:
    with asking(f"read the parameter {parameter} in {region}"):
        id_ = ssm.get_parameter(Name=parameter)["Parameter"]["Value"]
    with asking(f"describe the image {id_} in {region}"):
        images: list[dict[str, Any]] = ec2.describe_images(ImageIds=[id_])["Images"]
    if not images:
        raise AwsError(f"{region} names {id_} as the newest Neuron image but does not have it; run the command again")
    return images[0]


def _holds(image: dict[str, Any], sdk: str) -> bool:
    return re.search(rf"Neuron SDK {re.escape(sdk)}(?!\.?\d)", image.get("Description", "")) is not None


def _age(image: dict[str, Any]) -> tuple[str, str]:
    return image["CreationDate"], image["ImageId"]


def _locked(image: dict[str, Any], region: str, sdk: str | None, source: str) -> LockedImage:
    created = date.fromisoformat(image["CreationDate"][:10])
    deprecated = image.get("DeprecationTime")
    return LockedImage(
        region=region,
        sdk=sdk,
        id=image["ImageId"],
        name=image["Name"],
        created=created,
        expires=date.fromisoformat(deprecated[:10]) if deprecated else created + _LIFETIME,
        source=source,
    )


AwsClients: TypeAlias = Callable[[str, str], Any]

_NODES: Final = "/aws/service/eks/optimized-ami/{kubernetes}/amazon-linux-2023/x86_64/{kind}/recommended"


def find_cluster(region: str, kubernetes: str, images: tuple[str, ...], client: AwsClients) -> ClusterLock:
    """Components that EKS recommends today for a version of Kubernetes, and digests of image tags."""
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
            "set `kubernetes` in [cluster] to a version that EKS supports"
        )
    return LockedNodes(release=values[names["release_version"]], image=values[names["image_id"]])


def _addon(eks: Any, name: str, kubernetes: str, region: str) -> str:
    with asking(f"list the versions of the add-on {name} in {region}"):
        found = eks.describe_addon_versions(addonName=name, kubernetesVersion=kubernetes)["addons"]
    for version, fit in _fits(found):
        if fit.get("clusterVersion") == kubernetes and fit.get("defaultVersion"):
            return version
    raise AwsError(
        f"{region} has no version of the add-on {name} for Kubernetes {kubernetes}; "
        "set `kubernetes` in [cluster] to a version that EKS supports"
    )


def _fits(addons: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for addon in addons:
        for version in addon["addonVersions"]:
            for fit in version["compatibilities"]:
                yield version["addonVersion"], fit


def _digest(image: str, client: AwsClients) -> str:
    """Digest of the image that a tag names now; for a multi-architecture image that of its index."""
    registry, _, rest = image.partition("/")
    repository, _, tag = rest.rpartition(":")
    account, _, _, region, *_ = registry.split(".")
    with asking(f"find the image {image}"):
        found = client("ecr", region).describe_images(
            registryId=account, repositoryName=repository, imageIds=[{"imageTag": tag}]
        )["imageDetails"]
    digest: str = found[0]["imageDigest"]
    return digest
