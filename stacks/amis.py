"""The machine image of the fleets, from the lock file: nothing is looked up when stacks are made.

An image that is not locked yet is a reference to the public parameter that `nxpipe ami lock` reads. CloudFormation
resolves it when it makes the launch template, so a fresh checkout synthesises and a first deployment gets the newest
image. A later one may get another, which is why each synthesis warns until it is locked (`stacks/unlocked.py`).
"""

from collections.abc import Mapping
from pathlib import Path

from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.locks import FLEETS_PARAMETER, TRAINING_PARAMETER, AmiLock, read_lock
from nxpipe.stacks.rules.finding import KnownImage


def lock_of(config: Config, folder: Path) -> AmiLock:
    """`folder` is that of nxpipe.toml, where relative paths of it start."""
    return read_lock(folder / config.amis.lock)


def fleet_image(config: Config, lock: AmiLock) -> str:
    """What instances start from: the image of the first version of the SDK that [amis] lists."""
    return _image(config, lock, config.amis.sdk[0], FLEETS_PARAMETER)


def training_image(config: Config, lock: AmiLock) -> str:
    """What hosts of training start from."""
    return _image(config, lock, None, TRAINING_PARAMETER)


def known_images(lock: AmiLock) -> Mapping[str, KnownImage]:
    """The lock as the rules know it."""
    return {each.id: KnownImage(each.region, each.expires) for each in lock.images}


def is_unlocked(image: str) -> bool:
    return image.startswith("{{resolve:ssm:")


def unlocked_images(config: Config, lock: AmiLock) -> frozenset[str]:
    """What stands in templates for images that are not in the lock file."""
    if config.project.region is None:  # a project without fleets
        return frozenset()
    return frozenset(filter(is_unlocked, (fleet_image(config, lock), training_image(config, lock))))


def _image(config: Config, lock: AmiLock, sdk: str | None, parameter: str) -> str:
    assert config.project.region is not None, "fleets have a region"
    found = lock.image(config.project.region, sdk)
    return found.id if found else f"{{{{resolve:ssm:{parameter}}}}}"
