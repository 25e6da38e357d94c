"""Runtime of one instance: allocation of its cores, and the loaded models."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock
from types import TracebackType

from nxpipe.emulator.analysis.graph_memory import data_capacity
from nxpipe.emulator.hardware import Instance
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.model import Code, Model
from nxpipe.emulator.run.status import CoresUnavailable, InvalidLoad, RuntimeClosed, WrongGeneration

_ALIGNED = ("trn1", "trn1n")


class Cores:
    """The logical cores of one instance; each is allocated to at most one model."""

    def __init__(self, target: Instance) -> None:
        self.target = target
        self._free = set(range(target.logical_cores))
        self._lock = Lock()

    @property
    def memory(self) -> int:
        """Bytes on one core for a model's data."""
        return data_capacity(self.target)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int, start: int | None = None) -> range:
        """Allocate `count` contiguous cores: from `start` on, or the first free ones. Raises CoresUnavailable."""
        with self._lock:
            starts = range(self.target.logical_cores) if start is None else [start]
            for first in starts:
                cores = range(first, first + count)
                if self._free.issuperset(cores) and self._is_aligned(cores):
                    self._free.difference_update(cores)
                    return cores
        raise CoresUnavailable(self._unavailable_message(count, start))

    def give_back(self, cores: range) -> None:
        with self._lock:
            self._free.update(cores)

    def _is_aligned(self, cores: range) -> bool:
        """True if the cores may form one group: on Trn1, a group must begin at a multiple of its size."""
        return self.target.compiler_target not in _ALIGNED or cores.start % len(cores) == 0

    def _unavailable_message(self, count: int, start: int | None) -> str:
        request = f"{count} contiguous NeuronCores" if start is None else f"NeuronCores {start} to {start + count - 1}"
        if start is not None and not self._is_aligned(range(start, start + count)):
            return f"{request} requested; on {self.target.name} {count} ranks must begin at a multiple of {count}"
        return (
            f"{request} requested, but {self.free} of the {self.target.logical_cores} of {self.target.name} are "
            "free; unload a model, or use a larger instance"
        )


class Runtime:
    """The cores of one instance and the models that are loaded on them."""

    def __init__(self, target: Instance) -> None:
        self._cores = Cores(target)
        self._models: list[Model] = []
        self._closed = False

    def load(self, codes: Sequence[Code], weights: Mapping[str, Array], start: int | None = None) -> Model:
        """Load the programs of one model on contiguous cores, from `start` on or the first free ones."""
        self._require_open()
        ranks = self._require_matching(codes)
        cores = self._cores.take(ranks, start)
        try:
            model = Model(codes, weights, cores, self._cores.memory, lambda: self._cores.give_back(cores))
        except BaseException:
            self._cores.give_back(cores)
            raise
        self._models.append(model)
        return model

    def replicate(self, codes: Sequence[Code], weights: Mapping[str, Array], copies: int | None = None) -> "Replicas":
        """Load a replica on each of `copies` groups of cores; by default on all free cores."""
        models: list[Model] = []
        try:
            while copies is None or len(models) < copies:
                models.append(self.load(codes, weights))
        except CoresUnavailable:
            if copies is not None or not models:
                for model in models:
                    model.unload()
                raise
        return Replicas(models)

    def close(self) -> None:
        """Unload all models."""
        self._closed = True
        while self._models:
            self._models.pop().unload()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeClosed("the runtime is closed; open another one")

    def _require_matching(self, codes: Sequence[Code]) -> int:
        ranks = {code.ranks for code in codes}
        if len(ranks) != 1:
            raise InvalidLoad(f"programs for {sorted(ranks) or 'no'} ranks cannot be loaded as one model")
        target = self._cores.target
        for code in codes:
            if code.core not in (None, target.core):
                raise WrongGeneration(
                    f"the program is for NeuronCore-{code.core}, and {target.name} has NeuronCore-{target.core}; build "
                    f"the model for {target.compiler_target}"
                )
        return ranks.pop()


class Replicas:
    """Replicas of a model, each on its own cores. They have no states, because a request may run on any replica."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.models = tuple(models)
        self._free: SimpleQueue[Model] = SimpleQueue()
        for model in models:
            self._free.put(model)

    def execute(self, requests: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        """The outputs in the order of the requests; each replica runs one request at a time."""
        with ThreadPoolExecutor(len(self.models)) as threads:
            return list(threads.map(self._execute, requests))

    def unload(self) -> None:
        for model in self.models:
            model.unload()

    def _execute(self, request: Mapping[str, Array]) -> dict[str, Array]:
        model = self._free.get()
        try:
            return model.execute(request)
        finally:
            self._free.put(model)
