"""The protocol of devices: programs on cores, tensors as bytes in device memory, and what all implementations check.

docs/reference/devices.md is the contract. A runtime belongs to one process; its objects refuse after it was closed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, ClassVar, Final, Literal, Protocol, Self, TypeAlias

from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.devices.faults import DeviceFailure
from nxpipe.emulator.run.status import BadInput, InvalidLoad, RuntimeClosed

Clock: TypeAlias = Literal["host", "device", "predicted"]

_MUST_ALIAS: Final = ".must_alias_input"  # appended to the input of a state by some producers of HLO
_LONGEST_NAME: Final = 255  # bytes, by the runtime's structures


def plain(name: str) -> str:
    """A tensor's name without the suffix of aliased inputs."""
    return name.removesuffix(_MUST_ALIAS)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a loaded program, as the program reports it. Only `nbytes` is reliable; None: not reported."""

    name: str
    nbytes: int
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Timing:
    """Durations of executions in milliseconds, by the clock that measured them."""

    clock: Clock
    durations_ms: tuple[float, ...]

    @property
    def p50_ms(self) -> float:
        return self.percentile(50)

    @property
    def p99_ms(self) -> float:
        return self.percentile(99)

    def percentile(self, percent: float) -> float:
        """The smallest duration that at least `percent` of the executions do not exceed."""
        return sorted(self.durations_ms)[max(ceil(len(self.durations_ms) * percent / 100), 1) - 1]


@dataclass(frozen=True)
class CoreCounters:
    """Memory of one core in bytes, and executions on it since the runtime was opened."""

    memory_used: int
    memory_limit: int
    executions: int


@dataclass(frozen=True)
class DeviceDescription:
    """What a measurement was made on. `version` is that of the runtime's library, or the emulated generation."""

    implementation: str
    family: str
    cores: int
    version: str


class DeviceTensor(Protocol):
    """Bytes in the memory of one core."""

    @property
    def name(self) -> str: ...

    @property
    def core(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def write(self, array: Array) -> None:
        """Copy the bytes of an array, which has the size of the tensor."""

    def read(self) -> Array:
        """A copy of all bytes."""

    def free(self) -> None: ...


Binding: TypeAlias = Mapping[str, DeviceTensor]  # by the program's names


class DeviceModel(Protocol):
    """A program on one core."""

    @property
    def name(self) -> str: ...

    @property
    def core(self) -> int: ...

    @property
    def inputs(self) -> Mapping[str, TensorInfo]: ...

    @property
    def outputs(self) -> Mapping[str, TensorInfo]: ...

    def execute(self, inputs: Binding, outputs: Binding) -> None:
        """Run the program once. Returns when the outputs are written."""

    def time(
        self, inputs: Binding, outputs: Binding, *, runs: int, warmup: int = 0, clock: Clock | None = None
    ) -> Timing:
        """Durations of `runs` executions after `warmup`, by the implementation's own clock unless given."""

    def unload(self) -> None: ...


class DeviceRuntime(Protocol):
    """The cores of one process."""

    @property
    def description(self) -> DeviceDescription: ...

    def load(self, program: Path, *, core: int = 0, rank: int = 0, world: int = 1) -> DeviceModel:
        """Load a program as one rank of `world`; blocks until all ranks have loaded it."""

    def allocate(self, nbytes: int, *, core: int = 0, name: str = "") -> DeviceTensor:
        """A tensor of undefined content."""

    def counters(self, core: int = 0) -> CoreCounters: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None: ...


class ProcessRuntime:
    """The part of a runtime that implementations share: it is opened once in a process, and is open until closed."""

    _claimed: ClassVar[list[object]] = []  # libraries that this process has opened, also if they were closed again
    _is_open = True

    @classmethod
    def require_unopened(cls, library: object) -> None:
        if library in cls._claimed:
            raise DeviceFailure("the runtime of this process was opened before; open another one in a new process")

    @classmethod
    def claim(cls, library: object) -> None:
        cls._claimed.append(library)

    def close(self) -> None:
        raise NotImplementedError

    def require_open(self) -> None:
        if not self._is_open:
            raise RuntimeClosed("the runtime was closed; open another one in a new process")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_program(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as fault:
        raise InvalidLoad(
            f"the program {path.name} cannot be read: {fault.strerror}; fetch the artifact again"
        ) from fault


def require_size(nbytes: int, name: str) -> None:
    """Refuse tensors that no runtime can allocate."""
    if nbytes <= 0:
        raise InvalidLoad(f"tensor {name!r} has {nbytes} bytes, and a device holds none of 0 bytes; leave it out")
    if len(name.encode()) > _LONGEST_NAME:
        raise InvalidLoad(f"the name {name[:40]!r}... exceeds {_LONGEST_NAME} bytes; shorten it")


def require_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise InvalidLoad(f"rank {rank} is not one of {world}; ranks count from 0")


def require_bytes(tensor: DeviceTensor, nbytes: int) -> None:
    if nbytes != tensor.nbytes:
        raise BadInput(f"tensor {tensor.name!r} has {tensor.nbytes:,} bytes, and {nbytes:,} are written; pass all")


def require_binding(model: DeviceModel, inputs: Binding, outputs: Binding) -> None:
    """Refuse bindings that are not exactly those of the program: names, sizes, and the core."""
    for role, expected, given in (("input", model.inputs, inputs), ("output", model.outputs, outputs)):
        problems = [f"{name!r} is missing" for name in sorted(expected.keys() - given.keys())]
        problems += [f"{name!r} is unknown" for name in sorted(given.keys() - expected.keys())]
        for name in sorted(expected.keys() & given.keys()):
            tensor, needed = given[name], expected[name].nbytes
            if tensor.nbytes != needed:
                problems.append(f"{name!r} has {tensor.nbytes:,} bytes for {needed:,}")
            elif tensor.core != model.core:
                problems.append(f"{name!r} is on core {tensor.core}, and the program on core {model.core}")
        if problems:
            raise BadInput(f"{role}s of {model.name}: {'; '.join(problems)}; bind each tensor of the program")


def require_runs(runs: int, warmup: int) -> None:
    if runs < 1 or warmup < 0:
        raise BadInput(f"{runs} runs after {warmup} for warm-up were requested; time at least one run")


def match(
    declared: Mapping[str, int], reported: Mapping[str, TensorInfo], role: Literal["input", "output"]
) -> dict[str, str]:
    """The program's name of each declared tensor (name -> bytes) that the program has.

    A declared input may be absent, because compilers remove inputs that nothing reads, and so may an output of 0 bytes.
    Raises InvalidLoad for every other difference.
    """
    by_plain = {plain(name): info for name, info in reported.items()}
    problems = [f"{name!r} is not declared" for name in sorted(by_plain.keys() - declared.keys())]
    for name, nbytes in sorted(declared.items()):
        if name not in by_plain:
            if role == "output" and nbytes:
                problems.append(f"{name!r} is missing")
        elif by_plain[name].nbytes != nbytes:
            problems.append(f"{name!r} has {by_plain[name].nbytes:,} bytes, and {nbytes:,} are declared")
    if len(by_plain) < len(reported):
        problems.append("two names differ in the suffix of aliased inputs only")
    if problems:
        raise InvalidLoad(
            f"{role}s of the program are not those of its manifest: {'; '.join(problems)}; build the program again"
        )
    return {name: by_plain[name].name for name in declared if name in by_plain}
