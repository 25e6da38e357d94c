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
    """AMI of serving instances: the image of the first SDK version that [amis] lists."""
    return _image(config, lock, config.amis.sdk[0], FLEETS_PARAMETER)


def fleet_python(config: Config, lock: AmiLock) -> str:
    """Python of serving instances, such as "3.12"."""
    return lock.software(config.amis.sdk[0], config.project.region).python


def training_image(config: Config, lock: AmiLock) -> str:
    """AMI of training hosts."""
    return _image(config, lock, None, TRAINING_PARAMETER)


def known_images(lock: AmiLock) -> Mapping[str, KnownImage]:
    """Locked images by AMI, for the lint rules."""
    return {image.id: KnownImage(image.region, image.expires) for image in lock.images}


def is_unlocked(image: str) -> bool:
    return image.startswith("{{resolve:ssm:")


def unlocked_images(config: Config, lock: AmiLock) -> frozenset[str]:
    """References in templates to images that are not in the lock file."""
    if config.project.region is None:  # a project without fleets
        return frozenset()
    return frozenset(filter(is_unlocked, (fleet_image(config, lock), training_image(config, lock))))


def _image(config: Config, lock: AmiLock, sdk: str | None, parameter: str) -> str:
    assert config.project.region is not None, "fleets have a region"
    image = lock.image(config.project.region, sdk)
    return image.id if image else f"{{{{resolve:ssm:{parameter}}}}}"


IMAGE: Final = "nxpipe:ami-not-locked"  # the ids of the warnings
AGENT: Final = "nxpipe:agent-not-locked"
