"""User data of a serving fleet: the script, the systemd units, and the environment of agent and server."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nxpipe.emulator.hardware import CORES, INSTANCES
from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.stacks.user_data.fleet_file import fleet_file, public_keys, script

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
        command=" ".join(map(word, command)),
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
    return _WATCHER.format(fleet=fleet, settings=settings, command=" ".join(map(word, command)))


def word(text: str) -> str:
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
