"""Environment variables of the Neuron runtime, which reads them when its library is loaded."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nxpipe.emulator.run.status import InvalidLoad

VISIBLE_CORES: Final = "NEURON_RT_VISIBLE_CORES"
ROOT_COMM_ID: Final = "NEURON_RT_ROOT_COMM_ID"
_LIBRARIES: Final = "/opt/aws/neuron/lib"
_EXECUTION_TIMEOUT: Final = "600"  # seconds
# One contradicts the visible cores, the other lets ranks of different executions meet.
_REMOVED: Final = ("NEURON_RT_NUM_CORES", "NEURON_RT_DISABLE_EXECUTION_BARRIER")


@dataclass(frozen=True)
class RankPlacement:
    """Where the ranks of one program run: rank r on core `first_core` + r, each in a process of its own.

    `physical_cores` is the number of physical cores of a logical core (LNC), as the program was compiled. `root` is the
    address of rank 0, HOST:PORT.
    """

    world: int
    root: str
    first_core: int = 0
    physical_cores: int = 1

    def variables(self, rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of a rank's process."""
        own = {name: value for name, value in inherited.items() if name not in (*_REMOVED, ROOT_COMM_ID)}
        own.setdefault("NEURON_RT_EXEC_TIMEOUT", _EXECUTION_TIMEOUT)
        own[VISIBLE_CORES] = str(self.first_core + rank)
        own["NEURON_RT_VIRTUAL_CORE_SIZE"] = own["NEURON_LOGICAL_NC_CONFIG"] = str(self.physical_cores)
        own["LD_LIBRARY_PATH"] = ":".join(filter(None, (inherited.get("LD_LIBRARY_PATH"), _LIBRARIES)))
        if self.world > 1:
            own[ROOT_COMM_ID] = self.root
        return own


def free_address() -> str:
    """An address of this machine for rank 0, whose port is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def visible_cores(text: str) -> list[int]:
    """The cores of a list such as `3-5,6`; raises InvalidLoad unless they are increasing and without gap."""
    cores: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    except ValueError:
        cores = []
    if not cores or cores != list(range(cores[0], cores[0] + len(cores))):
        raise InvalidLoad(f"{VISIBLE_CORES} is {text!r}; list contiguous cores in increasing order, such as 0-3")
    return cores


def require_visible_cores() -> None:
    """Refuse a list of cores that the library would refuse with a less clear message."""
    text = os.environ.get(VISIBLE_CORES)
    if text:
        visible_cores(text)


def require_collectives() -> None:
    """Refuse several ranks without the address of rank 0, for which the library would wait without end."""
    if not os.environ.get(ROOT_COMM_ID):
        raise InvalidLoad(f"a program of several ranks needs {ROOT_COMM_ID}=HOST:PORT of rank 0 before it is loaded")
