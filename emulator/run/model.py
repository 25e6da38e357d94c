"""A model on the cores of an instance: its programs (buckets), weights and states.

`Code` is a loadable program: `Fast` executes a compiled graph, `run.isa.Isa` executes instructions. A request runs in
the smallest bucket that holds it: `fit` selects the bucket, which pads inputs at the end and crops outputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Protocol, TypeVar

import numpy as np

from nxpipe.emulator.analysis.graph_memory import peak_bytes, states
from nxpipe.emulator.compile import CompiledGraph
from nxpipe.emulator.errors import ExecutionError
from nxpipe.emulator.executable.tables import Port
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.isa.constraints import ProgramInvalid
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.passes.shard import Sharding
from nxpipe.emulator.run.fast import LoadedRanks, Runnable, States
from nxpipe.emulator.run.isa import Resident, SharedWeights
from nxpipe.emulator.run.status import (
    BadInput,
    CoreBusy,
    DeviceMemoryExhausted,
    ExecutionFailed,
    InvalidLoad,
    LookupOutOfBounds,
    RequestTooLong,
    Unloaded,
    translated_faults,
)


class Code(Protocol):
    """A loadable program."""

    @property
    def ports(self) -> tuple[Port, ...]: ...

    @property
    def ranks(self) -> int: ...

    @property
    def core(self) -> str | None:
        """The NeuronCore generation that the program requires; None for any."""

    @property
    def weights(self) -> Mapping[str, int]:
        """Bytes of each weight on one rank, by a key under which programs of a model share it."""

    @property
    def scratch(self) -> int:
        """Bytes on one rank that a run needs other than weights and states."""

    @property
    def states(self) -> Mapping[str, TensorType]:
        """The type of each state on one rank."""

    def load(self, weights: Mapping[str, Array], shared_weights: SharedWeights | None = None) -> Runnable:
        """Load the program; `shared_weights` are those that other programs of the model have loaded on its cores."""


@dataclass(frozen=True, eq=False)
class Fast:
    """A compiled graph, executed with the operators' numerics; it runs on any generation."""

    program: CompiledGraph
    ports: tuple[Port, ...]

    @property
    def ranks(self) -> int:
        return self.program.degree

    @property
    def core(self) -> None:
        return None

    @cached_property
    def weights(self) -> Mapping[str, int]:
        whole = self.program.whole.parameters
        return {name: _share(value.type, self.program.parameters.get(name)).nbytes for name, value in whole.items()}

    @cached_property
    def scratch(self) -> int:
        ends = sum(port.type.nbytes for port in self.ports if port.role is not Role.STATE)
        constants = sum(value.type.nbytes for value in self.program.graph.constants)
        return ends + constants + peak_bytes(self.program.graph)

    @cached_property
    def states(self) -> Mapping[str, TensorType]:
        return {name: value.type for name, value in states(self.program.graph).items()}

    def load(self, weights: Mapping[str, Array], shared_weights: SharedWeights | None = None) -> Runnable:
        return LoadedRanks(self.program.graph, weights)


def _share(whole: TensorType, piece: Sharding | None) -> TensorType:
    return piece.local(whole) if piece else whole


Sizes = Mapping[str, int]
_Code = TypeVar("_Code", bound=Code)


@dataclass(frozen=True)
class Fit:
    """The bucket selected for a request; `sizes` are the request's sizes, by the names of axes."""

    code: Code
    sizes: Sizes

    def padded(self, request: Mapping[str, Array]) -> dict[str, Array]:
        return {port.name: _padded(request[port.name], port) for port in inputs(self.code)}

    def cropped(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        ports = {port.name: port for port in self.code.ports if port.role is Role.OUTPUT}
        return {name: self._cropped(array, ports[name]) for name, array in outputs.items()}

    def _cropped(self, array: Array, port: Port) -> Array:
        lengths = [self.sizes.get(name) for name in port.sizes]
        return array[tuple(slice(length) for length in lengths)]


def inputs(code: Code) -> list[Port]:
    return [port for port in code.ports if port.role is Role.INPUT]


def fit(codes: Sequence[Code], request: Mapping[str, Array], *, with_states: bool) -> Fit:
    """The bucket with the smallest inputs among those that hold the request; raises BadInput or RequestTooLong."""
    matching = [code for code in codes if _takes(code, request, with_states=with_states)]
    if not matching:
        raise BadInput(_no_program(codes, request, with_states=with_states))
    sized = [(code, _sizes(inputs(code), request)) for code in matching]
    fitting = [Fit(code, sizes) for code, sizes in sized if _exceeded(code, sizes) is None]
    if not fitting:
        raise RequestTooLong(_too_long(sized))
    return min(fitting, key=lambda candidate: sum(port.type.nbytes for port in inputs(candidate.code)))


def _takes(code: Code, request: Mapping[str, Array], *, with_states: bool) -> bool:
    has_states = any(port.role is Role.STATE for port in code.ports)
    return request.keys() == {port.name for port in inputs(code)} and has_states == with_states


def _sizes(ports: Sequence[Port], request: Mapping[str, Array]) -> dict[str, int]:
    """The request's sizes of named axes. Raises BadInput if another axis differs from the program's."""
    sizes: dict[str, int] = {}
    for port in ports:
        shape = np.shape(request[port.name])
        names = port.sizes or ("",) * port.type.rank
        if len(shape) != port.type.rank:
            raise BadInput(f"input {port.name!r} has {len(shape)} axes, but the program takes {port.type}")
        for axis, (name, length, full) in enumerate(zip(names, shape, port.type.shape, strict=True)):
            if not name and length != full:
                raise BadInput(f"input {port.name!r} is {length} long on axis {axis}, where the program has {full}")
            if name and (not length or sizes.setdefault(name, length) != length):
                raise BadInput(
                    f"input {port.name!r} is {length} long on axis {axis}, its {name}; it must be at least 1, and "
                    f"equal for all inputs (another has {sizes.get(name, length)})"
                )
    return sizes


def _exceeded(code: Code, sizes: Sizes) -> tuple[str, int] | None:
    """The first named axis on which the request exceeds the program, with the program's size; None if it fits."""
    for port in inputs(code):
        for name, full in zip(port.sizes, port.type.shape, strict=False):
            if name and sizes[name] > full:
                return name, full
    return None


def _padded(array: Array, port: Port) -> Array:
    missing = [(0, full - length) for full, length in zip(port.type.shape, np.shape(array), strict=True)]
    return np.pad(array, missing) if any(after for _, after in missing) else np.asarray(array)


def _no_program(codes: Sequence[Code], request: Mapping[str, Array], *, with_states: bool) -> str:
    known = sorted({", ".join(port.name for port in inputs(code)) for code in codes})
    states = "with" if with_states else "without"
    return f"no program takes {', '.join(request) or 'nothing'} {states} states; the model's take {' or '.join(known)}"


def _too_long(sized: Sequence[tuple[Code, Sizes]]) -> str:
    """The error message, with the sizes of the largest program."""
    code, sizes = max(sized, key=lambda entry: sum(port.type.nbytes for port in inputs(entry[0])))
    name, full = _exceeded(code, sizes) or ("", 0)
    return (
        f"the request has a {name} of {sizes[name]}, and the model's largest program for it has {full}; shorten the "
        "request, or build the model with a larger bucket"
    )


@dataclass(eq=False)
class StateSet:
    """The states of one conversation, or of one batch of conversations, on the device."""

    model: "Model | None"
    ranks: Sequence[Resident]
    nbytes: int


class Model:
    """A model loaded by `Runtime.load`. Its programs share weights, cores and states; it runs one request at a time."""

    def __init__(
        self,
        codes: Sequence[Code],
        weights: Mapping[str, Array],
        cores: range,
        memory: int,
        release: Callable[[], None],
    ) -> None:
        self.cores = cores
        self.left = memory - required_memory(codes)  # bytes on each core
        self._release = release
        self._busy = Lock()
        self._accounting = Lock()
        if self.left < 0:
            raise DeviceMemoryExhausted(
                f"the model takes {required_memory(codes):,} bytes on each of {len(cores)} cores, which have {memory:,}"
                f"{_largest(codes)}; divide it among more cores, or load fewer of its programs"
            )
        shared_weights: SharedWeights = {}
        self._loaded: Mapping[Code, Runnable] = {code: _load(code, weights, shared_weights) for code in codes}
        self._states = _common_states(codes)

    def allocate(self) -> StateSet:
        """States for the model's programs, all zero."""
        self._require_loaded()
        nbytes = sum(type_.nbytes for type_ in self._states.values())
        with self._accounting:
            if nbytes > self.left:
                raise DeviceMemoryExhausted(
                    f"states take {nbytes:,} bytes on each core, and {self.left:,} are left; free others, or build the "
                    "model with a smaller batch or capacity"
                )
            self.left -= nbytes
        return StateSet(self, [Resident(self._states) for _ in self.cores], nbytes)

    def free(self, states: StateSet) -> None:
        with self._accounting:
            self._require_own(states)
            states.model = None
            self.left += states.nbytes

    def execute(self, request: Mapping[str, Array], states: StateSet | None = None) -> dict[str, Array]:
        """The outputs of the smallest bucket that holds the request; `states` are updated. If the program fails, it
        may have written them in part, so they are discarded."""
        with self._exclusive():
            self._require_loaded()
            if states is not None:
                self._require_own(states)
            bucket = fit(list(self._loaded), request, with_states=states is not None)
            try:
                with translated_faults():
                    outputs, after = self._loaded[bucket.code].run(
                        bucket.padded(request), _states_for(bucket.code, states)
                    )
            except (ExecutionFailed, LookupOutOfBounds):
                if states is not None:
                    self.free(states)
                raise
            if states is not None:
                for resident, updated in zip(states.ranks, after, strict=True):
                    resident.take(updated)
            return bucket.cropped(outputs)

    def unload(self) -> None:
        """Release the cores, after a running request has finished."""
        with self._busy:
            if self._loaded:
                self._loaded = {}
                self._release()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise CoreBusy(
                f"NeuronCores {self.cores.start} to {self.cores.stop - 1} are executing another request; wait for its "
                "result, or load the model on several cores"
            )
        try:
            yield
        finally:
            self._busy.release()

    def _require_loaded(self) -> None:
        if not self._loaded:
            raise Unloaded("the model was unloaded; load it again")

    def _require_own(self, states: StateSet) -> None:
        if states.model is not self:
            raise Unloaded("the states were freed, or belong to another model; allocate states of this model")


def required_memory(codes: Sequence[Code]) -> int:
    """Bytes on each core: the weights of all programs, each once, and the scratch of the largest program."""
    weights: dict[str, int] = {}
    for code in codes:
        weights |= {name: max(size, weights.get(name, 0)) for name, size in code.weights.items()}
    return sum(weights.values()) + max(code.scratch for code in codes)


def _largest(codes: Sequence[Code]) -> str:
    """The largest consumers of memory: the three largest weights, and the largest scratch."""
    weights = {name: size for code in codes for name, size in code.weights.items()}
    largest = sorted(weights, key=lambda name: (-weights[name], name))[:3]
    listed = "".join(f"{name} with {weights[name]:,}, " for name in largest)
    return f" ({listed}and scratch with {max(code.scratch for code in codes):,})"


def _load(code: Code, weights: Mapping[str, Array], shared_weights: SharedWeights) -> Runnable:
    try:
        return code.load(weights, shared_weights)
    except (ExecutionError, ProgramInvalid) as fault:
        raise InvalidLoad(str(fault)) from fault


def _common_states(codes: Sequence[Code]) -> dict[str, TensorType]:
    """The states of all programs; raises InvalidLoad if programs differ in the type of a state."""
    common: dict[str, TensorType] = {}
    for code in codes:
        for name, type_ in code.states.items():
            if common.setdefault(name, type_) != type_:
                raise InvalidLoad(f"state {name!r} is {common[name]} in one program and {type_} in another")
    return common


def _states_for(code: Code, states: StateSet | None) -> States | None:
    if states is None:
        return None
    return [resident.only(code.states) for resident in states.ranks]
