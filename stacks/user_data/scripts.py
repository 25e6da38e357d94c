"""Files that user data writes: the instance's nxpipe.toml, and scripts with their variables prepended."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from shlex import quote
from typing import Any, Final

from nxpipe.emulator.hardware import CORES, INSTANCES
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


_UNIT = """\
[Unit]
Description=nxpipe: fleet {fleet}
Wants=network-online.target
After=network-online.target
{mounts}
[Service]
Type={kind}
User=nxpipe
StateDirectory=nxpipe
Environment=XDG_STATE_HOME=%S
EnvironmentFile={settings}/agent.env
ExecStart={command}
Restart=on-failure
RestartSec=5
LimitMEMLOCK=infinity
NoNewPrivileges=yes
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""


def unit(fleet: str, settings: str, command: Sequence[str], *, serves: bool, mount: str | None) -> str:
    """Without a server of its own the unit is done when the agent ends, and another one goes on from there."""
    return _UNIT.format(
        fleet=fleet,
        settings=settings,
        command=" ".join(map(systemd_word, command)),
        kind="exec" if serves else "oneshot\nRemainAfterExit=yes",
        mounts=f"RequiresMountsFor={mount}\n" if mount else "",
    )


_WATCHER = """\
[Unit]
Description=nxpipe: what the devices of fleet {fleet} do
Wants=network-online.target
After=network-online.target

[Service]
User=nxpipe
EnvironmentFile={settings}/agent.env
ExecStart={command}
Restart=always
RestartSec=30
NoNewPrivileges=yes
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""


def watcher(fleet: str, settings: str, command: Sequence[str]) -> str:
    """Serving does not depend on it: it begins when it can, and again when it could not."""
    return _WATCHER.format(fleet=fleet, settings=settings, command=" ".join(map(systemd_word, command)))


def systemd_word(text: str) -> str:
    """As systemd reads a command line: % and $ mean something to it even between quotes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[A-Za-z0-9_./:=@%+,-]+", escaped) else f'"{escaped}"'


def environment(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in values.items())


@dataclass(frozen=True)
class Agent:
    """A bundle of wheels in the store's bucket: `nxpipe` and what it needs, in one tar file that its digest names."""

    url: str
    sha256: str


@dataclass(frozen=True)
class Cache:
    file_system: str
    access_point: str


@dataclass(frozen=True)
class Places:
    """Where things go on an instance; `root` is another folder than / where a script is tried out."""

    root: str = ""

    def at(self, path: str) -> str:
        return f"{self.root}{path}"

    @property
    def programs(self) -> str:
        return self.at("/opt/nxpipe")

    @property
    def settings(self) -> str:
        return self.at("/etc/nxpipe")

    @property
    def state(self) -> str:
        return self.at("/var/lib/nxpipe")

    @property
    def cache(self) -> str:
        return self.at("/mnt/nxpipe-cache")

    @property
    def keys(self) -> str:
        return f"{self.settings}/keys"


@dataclass(frozen=True)
class Serving:
    """One fleet, and what its instances take from the other stacks."""

    config: Config
    fleet: ServingFleet
    folder: Path  # of nxpipe.toml
    region: str
    store_url: str
    hook: str
    log: str  # the group of the fleet's log
    agent: Agent
    cache: Cache | None
    places: Places = Places()

    def script(self) -> str:
        return script(self._values(), self._files(), "agent", *(["cache"] if self.cache else []), "serve")

    def _values(self) -> dict[str, str]:
        values = {
            "REGION": self.region,
            "HOOK": self.hook,
            "PROGRAMS": self.places.programs,
            "AGENT_URL": self.agent.url,
            "AGENT_SHA256": self.agent.sha256,
        }
        if self.cache:
            values |= {
                "CACHE": self.places.cache,
                "FSTAB": self.places.at("/etc/fstab"),
                "FILE_SYSTEM": self.cache.file_system,
                "ACCESS_POINT": self.cache.access_point,
            }
        return values

    def _files(self) -> dict[str, str]:
        settings = self.places.settings
        store = {"url": self.store_url, "cache": f"{self.places.state}/cache"}
        keys = public_keys(self.config, self.fleet, self.folder)
        return {
            **self._grouping(),
            **{f"{self.places.keys}/{name}": text for name, text in keys.items()},
            f"{settings}/nxpipe.toml": fleet_file(self.config, self.fleet, store, self.places.keys),
            f"{settings}/agent.env": environment(self._environment()),
            self.places.at("/etc/systemd/system/nxpipe-agent.service"): self._unit(),
            self.places.at("/etc/systemd/system/nxpipe-watch.service"): self._watcher(),
        }

    def _grouping(self) -> dict[str, str]:
        """How many physical cores make one that a program sees: as the programs were compiled, even if an image is
        set up otherwise. Only newer cores can be grouped."""
        core = CORES[INSTANCES[self.fleet.instance_types[0]].core]
        if core.lnc_default == 1:
            return {}
        text = f"NEURON_LOGICAL_NC_CONFIG={core.lnc_default}\n"
        return {self.places.at("/opt/aws/neuron/logical_nc_config"): text}

    def _environment(self) -> dict[str, str]:
        cached = {"NEURON_COMPILE_CACHE_URL": self.places.cache} if self.cache else {}
        return {
            "NXPIPE_CONFIG": f"{self.places.settings}/nxpipe.toml",
            "NXPIPE_HOOK": self.hook,
            "NXPIPE_LOG": self.log,
            "AWS_DEFAULT_REGION": self.region,
            "PYTHONUNBUFFERED": "1",
            **cached,
        }

    def _unit(self) -> str:
        folder = f"{self.places.state}/artifact"
        server = ["--", *self.fleet.command] if self.fleet.command else []
        return unit(
            self.fleet.name,
            self.places.settings,
            [self._program, "agent", "run", "--fleet", self.fleet.name, "--to", folder, *server],
            serves=bool(self.fleet.command),
            mount=self.places.cache if self.cache else None,
        )

    def _watcher(self) -> str:
        command = [self._program, "agent", "watch", "--fleet", self.fleet.name]
        return watcher(self.fleet.name, self.places.settings, command)

    @property
    def _program(self) -> str:
        return f"{self.places.programs}/agent/bin/nxpipe"
