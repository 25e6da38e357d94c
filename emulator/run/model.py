"""A model on its cores: its programs, its weights, and the states that stay there between requests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from nxpipe.emulator.errors import ExecutionError, IndexOutOfRange, MissingTensor, WrongTensor
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.isa.constraints import ProgramInvalid
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.buckets import fit
from nxpipe.emulator.run.code import Code
from nxpipe.emulator.run.ranks import Runnable, States
from nxpipe.emulator.run.resident import Resident, Shelf
from nxpipe.emulator.run.status import (
    BadInput,
    CoreBusy,
    DeviceMemoryExhausted,
    ExecutionFailed,
    InvalidLoad,
    LookupOutOfBounds,
    Unloaded,
)


@dataclass(eq=False)
class StateSet:
    """States of one conversation, or of one batch of them, on the device."""

    model: "Model | None"
    ranks: Sequence[Resident]
    nbytes: int


class Model:
    """Made by `Runtime.load`. Programs share weights, cores and states; one request runs at a time."""

    def __init__(
        self, codes: Sequence[Code], weights: Mapping[str, Array], cores: range, memory: int, leave: Callable[[], None]
    ) -> None:
        self.cores = cores
        self.left = memory - taken(codes)  # bytes on each core
        self._leave = leave
        self._busy = Lock()
        self._accounts = Lock()
        if self.left < 0:
            raise DeviceMemoryExhausted(
                f"the model takes {taken(codes):,} bytes on each of {len(cores)} cores, which have {memory:,}"
                f"{_largest(codes)}; divide it among more cores, or load fewer of its programs"
            )
        shelf: Shelf = {}
        self._loaded: Mapping[Code, Runnable] = {code: _load(code, weights, shelf) for code in codes}
        self._states = _common_states(codes)

    def allocate(self) -> StateSet:
        """States for the model's programs, all zero."""
        self._require_loaded()
        nbytes = sum(type_.nbytes for type_ in self._states.values())
        with self._accounts:
            if nbytes > self.left:
                raise DeviceMemoryExhausted(
                    f"states take {nbytes:,} bytes on each core, and {self.left:,} are left; free others, or build the "
                    "model with a smaller batch or capacity"
                )
            self.left -= nbytes
        return StateSet(self, [Resident(self._states) for _ in self.cores], nbytes)

    def free(self, states: StateSet) -> None:
        with self._accounts:
            self._require_own(states)
            states.model = None
            self.left += states.nbytes

    def execute(self, request: Mapping[str, Array], states: StateSet | None = None) -> dict[str, Array]:
        """The answer of the smallest program that the request fits into; `states` are those of after it then. A program
        that goes wrong leaves them half-written, so they are given up."""
        with self._alone():
            self._require_loaded()
            if states is not None:
                self._require_own(states)
            chosen = fit(list(self._loaded), request, with_states=states is not None)
            try:
                with _refusals():
                    outputs, after = self._loaded[chosen.code].run(
                        chosen.padded(request), _those_of(chosen.code, states)
                    )
            except (ExecutionFailed, LookupOutOfBounds):
                if states is not None:
                    self.free(states)
                raise
            if states is not None:
                for own, new in zip(states.ranks, after, strict=True):
                    own.take(new)
            return chosen.cut(outputs)

    def unload(self) -> None:
        """Gives the cores back. A request that is under way is finished first."""
        with self._busy:
            if self._loaded:
                self._loaded = {}
                self._leave()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise CoreBusy(
                f"NeuronCores {self.cores.start} to {self.cores.stop - 1} are carrying out another request; wait for "
                "its answer, or load the model on several cores"
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
            raise Unloaded("these states were given up, or belong to another model; allocate some of this one")


def taken(codes: Sequence[Code]) -> int:
    """Bytes on each core: weights once, scratch of the largest."""
    weights: dict[str, int] = {}
    for code in codes:
        weights |= {name: max(size, weights.get(name, 0)) for name, size in code.weights.items()}
    return sum(weights.values()) + max(code.scratch for code in codes)


def _largest(codes: Sequence[Code]) -> str:
    """What takes most of it: a few weights by name, and the scratch of the program that needs most."""
    weights = {name: size for code in codes for name, size in code.weights.items()}
    most = sorted(weights, key=lambda name: (-weights[name], name))[:3]
    named = "".join(f"{name} with {weights[name]:,}, " for name in most)
    return f" ({named}and scratch with {max(code.scratch for code in codes):,})"


def _load(code: Code, weights: Mapping[str, Array], shelf: Shelf) -> Runnable:
    try:
        return code.load(weights, shelf)
    except (ExecutionError, ProgramInvalid) as fault:
        raise InvalidLoad(str(fault)) from fault


def _common_states(codes: Sequence[Code]) -> dict[str, TensorType]:
    """Programs that share a state must agree on it."""
    common: dict[str, TensorType] = {}
    for code in codes:
        for name, type_ in code.states.items():
            if common.setdefault(name, type_) != type_:
                raise InvalidLoad(f"state {name!r} is {common[name]} in one program and {type_} in another")
    return common


def _those_of(code: Code, states: StateSet | None) -> States | None:
    if states is None:
        return None
    return [own.only(code.states) for own in states.ranks]


@contextmanager
def _refusals() -> Iterator[None]:
    """What goes wrong while a program runs, as the runtime says it."""
    try:
        yield
    except IndexOutOfRange as fault:
        raise LookupOutOfBounds(str(fault)) from fault
    except (MissingTensor, WrongTensor) as fault:
        raise BadInput(str(fault)) from fault
    except ExecutionError as fault:
        raise ExecutionFailed(str(fault)) from fault
