"""User data: serving instances get their configuration, units and agent, training hosts their drivers and mounts."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from shlex import quote
from typing import Any, Final

from nxpipe.emulator.hardware import CORES, INSTANCES
from nxpipe.pipeline.config import Config, ServingFleet, Signing, TrustedKey
from nxpipe.pipeline.config.kinds import write_duration

_FOLDER: Final = Path(__file__).parent
LARGEST: Final = 16 * 1024  # bytes; EC2's limit


# All programs that the scripts of serving instances run. The first boot checks them before anything else, and the tests
# run the scripts without any other. Neuron images have them; an image of one's own must have them too.
PROGRAMS: Final = (
    "aws",
    "curl",
    "dirname",
    "dpkg",
    "id",
    "mkdir",
    "mktemp",
    "python3",
    "rm",
    "sha256sum",
    "sleep",
    "systemctl",
    "tail",
    "tar",
    "tee",
    "timeout",
    "tr",
    "useradd",
)


class TooLong(Exception):
    """User data above EC2's limit."""

    def __init__(self, size: int) -> None:
        super().__init__(
            f"the user data has {size} bytes, and EC2 allows {LARGEST}; shorten the fleet's probe or command, or move "
            "the command into a script of the AMI"
        )


# What the instance store requires in addition.
DISK_PROGRAMS: Final = ("blkid", "mkfs.ext4", "mount", "mountpoint")


def script(values: Mapping[str, str], files: Mapping[str, str], *parts: str, programs: Sequence[str] = PROGRAMS) -> str:
    """Shell script that sets variables, checks `programs`, writes `files` (path to content), and runs the parts.

    A part is the name of a .sh file beside this module. Values may contain CloudFormation references.
    """
    head = _head(values)
    writing = [f"put {quote(path)} {quote(files[path])}" for path in files]
    required = " ".join(["require", *(f'"{program}"' for program in programs)])  # egress.py: a bare `aws` is a call
    text = "\n".join(
        [*head, *map(part_text, ("logs", "begin")), required, "record", *writing, "", *map(part_text, parts)]
    )
    if (size := len(text.encode())) > LARGEST:
        raise TooLong(size)
    return text


def _head(values: Mapping[str, str]) -> list[str]:
    return ["#!/usr/bin/env bash", "set -Eeuo pipefail", *(f"{name}={quote(values[name])}" for name in values), ""]


def part_text(part: str) -> str:
    return (_FOLDER / f"{part}.sh").read_text()


# Keys that are passed otherwise, or that no instance uses: the agent of an older bundle does not know new ones.
_BY_THE_AGENT: Final = {
    "certificate",
    "clients",
    "command",
    "compile_cache",
    "disk",
    "iops",
    "log_units",
    "private_link",
    "scaling",
    "ssm",
    "standby",
    "throughput",
}


def _unused(fleet: ServingFleet) -> set[str]:
    """Keys that are not written to the instance. A new key at its default would restart every fleet on an upgrade."""
    required = {"command"} if fleet.probe or fleet.command == () else set()  # a probe without a server is invalid
    at_default = {
        name for name, value in (("rehearsal", False), ("golden_inputs", True)) if getattr(fleet, name) == value
    }
    if not fleet.updates.are_followed:
        at_default.add("updates")
    return _BY_THE_AGENT - required | at_default


class NoPublicKey(Exception):
    """A channel requires signatures, but a public key cannot be read."""

    def __init__(self, channel: str, fault: str) -> None:
        super().__init__(
            f"channel {channel} requires signatures, but {fault}; put the public key into a file beside nxpipe.toml "
            "and name it in [[signing.trusted]]"
        )


def fleet_file(config: Config, fleet: ServingFleet, store: Mapping[str, str], keys: str) -> str:
    """The instance's nxpipe.toml. `keys` is the folder of the public keys on the instance."""
    model = next(model for model in config.models if model.name == fleet.model)
    tables = [
        ("[project]", config.project.model_dump(exclude_none=True)),
        ("[store]", store),
        ("[[models]]", model.model_dump(exclude_none=True, exclude_defaults=True)),
        ("[[fleets]]", fleet.model_dump(exclude_none=True, exclude=_unused(fleet))),
        *_shadow(config, fleet),
        *_signing(config.signing, fleet.channel, keys),
    ]
    return "\n".join(_table(head, values) for head, values in tables)


def public_keys(config: Config, fleet: ServingFleet, folder: Path) -> dict[str, str]:
    """Public keys that the instance needs, by file name."""
    if fleet.channel not in config.signing.require:
        return {}
    texts = {}
    for trusted in config.signing.trusted:
        try:
            path = folder / Path(trusted.key.removeprefix("file:")).expanduser()
            texts[f"{trusted.name}.pub"] = path.read_text()
        except OSError as error:
            raise NoPublicKey(fleet.channel, f"{trusted.key} cannot be read ({error.strerror})") from error
        except RuntimeError as error:
            raise NoPublicKey(fleet.channel, f"{trusted.key} cannot be found: there is no such home folder") from error
    if not texts:
        raise NoPublicKey(fleet.channel, "nxpipe.toml has no [[signing.trusted]] key")
    return texts


def _shadow(config: Config, fleet: ServingFleet) -> list[tuple[str, Mapping[str, Any]]]:
    """With this table the agent follows the shadow phase of the fleet's rollouts."""
    shadow = config.rollout.shadow
    if shadow is None or fleet.updates.are_followed:
        return []
    return [("[rollout.shadow]", shadow.model_dump(exclude_none=True))]


def _signing(signing: Signing, channel: str, keys: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The [signing] tables of one channel; a channel without fleets would make the instance's file invalid."""
    if channel not in signing.require:
        return []
    trusted = [key for key in signing.trusted if key.may_sign_for(channel)]
    head = ("[signing]", {"threshold": signing.threshold, "require": [channel]})
    return [head, *(("[[signing.trusted]]", _trusted(key, keys)) for key in trusted)]


def _trusted(key: TrustedKey, keys: str) -> dict[str, Any]:
    optional = {name: value for name, value in (("expires", key.expires), ("signs", key.signs)) if value}
    return {"name": key.name, "key": f"file:{keys}/{key.name}.pub", **optional}


def _table(head: str, values: Mapping[str, Any]) -> str:
    return "\n".join([head, *(f"{key} = {_value(value)}" for key, value in values.items()), ""])


def _value(value: Any) -> str:
    """A TOML value. Strings, numbers and booleans have the same form in JSON."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return json.dumps(write_duration(value))
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items() if item is not None) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


# The condition: systemd does not start the agent of an instance again that is being terminated. The user has no other
# home: libraries of a server cache below HOME.
_UNIT = """\
[Unit]
Description=nxpipe: fleet {fleet}
Wants=network-online.target{disks}
After=network-online.target{disks}
ConditionPathExists=!{given_up}
{limits}
[Service]
Type={kind}
User=nxpipe
StateDirectory=nxpipe
RuntimeDirectory=nxpipe
RuntimeDirectoryPreserve=yes
WorkingDirectory=%S/nxpipe
Environment=HOME=%S/nxpipe
Environment=XDG_STATE_HOME=%S
EnvironmentFile={settings}/agent.env
ExecStart={command}
Restart={restart}
RestartSec=5
LimitMEMLOCK=infinity
NoNewPrivileges=yes
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""


# The agent ends a start that takes longer than `ready_within`, and kills a server that takes longer than `draining` to
# stop; systemd's own limits are for an agent that hangs. KillMode: the agent forwards SIGTERM, so that the server gets
# it once. A server that keeps exiting is left stopped, so that Auto Scaling replaces its instance. A watchdog would see
# the agent only: the load balancer checks the server.
_LIMITS = """\
StartLimitIntervalSec=1h
StartLimitBurst=5
"""
_SUPERVISED = """\
notify
NotifyAccess=main
TimeoutStartSec={start}
TimeoutStopSec={stop}
KillMode=mixed
SuccessExitStatus=143"""
_START_MARGIN: Final = 360  # seconds: the agent waits up to five minutes for a hook that is not pending yet
_STOP_MARGIN: Final = 30


def unit(fleet: ServingFleet, places: "InstancePaths", command: Sequence[str]) -> str:
    """Unit of the agent. Without a server it is a oneshot unit, after which the image's own unit serves."""
    has_server = fleet.command != ()
    supervised = _SUPERVISED.format(
        start=int(fleet.ready_within.total_seconds()) + _START_MARGIN,
        stop=int(fleet.draining.total_seconds()) + _STOP_MARGIN,
    )
    return _UNIT.format(
        fleet=fleet.name,
        settings=places.settings,
        given_up=places.given_up,
        command=" ".join(map(systemd_word, command)),
        disks=f" {_DISKS_UNIT}" if fleet.uses_instance_store else "",
        limits=_LIMITS if has_server else "",
        kind=supervised if has_server else "oneshot\nRemainAfterExit=yes",
        restart="always" if has_server else "on-failure",
    )


_USER_DATA_UNIT: Final = "cloud-final.service"  # of cloud-init; it starts the others, so it is not ordered after them
_DISKS_UNIT = "nxpipe-instance-store.service"
_DISKS = """\
[Unit]
Description=nxpipe: state of fleet {fleet} on the instance store
After=local-fs.target dlami-nvme.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/env bash {program}
StandardError=journal+console
"""


def instance_store(fleet: str, program: str) -> str:
    """Unit that mounts the instance store before the agent starts; without a free disk the root volume serves."""
    return _DISKS.format(fleet=fleet, program=systemd_word(program))


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
    """Unit that publishes device metrics. Serving does not depend on it; systemd restarts it after a failure."""
    return _WATCHER.format(fleet=fleet, settings=settings, command=" ".join(map(systemd_word, command)))


_FORWARDER: Final = """\
[Unit]
Description=nxpipe: journal of fleet {fleet} to CloudWatch Logs
Wants=network-online.target
After=network-online.target
Before={units}

[Service]
User=nxpipe
SupplementaryGroups=systemd-journal
StateDirectory=nxpipe-logs
EnvironmentFile={settings}/agent.env
ExecStart={command}
KillMode=mixed
TimeoutStopSec=30
Restart=always
RestartSec=30
NoNewPrivileges=yes
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""


def forwarder(fleet: str, settings: str, command: Sequence[str], units: Sequence[str]) -> str:
    """Unit that forwards the journal of `units`. `Before` makes systemd stop it after them, so that it delivers what
    they write last. Its state is on the root volume, as the journal is, and not on the instance store.
    """
    words = " ".join(map(systemd_word, command))
    return _FORWARDER.format(fleet=fleet, settings=settings, command=words, units=" ".join(units))


def systemd_word(text: str) -> str:
    """A word, quoted for a systemd command line, where % and $ are special even within quotes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[A-Za-z0-9_./:=@%+,-]+", escaped) else f'"{escaped}"'


def environment(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in values.items())


@dataclass(frozen=True)
class Agent:
    """The agent's bundle in the store's bucket: a tar file of wheels, named by its digest."""

    url: str
    sha256: str


@dataclass(frozen=True)
class InstancePaths:
    """Paths on an instance. Tests set `root` to a folder."""

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
    def keys(self) -> str:
        return f"{self.settings}/keys"

    @property
    def given_up(self) -> str:
        """What an agent leaves that has written why, and has abandoned the instance. A reboot empties the folder."""
        return self.at("/run/nxpipe/given-up")

    @property
    def output(self) -> str:
        """Error output of user data."""
        return self.at("/var/log/nxpipe-boot.log")


@dataclass(frozen=True)
class Serving:
    """User data of one fleet's instances."""

    config: Config
    fleet: ServingFleet
    folder: Path  # of nxpipe.toml
    region: str
    store_url: str
    hook: str
    log: str  # name of the fleet's log group
    agent: Agent
    places: InstancePaths = InstancePaths()

    def script(self) -> str:
        programs = (*PROGRAMS, *(DISK_PROGRAMS if self.fleet.uses_instance_store else ()))
        return script(self._values(), self._files(), "agent", "serve", programs=programs)

    def _values(self) -> dict[str, str]:
        return {
            "CONSOLE": self.places.at("/dev/console"),
            "OUTPUT": self.places.output,
            "REGION": self.region,
            "LOG": self.log,
            "HOOK": self.hook,
            "GIVEN_UP": self.places.given_up,
            "PROGRAMS": self.places.programs,
            "AGENT_URL": self.agent.url,
            "AGENT_SHA256": self.agent.sha256,
        }

    def _files(self) -> dict[str, str]:
        settings = self.places.settings
        store = {"url": self.store_url, "cache": f"{self.places.state}/cache"}
        keys = public_keys(self.config, self.fleet, self.folder)
        return {
            **self._grouping(),
            **self._instance_store(),
            **{f"{self.places.keys}/{name}": text for name, text in keys.items()},
            f"{settings}/nxpipe.toml": fleet_file(self.config, self.fleet, store, self.places.keys),
            f"{settings}/agent.env": environment(self._environment()),
            self.places.at("/etc/systemd/system/nxpipe-agent.service"): self._unit(),
            self.places.at("/etc/systemd/system/nxpipe-watch.service"): self._watcher(),
            self.places.at("/etc/systemd/system/nxpipe-logs.service"): self._forwarder(),
        }

    def _grouping(self) -> dict[str, str]:
        """File that sets the number of physical cores per logical core to the value that programs are compiled for,
        independent of the image's default. Only newer cores can be grouped.
        """
        core = CORES[INSTANCES[self.fleet.instance_types[0]].core]
        if core.lnc_default == 1:
            return {}
        text = f"NEURON_LOGICAL_NC_CONFIG={core.lnc_default}\n"
        return {self.places.at("/opt/aws/neuron/logical_nc_config"): text}

    def _instance_store(self) -> dict[str, str]:
        if not self.fleet.uses_instance_store:
            return {}
        program = f"{self.places.programs}/instance_store.sh"
        values = {
            "STATE": self.places.state,
            "SHARED": self.places.at("/opt/dlami/nvme"),
            "DISKS": self.places.at("/dev/disk/by-id"),
        }
        return {
            program: "\n".join([*_head(values), part_text("instance_store")]),
            self.places.at(f"/etc/systemd/system/{_DISKS_UNIT}"): instance_store(self.fleet.name, program),
        }

    def _environment(self) -> dict[str, str]:
        cache = self.fleet.compile_cache
        return {
            "NXPIPE_CONFIG": f"{self.places.settings}/nxpipe.toml",
            "NXPIPE_HOOK": self.hook,
            "NXPIPE_LOG": self.log,
            "NXPIPE_GIVEN_UP": self.places.given_up,
            "NXPIPE_FORWARDED": self.places.at("/var/lib/nxpipe-logs/position.json"),
            "AWS_DEFAULT_REGION": self.region,
            "PYTHONUNBUFFERED": "1",
            **({"NEURON_COMPILE_CACHE_URL": cache} if cache else {}),
        }

    def _unit(self) -> str:
        folder = f"{self.places.state}/artifact"
        server = ["--", *self.fleet.command] if self.fleet.command else []
        command = [self._program, "agent", "run", "--fleet", self.fleet.name, "--to", folder, *server]
        return unit(self.fleet, self.places, command)

    def _watcher(self) -> str:
        command = [self._program, "agent", "watch", "--fleet", self.fleet.name]
        return watcher(self.fleet.name, self.places.settings, command)

    def _forwarder(self) -> str:
        units = ["nxpipe-agent.service", "nxpipe-watch.service", *self.fleet.log_units]
        if self.fleet.uses_instance_store:
            units.append(_DISKS_UNIT)
        followed = [f"--unit={unit}" for unit in (*units, _USER_DATA_UNIT)]
        return forwarder(self.fleet.name, self.places.settings, [self._program, "agent", "forward", *followed], units)

    @property
    def _program(self) -> str:
        return f"{self.places.programs}/agent/bin/nxpipe"


# All programs that the script of a training host runs, beside those that it installs.
HOST_PROGRAMS: Final = (
    "chmod",
    "curl",
    "dnf",
    "gzip",
    "mkdir",
    "mkfs.ext4",
    "mktemp",
    "modprobe",
    "mount",
    "readlink",
    "rm",
    "sha256sum",
    "sleep",
    "sort",
    "systemctl",
    "tail",
    "tar",
    "tee",
    "timeout",
    "tr",
)
_BOUNDARY: Final = "=nxpipe="


@dataclass(frozen=True)
class TrainingHost:
    """User data of a training host: a script for each feature, before the ECS agent starts."""

    region: str
    log: str  # name of the fleet's log group
    places: InstancePaths = InstancePaths()
    parts: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)

    def with_efa(self, url: str, sha256: str, *, cards: int) -> "TrainingHost":
        """`url` is the installer's in S3. `cards` is the number of devices that the driver must make."""
        devices = self.places.at("/dev/infiniband")
        return self._with("efa", EFA_URL=url, EFA_SHA256=sha256, EFA_CARDS=str(cards), EFA_DEVICES=devices)

    def with_scratch(self, folder: str, file_system: str, mount_name: str) -> "TrainingHost":
        return self._with("scratch", SCRATCH=folder, FILE_SYSTEM=file_system, MOUNT_NAME=mount_name)

    def with_instance_store(self, folder: str) -> "TrainingHost":
        disks = self.places.at("/dev/disk/by-id")
        return self._with("local", LOCAL=folder, DISKS=disks, ARRAY=self.places.at("/dev/md/nxpipe"))

    def _with(self, part: str, **values: str) -> "TrainingHost":
        return replace(self, parts=(*self.parts, part), values={**self.values, **values})

    def script(self) -> str:
        own = {"CONSOLE": self.places.at("/dev/console"), "OUTPUT": self.places.output, "LOG": self.log}
        values = {**own, "REGION": self.region, **self.values}
        head = [f"{name}={value}" for name, value in values.items()]  # names and URLs, without special characters
        return "\n".join(
            ["#!/usr/bin/env bash", "set -Eeuo pipefail", *head, *map(part_text, ("logs", "host", *self.parts))]
        )

    def user_data(self) -> str:
        """In MIME multipart format, which Batch requires to add its own part; empty if there is nothing to set up."""
        if not self.parts:
            return ""
        return "\n".join(
            [
                "MIME-Version: 1.0",
                f'Content-Type: multipart/mixed; boundary="{_BOUNDARY}"',
                "",
                f"--{_BOUNDARY}",
                'Content-Type: text/x-shellscript; charset="us-ascii"',
                "",
                self.script(),
                f"--{_BOUNDARY}--",
                "",
            ]
        )
