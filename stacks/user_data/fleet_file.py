"""Files that user data writes: the instance's nxpipe.toml, and scripts with their variables prepended."""

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from shlex import quote
from typing import Any, Final

from nxpipe.pipeline.config import Config, ServingFleet, Signing, TrustedKey
from nxpipe.pipeline.config.kinds import write_duration

_FOLDER: Final = Path(__file__).parent
LARGEST: Final = 16 * 1024  # bytes that EC2 takes


class TooLong(Exception):
    """User data that EC2 would refuse."""

    def __init__(self, size: int) -> None:
        super().__init__(
            f"the user data has {size} bytes, and EC2 takes {LARGEST}; shorten the fleet's command, or put its words "
            "into a script of the AMI"
        )


def script(values: Mapping[str, str], files: Mapping[str, str], *parts: str) -> str:
    """Each part is the name of a file beside this one; `files` are written before the parts run, by their paths. What
    is given may hold references that CloudFormation resolves.
    """
    head = ["#!/usr/bin/env bash", "set -Eeuo pipefail", *(f"{name}={quote(values[name])}" for name in values), ""]
    writing = [f"put {quote(path)} {quote(files[path])}" for path in files]
    text = "\n".join([*head, part_text("begin"), *writing, "", *map(part_text, parts)])
    if (size := len(text.encode())) > LARGEST:
        raise TooLong(size)
    return text


def part_text(part: str) -> str:
    return (_FOLDER / f"{part}.sh").read_text()


_BY_THE_AGENT: Final = {"command", "standby", "certificate", "clients"}  # said elsewhere, or not the instance's affair


class NoPublicKey(Exception):
    """A channel asks for signatures, and the instances would not know by whom."""

    def __init__(self, channel: str, fault: str) -> None:
        super().__init__(
            f"channel {channel} asks for signatures, and {fault}; put the public key into a file beside nxpipe.toml "
            "and name it in [[signing.trusted]]"
        )


def fleet_file(config: Config, fleet: ServingFleet, store: Mapping[str, str], keys: str) -> str:
    """`keys` is the folder that the public keys will be in, there."""
    model = next(each for each in config.models if each.name == fleet.model)
    tables = [
        ("[project]", config.project.model_dump(exclude_none=True)),
        ("[store]", store),
        ("[[models]]", model.model_dump(exclude_none=True, exclude_defaults=True)),
        ("[[fleets]]", fleet.model_dump(exclude_none=True, exclude=_BY_THE_AGENT)),
        *_signing(config.signing, fleet.channel, keys),
    ]
    return "\n".join(_table(head, values) for head, values in tables)


def public_keys(config: Config, fleet: ServingFleet, folder: Path) -> dict[str, str]:
    """By the name of the file that each is to be in."""
    if fleet.channel not in config.signing.require:
        return {}
    found = {}
    for each in config.signing.trusted:
        try:
            path = folder / Path(each.key.removeprefix("file:")).expanduser()
            found[f"{each.name}.pub"] = path.read_text()
        except OSError as error:
            raise NoPublicKey(fleet.channel, f"{each.key} cannot be read ({error.strerror})") from error
        except RuntimeError as error:
            raise NoPublicKey(fleet.channel, f"{each.key} cannot be found: there is no such home folder") from error
    if not found:
        raise NoPublicKey(fleet.channel, "nxpipe.toml trusts no key by name")
    return found


def _signing(signing: Signing, channel: str, keys: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Of other channels nothing is said: a promise about one that no fleet runs is a mistake, and told as such."""
    if channel not in signing.require:
        return []
    trusted = [each for each in signing.trusted if each.may_sign_for(channel)]
    head = ("[signing]", {"threshold": signing.threshold, "require": [channel]})
    return [head, *(("[[signing.trusted]]", _trusted(each, keys)) for each in trusted)]


def _trusted(one: TrustedKey, keys: str) -> dict[str, Any]:
    more = {name: said for name, said in (("expires", one.expires), ("signs", one.signs)) if said}
    return {"name": one.name, "key": f"file:{keys}/{one.name}.pub", **more}


def _table(head: str, values: Mapping[str, Any]) -> str:
    return "\n".join([head, *(f"{key} = {_value(value)}" for key, value in values.items()), ""])


def _value(value: Any) -> str:
    """JSON writes text, numbers and truth as TOML does."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return json.dumps(write_duration(value))
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(each)}" for key, each in value.items() if each is not None) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
