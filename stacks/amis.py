"""The machine image of the fleets, from the lock file: nothing is looked up when stacks are made."""

from collections.abc import Mapping
from pathlib import Path

from pipeline.config import Config
from pipeline.config.amis import AmiLock, read_lock
from stacks.rules.finding import KnownImage


def lock_of(config: Config, folder: Path) -> AmiLock:
    """`folder` is that of nxpipe.toml, where relative paths of it start."""
    return read_lock(folder / config.amis.lock)


def fleet_image(config: Config, lock: AmiLock) -> str:
    """What instances start from: the image of the first version of the SDK that [amis] lists."""
    assert config.project.region is not None, "fleets have a region"
    return lock.image(config.project.region, config.amis.sdk[0]).id


def training_image(config: Config, lock: AmiLock) -> str:
    """What hosts of training start from."""
    assert config.project.region is not None, "fleets have a region"
    return lock.image(config.project.region, None).id


def known_images(lock: AmiLock) -> Mapping[str, KnownImage]:
    """The lock as the rules know it."""
    return {each.id: KnownImage(each.region, each.expires) for each in lock.images}
