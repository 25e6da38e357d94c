"""Finds the machine image of a region and a version of the Neuron SDK."""

import re
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any, Final

from nxpipe.pipeline.config.locks import FLEETS_PARAMETER, TRAINING_PARAMETER, LockedImage
from nxpipe.pipeline.util.aws import asking
from nxpipe.pipeline.util.errors import AwsError

_NAME: Final = "Deep Learning AMI Neuron (Ubuntu 24.04) *"
_KEPT_UP: Final = timedelta(days=2 * 365)  # EC2 deprecates a public image two years after it was made


def find_image(region: str, sdk: str, client: Callable[[str, str], Any]) -> LockedImage:
    """The newest image if it holds that version, else the newest one of those that do."""
    ec2 = client("ec2", region)
    newest = _newest(FLEETS_PARAMETER, region, client("ssm", region), ec2)
    if _holds(newest, sdk):
        return _locked(newest, region, sdk, FLEETS_PARAMETER)
    pattern = f"*Neuron SDK {sdk}*"
    with asking(f"list the images of Neuron SDK {sdk} in {region}"):
        answer = ec2.describe_images(
            Owners=["amazon"],
            Filters=[{"Name": "name", "Values": [_NAME]}, {"Name": "description", "Values": [pattern]}],
        )
    images = [each for each in answer["Images"] if _holds(each, sdk)]
    if not images:
        raise AwsError(
            f"{region} has no image of Neuron SDK {sdk}: the newest one is {newest['Name']}, of "
            f"{newest.get('Description', 'no description')!r}; set `sdk` in [amis] to a version that there is"
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
        raise AwsError(
            f"{region} names {id_} as the newest image of Neuron, and does not have it; run the command again"
        )
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
        expires=date.fromisoformat(deprecated[:10]) if deprecated else created + _KEPT_UP,
        source=source,
    )
