"""A machine for the probes, in this process: the stand-in compiler, and cores that compute by XLA on the CPU, with
defects of either."""

import hashlib
import io
import tarfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from nxpipe.emulator.executable.neff import HEADER, open_neff
from nxpipe.emulator.hlo.constraints import CheckedModule, HloLimits
from nxpipe.emulator.hlo.corpus import corpus
from nxpipe.emulator.hlo.probe import Probe
from nxpipe.emulator.hlo.schema import (
    ALIAS_SUFFIX,
    INPUT_NAMES,
    ComputationField,
    HloModule,
    InstructionField,
    ModuleField,
)
from nxpipe.emulator.hlo.wire import Message
from nxpipe.emulator.run.devices.environment import RankPlacement
from nxpipe.emulator.run.devices.faults import RankHung
from nxpipe.emulator.run.devices.protocol import TensorInfo
from nxpipe.emulator.run.devices.ranks import Rank, function_of
from nxpipe.emulator.run.status import InvalidLoad
from nxpipe.pipeline.util.errors import BuildRefused
from tests.hlo.xla_cpu import LoadedProto
from tests.neuronx.stand_in import Failure, compiled, interface, parser

_COMPUTED: Final[dict[str, list[list[np.ndarray]]]] = {}  # by module and inputs; equal for all machines


@dataclass
class Defects:
    """Changes of the machine's behaviour; none by default."""

    refused: Callable[[HloModule], str] = lambda module: ""  # the error of the compiler for a module
    change: Callable[[Message], None] = lambda proto: None  # what the compiler makes of a module
    drops_unused: bool = False
    inputs: Callable[[np.ndarray], np.ndarray] = lambda array: array  # as the device reads them
    outputs: Callable[[list[np.ndarray]], list[np.ndarray]] = lambda arrays: arrays  # of one rank, as it writes them
    ranks: Callable[[list[Any]], list[Any]] = lambda ranks: ranks  # the order of ranks that collectives see
    keeps_states: bool = False  # an aliased buffer stays as it was
    hangs: Callable[[HloModule], bool] = lambda module: False
    cores: int = 0  # physical cores that each NEFF is for, whatever was requested
    setting: int = 0  # physical cores of the runtime's logical cores, whatever was set


@dataclass
class ProbeMachine:
    folder: Path
    defects: Defects = field(default_factory=Defects)
    compilations: list[str] = field(default_factory=list)

    def compile(self, probe: Probe, target: str) -> bytes:
        self.compilations.append(probe.name)
        if refusal := self.defects.refused(HloModule.read(probe.module)):
            raise BuildRefused(f"{probe.name}: {refusal}")
        proto = Message.parse(probe.module)
        self.defects.change(proto)
        try:
            (self.folder / "module.pb").write_bytes(proto.encode())
            words = ("compile", str(self.folder / "module.pb"), "--framework", "XLA", "--target", target)
            cores = ("--lnc", str(self.defects.cores or probe.physical_cores))
            return compiled(parser().parse_args((*words, *cores)), drops_unused=self.defects.drops_unused)
        except Failure as error:
            raise BuildRefused(f"{probe.name}: {error}") from error

    def launch(self, host: str, job: Any, *, world: int, limit: float, placement: RankPlacement) -> list[Any]:
        """The ranks of a program in threads, as `run_ranks` has them in processes."""
        program = _Program(Path(job["program"]), world, self.defects)
        if (setting := self.defects.setting or placement.physical_cores) != program.physical_cores:
            raise InvalidLoad(
                f"the program is for {program.physical_cores} physical cores, and the runtime has {setting}"
            )
        if self.defects.hangs(program.module):
            raise RankHung(f"no progress within the limit of {limit:g} s: rank 0 since it began to 'execute run 1'")
        results: dict[int, Any] = {}

        def run(number: int) -> None:
            rank = Rank(number, world, 0, _Core(program, number), lambda report: None)  # type: ignore[arg-type]
            try:
                results[number] = function_of(host)(rank, job)
            except BaseException as error:
                results[number] = error
                program.barrier.abort()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results.values():
            if isinstance(result, BaseException):
                raise result
        return [results[number] for number in range(world)]


class _Program:
    """A NEFF that all ranks have loaded."""

    def __init__(self, path: Path, world: int, defects: Defects) -> None:
        with tarfile.open(fileobj=io.BytesIO(path.read_bytes()[HEADER.size :])) as archive:
            member = archive.extractfile("hlo.pb")
            assert member is not None
            self.proto = member.read()
        self.module, self.world, self.defects = HloModule.read(self.proto), world, defects
        neff = open_neff(path)
        self.physical_cores = neff.physical_cores
        self.inputs, self.outputs = neff.inputs, neff.outputs
        parameters = {
            each.proto.number(InstructionField.PARAMETER_NUMBER): each
            for each in CheckedModule(self.module, "inf2", HloLimits()).parameters()
        }
        self.arguments = [
            (each.attribute(INPUT_NAMES) or f"input{number}", each.shape) for number, each in sorted(parameters.items())
        ]
        self.results = [each.name for each in interface(self.module) if each.kind == "output"]
        self.barrier = threading.Barrier(world)
        self.given: dict[int, list[np.ndarray]] = {}

    def computed(self, rank: int, given: list[np.ndarray]) -> list[np.ndarray]:
        self.given[rank] = given
        self.barrier.wait(60)
        order = self.defects.ranks(list(range(self.world)))
        rows = _computed(self.proto, [self.given[number] for number in order])
        self.barrier.wait(60)
        return rows[order.index(rank)]


def _computed(proto: bytes, inputs: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    digest = hashlib.sha256(proto)
    for array in (array for row in inputs for array in row):
        digest.update(array.tobytes())
    if digest.hexdigest() not in _COMPUTED:
        plain = Message.parse(_twins().get(_nameless(proto), proto))
        plain.remove(ModuleField.INPUT_OUTPUT_ALIAS)  # buffers are this machine's
        _COMPUTED[digest.hexdigest()] = LoadedProto(plain.encode(), len(inputs)).run(inputs)
    return _COMPUTED[digest.hexdigest()]


@cache
def _twins() -> dict[bytes, bytes]:
    """Modules that XLA's CPU computes in place of those with custom calls."""
    return {_nameless(probe.module): probe.twin for probe in corpus() if probe.twin}


def _nameless(proto: bytes) -> bytes:
    module = Message.parse(proto)
    without_names("parameter", "tuple")(module)
    return module.encode()


class _Tensor:
    def __init__(self, nbytes: int) -> None:
        self.core, self.nbytes, self._data = 0, nbytes, np.zeros(nbytes, np.uint8)

    def write(self, array: np.ndarray) -> None:
        assert array.nbytes == self.nbytes
        self._data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()

    def read(self) -> np.ndarray:
        return self._data.copy()


class _Core:
    """The runtime of one rank, as far as the host function uses it."""

    def __init__(self, program: _Program, rank: int) -> None:
        self._program, self._rank = program, rank

    def load(self, path: Path, *, core: int, rank: int, world: int) -> Any:
        program = self._program
        assert (rank, world) == (self._rank, program.world)
        return SimpleNamespace(
            inputs={each.name: TensorInfo(each.name, each.nbytes) for each in program.inputs},
            outputs={each.name: TensorInfo(each.name, each.nbytes) for each in program.outputs},
            execute=self._execute,
        )

    def allocate(self, nbytes: int, *, core: int, name: str) -> _Tensor:
        return _Tensor(nbytes)

    def _execute(self, inputs: Mapping[str, _Tensor], outputs: Mapping[str, _Tensor]) -> None:
        program = self._program
        assert {name: each.nbytes for name, each in inputs.items()} == {e.name: e.nbytes for e in program.inputs}
        assert {name: each.nbytes for name, each in outputs.items()} == {e.name: e.nbytes for e in program.outputs}
        given = []
        for name, shape in program.arguments:
            raw = inputs[name].read() if name in inputs else np.zeros(shape.nbytes, np.uint8)
            given.append(program.defects.inputs(raw.view(_numpy(shape.element_type)).reshape(shape.dimensions)))
        results = program.defects.outputs(program.computed(self._rank, given))
        states = {each.removesuffix(ALIAS_SUFFIX) for each in inputs}
        for name, result in zip(program.results, results, strict=True):
            if not (program.defects.keeps_states and name in states):
                outputs[name].write(result.reshape(-1).view(np.uint8))


def _numpy(element: str) -> np.dtype[Any]:
    import ml_dtypes

    narrow = {"bf16": "bfloat16", "f8e5m2": "float8_e5m2", "f8e4m3": "float8_e4m3", "f8e4m3fn": "float8_e4m3fn"}
    if element in narrow:
        narrow_type: np.dtype[Any] = np.dtype(getattr(ml_dtypes, narrow[element]))
        return narrow_type
    kind = {"s": "i", "u": "u", "f": "f"}[element[0]]
    dtype: np.dtype[Any] = np.dtype(f"{kind}{int(element[1:]) // 8}")
    return dtype


def without_names(*opcodes: str) -> Callable[[Message], None]:
    """A compiler that ignores the names in the attributes of these opcodes."""

    def change(proto: Message) -> None:
        for computation in proto.messages(ModuleField.COMPUTATIONS):
            for each in computation.messages(ComputationField.INSTRUCTIONS):
                if each.text(InstructionField.OPCODE) in opcodes:
                    each.remove(InstructionField.FRONTEND_ATTRIBUTES)

    return change


def uses(opcode: str) -> Callable[[HloModule], bool]:
    return lambda module: any(each.opcode == opcode for part in module.computations for each in part.instructions)


def refuses(opcode: str) -> Callable[[HloModule], str]:
    return lambda module: f"[NCC_EVRF001] Operator {opcode} is not supported" if uses(opcode)(module) else ""


def refuses_type(element: str) -> Callable[[HloModule], str]:
    def refused(module: HloModule) -> str:
        shapes = (shape for part in module.computations for each in part.instructions for shape in each.shape.arrays())
        return f"[NCC_ESPP004] type {element}" if any(shape.element_type == element for shape in shapes) else ""

    return refused


def refuses_combination(element: str) -> Callable[[HloModule], str]:
    def refused(module: HloModule) -> str:
        checked = CheckedModule(module, "trn1", HloLimits())
        scatters = (each for _, each in checked.each("scatter") if each.shape.element_type == element)
        return "[NCC_EVRF016]" if any(checked.combiner(each) not in (None, "parameter") for each in scatters) else ""

    return refused
