"""Lock files that stacks read: machine images (nxpipe.amis.lock) and the agent (nxpipe.agent.lock)."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.locks import FLEETS_PARAMETER, TRAINING_PARAMETER, AmiLock, read_lock
from nxpipe.stacks.lint.finding import KnownImage

LOCK: Final = "nxpipe.agent.lock"


class NoAgentLocked(Exception):
    """The agent's lock file is unreadable or names no digest."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(
            f"{path} {fault}, but it must name the agent that instances install; run: nxpipe agent bundle PACKAGES"
        )


def locked_agent(folder: Path, python: str) -> str | None:
    """SHA-256 of the agent's bundle, which must be for this Python; None if there is no lock file yet."""
    path = folder / LOCK
    try:
        lock = json.loads(path.read_text())
        digest = lock["sha256"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise NoAgentLocked(path, "cannot be read") from error
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise NoAgentLocked(path, "names no digest")
    made_for = lock.get("python")
    if made_for not in (None, python):  # files of older versions do not name it
        raise NoAgentLocked(path, f"names a bundle for Python {made_for}, and the fleets' image has {python}")
    return digest


def lock_of(config: Config, folder: Path) -> AmiLock:
    """The image lock. `folder` is the folder of nxpipe.toml; relative paths start there."""
    return read_lock(folder / config.amis.lock)


def fleet_image(config: Config, lock: AmiLock) -> str:
    """AMI of serving instances: the one that [amis] names, or the one with the first SDK version there."""
    locked = lock.serving(config.amis, _region(config))
    return locked.id if locked else config.amis.image or _newest(FLEETS_PARAMETER)


def fleet_root_device(config: Config, lock: AmiLock) -> str:
    """Name of the root device of serving instances; Neuron images of Ubuntu, and older lock files, have sda1."""
    locked = lock.serving(config.amis, _region(config))
    return locked.root_device if locked and locked.root_device else "/dev/sda1"


def fleet_python(config: Config, lock: AmiLock) -> str:
    """Python of serving instances, such as "3.12"."""
    return lock.software(config.amis, config.project.region).python


def training_image(config: Config, lock: AmiLock) -> str:
    """AMI of training hosts."""
    locked = lock.image(_region(config), None)
    return locked.id if locked else _newest(TRAINING_PARAMETER)


def known_images(lock: AmiLock) -> Mapping[str, KnownImage]:
    """Locked images by AMI, for the lint rules."""
    return {
        image.id: KnownImage(image.region, image.expires, image.root_device, image.root_gib) for image in lock.images
    }


def unlocked_images(config: Config, lock: AmiLock) -> frozenset[str]:
    """Images in templates that are not in the lock file: SSM references, or the one that [amis] names."""
    region = config.project.region
    if region is None:  # a project without fleets
        return frozenset()
    serving = () if lock.serving(config.amis, region) else (fleet_image(config, lock),)
    training = () if lock.image(region, None) else (training_image(config, lock),)
    return frozenset((*serving, *training))


def _newest(parameter: str) -> str:
    return f"{{{{resolve:ssm:{parameter}}}}}"


def _region(config: Config) -> str:
    assert config.project.region is not None, "fleets have a region"
    return config.project.region


IMAGE: Final = "nxpipe:ami-not-locked"  # the ids of the warnings
AGENT: Final = "nxpipe:agent-not-locked"
