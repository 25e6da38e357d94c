"""Who has which cores of an instance, and how much of their memory is left."""

from threading import Lock

from nxpipe.emulator.analysis.graph_memory import room
from nxpipe.emulator.hardware import Instance
from nxpipe.emulator.run.status import CoresUnavailable

_ALIGNED = ("trn1", "trn1n")


class Cores:
    """The logical cores of one instance, each had by one model at a time."""

    def __init__(self, target: Instance) -> None:
        self.target = target
        self._free = set(range(target.logical_cores))
        self._lock = Lock()

    @property
    def memory(self) -> int:
        """Bytes that one core has for a model."""
        return room(self.target)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int, start: int | None = None) -> range:
        """Neighbouring cores, from `start` on or the first that are free."""
        with self._lock:
            starts = range(self.target.logical_cores) if start is None else [start]
            for first in starts:
                wanted = range(first, first + count)
                if self._free.issuperset(wanted) and self._begins_well(wanted):
                    self._free.difference_update(wanted)
                    return wanted
        raise CoresUnavailable(self._refusal(count, start))

    def give_back(self, cores: range) -> None:
        with self._lock:
            self._free.update(cores)

    def _begins_well(self, cores: range) -> bool:
        """Ranks of Trn1 that talk to each other stand at a multiple of their number."""
        return self.target.compiler_target not in _ALIGNED or cores.start % len(cores) == 0

    def _refusal(self, count: int, start: int | None) -> str:
        asked = f"{count} neighbouring NeuronCores" if start is None else f"NeuronCores {start} to {start + count - 1}"
        if start is not None and not self._begins_well(range(start, start + count)):
            return f"{asked} were asked for; on {self.target.name} {count} ranks begin at a multiple of {count}"
        return (
            f"{asked} were asked for, but of the {self.target.logical_cores} of {self.target.name} {self.free} are "
            "free; unload a model, or use a larger instance"
        )
