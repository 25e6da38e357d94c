"""The units that systemd runs on an instance, and the environment that it gives to agent and server."""

import re
from collections.abc import Mapping, Sequence

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
