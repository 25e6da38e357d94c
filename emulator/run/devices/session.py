"""The host side of one rank: the programs of a model, and the tensors that they share on the rank's core.

The same code runs above every implementation. Tensors have the type and shape that the manifest gives for one rank;
inputs of equal name and type are one tensor for all programs, so weights and states are on the core once.

`load_model` needs nothing of a graph: the interface of a NEFF has the types of all tensors on a rank, and the
preparation of each weight. Weights are mapped from a file and prepared one at a time. `describe` and `replay` are host
functions of `run_ranks`.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np

from nxpipe.emulator.core.arithmetic import decode, encode, raw
from nxpipe.emulator.executable.interface import RANK, Argument, Interface, interface_from
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa import program as isa
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.devices.faults import DeviceFailure
from nxpipe.emulator.run.devices.protocol import Clock, DeviceModel, DeviceTensor, Timing, match
from nxpipe.emulator.run.devices.ranks import Document, Rank
from nxpipe.emulator.run.status import BadInput, InvalidLoad

Types = Mapping[str, TensorType]
_Key: TypeAlias = tuple[str, TensorType]
_RANK: Final = (isa.RANK, RANK)  # the input with the number of the rank, in an .nxe and in a NEFF

_LENGTH: Final = struct.Struct("<Q")
_LONGEST_HEADER: Final = 100 << 20  # bytes: the limit of the safetensors format
_NUMBERS: Final = {f"{sign}{8 * size}": np.dtype(f"{sign.lower()}{size}") for sign in "IU" for size in (1, 2, 4, 8)}
_TYPES: Final[Mapping[str, Any]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "BOOL": np.bool_,
    **_NUMBERS,
}


@dataclass(frozen=True)
class RankProgram:
    """A program's file and its interface on one rank. `aliases` has the input of each output that is updated in place;
    an output with the name of an input is one without being listed.

    The input `own rank` of an .nxe, `own_rank` of a NEFF, receives the number of the rank."""

    path: Path
    inputs: Types
    outputs: Types
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def states(self) -> dict[str, str]:
        """The input of each output that is a state."""
        return {name: name for name in self.outputs if name in self.inputs} | dict(self.aliases)


class _LoadedProgram:
    """A program with its tensors by the names of the program."""

    def __init__(self, program: RankProgram, model: DeviceModel) -> None:
        self.program, self.model = program, model
        self.inputs = match(_sizes(program.inputs), model.inputs, "input")
        self.outputs = match(_sizes(program.outputs), model.outputs, "output")
        self.bound_inputs: dict[str, DeviceTensor] = {}
        self.bound_outputs: dict[str, DeviceTensor] = {}


class RankSession:
    """Programs on the core of a rank, loaded in the order of their names, which is the same on all ranks."""

    def __init__(self, rank: Rank, programs: Mapping[str, RankProgram]) -> None:
        self._rank = rank
        self._inputs: dict[_Key, DeviceTensor] = {}
        self._unwritten: set[_Key] = set()
        self._programs: dict[str, _LoadedProgram] = {}
        for name, program in sorted(programs.items()):
            rank.step(f"load {name}")
            model = rank.runtime.load(program.path, core=rank.core, rank=rank.number, world=rank.world)
            self._programs[name] = _LoadedProgram(program, model)
        self._require_equal_states()
        rank.step("allocate tensors")
        for loaded in self._programs.values():
            self._bind(loaded)

    def write(self, name: str, array: Array) -> None:
        """Write a weight, an input or a state, for all programs that read it with this shape."""
        declared = [program.inputs[name] for program in self._files() if name in program.inputs]
        fitting = {type_ for type_ in declared if type_.shape == np.shape(array)}
        if not fitting:
            known = " or ".join(sorted({str(type_) for type_ in declared})) or "no input of a program"
            raise BadInput(f"{name!r} was written as {list(np.shape(array))}, and it is {known}")
        for type_ in fitting:
            key = _key(name, type_)
            if key in self._inputs:  # compilers remove inputs that nothing reads
                self._inputs[key].write(_bits(name, type_, array))
                self._unwritten.discard(key)

    def lacks(self, name: str, type_: TensorType) -> bool:
        """True if a program reads an input of this name and type, and it was not written yet."""
        return _key(name, type_) in self._unwritten

    def place(self, name: str, type_: TensorType, array: Array) -> None:
        """Write an input of this type, from an array of the device's elements."""
        key = _key(name, type_)
        self._inputs[key].write(array)
        self._unwritten.discard(key)

    def read(self, name: str) -> Array:
        """A state, or the latest value that was written to an input."""
        for program in self._files():
            if name in program.inputs and (key := _key(name, program.inputs[name])) in self._inputs:
                return _array(self._inputs[key], program.inputs[name])
        raise BadInput(f"no program has an input {name!r}; its name is not that of the manifest, or nothing reads it")

    def run(self, program: str, inputs: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Write the inputs, execute, and read the outputs other than states."""
        loaded = self._programs[program]
        for name, array in (inputs or {}).items():
            self.write(name, array)
        self._require_written(loaded)
        self._rank.step(f"execute {program}")
        loaded.model.execute(loaded.bound_inputs, loaded.bound_outputs)
        states = loaded.program.states
        return {
            name: _array(loaded.bound_outputs[loaded.outputs[name]], type_)
            if name in loaded.outputs
            else np.empty(type_.shape, type_.dtype.held)
            for name, type_ in loaded.program.outputs.items()
            if name not in states
        }

    @property
    def has_device_clock(self) -> bool:
        return self._rank.runtime.description.implementation == "nrtpy"

    def time(self, program: str, *, runs: int, warmup: int = 0, clock: Clock | None = None) -> Timing:
        """Durations of a program on the tensors as they are; states advance with each execution."""
        loaded = self._programs[program]
        self._require_written(loaded)
        self._rank.step(f"time {program}")
        return loaded.model.time(loaded.bound_inputs, loaded.bound_outputs, runs=runs, warmup=warmup, clock=clock)

    def _bind(self, loaded: _LoadedProgram) -> None:
        program, states = loaded.program, loaded.program.states
        for name, own in loaded.inputs.items():
            loaded.bound_inputs[own] = self._input(name, program.inputs[name], is_state=name in states.values())
        for name, own in loaded.outputs.items():
            if name in states:
                # A state whose input was removed is written only: it needs memory as any output.
                loaded.bound_outputs[own] = self._input(states[name], program.inputs[states[name]], is_state=True)
            else:
                nbytes = program.outputs[name].on_device.nbytes
                loaded.bound_outputs[own] = self._rank.runtime.allocate(nbytes, core=self._rank.core, name=name)

    def _input(self, name: str, type_: TensorType, *, is_state: bool) -> DeviceTensor:
        """The tensor of an input; states begin as zeros."""
        key = _key(name, type_)
        if key not in self._inputs:
            nbytes = type_.on_device.nbytes
            tensor = self._inputs[key] = self._rank.runtime.allocate(nbytes, core=self._rank.core, name=name)
            if is_state:
                tensor.write(np.zeros(nbytes, np.uint8))
            elif name in _RANK:
                tensor.write(_bits(name, type_, np.full(type_.shape, self._rank.number)))
            else:
                self._unwritten.add(key)
        return self._inputs[key]

    def _files(self) -> list[RankProgram]:
        return [loaded.program for loaded in self._programs.values()]

    def _require_written(self, loaded: _LoadedProgram) -> None:
        read = {_key(name, loaded.program.inputs[name]) for name in loaded.inputs}
        unwritten = sorted(name for name, _ in self._unwritten & read)
        if unwritten:
            raise BadInput(f"{', '.join(unwritten)} were not written; write all weights and inputs before a run")

    def _require_equal_states(self) -> None:
        """Programs that differ in the type of a state would each have a tensor of their own, without an error."""
        types: dict[str, TensorType] = {}
        for loaded in self._programs.values():
            for name in loaded.program.states.values():
                type_ = loaded.program.inputs[name]
                if types.setdefault(name, type_) != type_:
                    raise InvalidLoad(f"state {name!r} is {types[name]} in one program and {type_} in another")


def _key(name: str, type_: TensorType) -> _Key:
    """What programs share a tensor by: its name, shape and type on the device."""
    return name, type_.on_device


def _sizes(types: Types) -> dict[str, int]:
    return {name: type_.on_device.nbytes for name, type_ in types.items()}


def _bits(name: str, type_: TensorType, array: Array) -> Array:
    """The words of an array on the device."""
    target, values = type_.dtype.on_device, np.asarray(array)
    if values.dtype == target.stored:
        return np.ascontiguousarray(values)
    if target.is_float:
        return encode(np.ascontiguousarray(values, np.float32), target)
    words = values.astype(target.stored)
    if not np.array_equal(words, values):
        raise BadInput(f"{name!r} holds a number beyond the range of {target.value}, its type on the device")
    return words


def _array(tensor: DeviceTensor, type_: TensorType) -> Array:
    """The values of a tensor in the type that holds them on the host."""
    target = type_.dtype.on_device
    values = decode(tensor.read().view(raw(target)).reshape(type_.shape), target)
    return values.astype(type_.dtype.held)


class WeightsFile(Mapping[str, Array]):
    """The tensors of a safetensors file, which is mapped into memory: a tensor is read where it is used."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                header = json.loads(file.read(min(length, _LONGEST_HEADER)))
            metadata = header.pop("__metadata__", {})
            self._entries = {name: _placed(name, entry, metadata) for name, entry in header.items()}
            start, size = _LENGTH.size + length, path.stat().st_size
            self._bytes: Array = np.memmap(path, np.uint8, "r", start) if size > start else np.empty(0, np.uint8)
            self._require_all_bytes()
        except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as fault:
            raise InvalidLoad(f"{path.name} is no file of weights ({fault}); fetch the artifact again") from fault

    def __getitem__(self, name: str) -> Array:
        dtype, shape, start, end = self._entries[name]
        array: Array = self._bytes[start:end].view(dtype).reshape(shape)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _require_all_bytes(self) -> None:
        end = max((end for *_, end in self._entries.values()), default=0)
        if end > len(self._bytes):
            raise ValueError(f"it ends {end - len(self._bytes):,} bytes too early")


def _placed(name: str, entry: Any, metadata: Any) -> tuple[Any, tuple[int, ...], int, int]:
    """The type, shape and place of a tensor. A type that the format lacks is in the metadata (`file_layout`)."""
    dtype, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
    if (text := metadata.get(f"dtype of {name}")) is not None:
        own, _, dimensions = text.partition(" ")
        dtype, shape = DType(own).stored, tuple(json.loads(dimensions))
    start, end = entry["data_offsets"]
    return dtype, shape, start, end


def rank_program(neff: Path, interface: Interface) -> RankProgram:
    """A NEFF as a session loads it, with the types of one rank."""
    inputs = {argument.name: argument.type for argument in interface.arguments}
    outputs = {result.name: result.type for result in interface.results}
    aliases = {
        interface.results[argument.alias].name: argument.name
        for argument in interface.arguments
        if argument.alias is not None
    }
    return RankProgram(neff, inputs, outputs, aliases)


def load_model(rank: Rank, programs: Mapping[str, tuple[Path, Interface]], weights: Mapping[str, Array]) -> RankSession:
    """The programs of a model on a rank's core, by name, with all weights and with states of zeros."""
    for name, (_, interface) in programs.items():
        if interface.degree != rank.world:
            raise InvalidLoad(f"{name} is a program of {interface.degree} ranks, and {rank.world} load it")
    session = RankSession(rank, {name: rank_program(*files) for name, files in programs.items()})
    for argument in _parameters([interface for _, interface in programs.values()]):
        if session.lacks(argument.name, argument.type):
            rank.step(f"write {argument.name}")
            if argument.name not in weights:
                raise InvalidLoad(f"the file of weights has no {argument.name!r}; fetch the artifact again")
            session.place(argument.name, argument.type, argument.on_rank(weights, rank.number))
    return session


def _parameters(interfaces: list[Interface]) -> list[Argument]:
    """Each weight of the programs once for each type in which they read it."""
    found: dict[tuple[str, str], Argument] = {}
    for interface in interfaces:
        for argument in interface.of_role(Role.PARAMETER):
            known = found.setdefault((argument.name, str(argument.type)), argument)
            if known != argument:
                raise InvalidLoad(f"two programs prepare {argument.name!r} differently; build the model again")
    return list(found.values())


def describe(rank: Rank, _: Document) -> Document:
    """The device of a rank: family, implementation, version of its runtime."""
    return asdict(rank.runtime.description)


def replay(rank: Rank, argument: Document) -> Document:
    """Run each program once on each of its batches, write the results, and measure it; the timing by program, none if
    `runs` is 0.

    The argument has `weights`, a file; `runs` and `warmup`; and `programs`: by name the files `neff` and `interface`,
    and `batches`, each with an .npz file of `inputs` for every rank (those that are `requested`, in order) and one for
    its `answers`.
    """
    files = argument["programs"]
    interfaces = {name: interface_from(Path(own["interface"]).read_bytes()) for name, own in files.items()}
    programs = {name: (Path(files[name]["neff"]), interface) for name, interface in interfaces.items()}
    session = load_model(rank, programs, WeightsFile(Path(argument["weights"])))
    timings: dict[str, Document] = {}
    for name, interface in sorted(interfaces.items()):
        for batch in files[name]["batches"]:
            inputs, answers = (Path(batch[end][rank.number]) for end in ("inputs", "answers"))
            _answer(session, name, interface, inputs, answers)
        if argument["runs"]:
            timing = _measured(session, name, argument["runs"], argument["warmup"])
            timings[name] = {"clock": timing.clock, "durations_ms": timing.durations_ms}
    return timings


def _answer(session: RankSession, program: str, interface: Interface, inputs: Path, answers: Path) -> None:
    """Run a program on the inputs of a file, and write a file of its results."""
    with np.load(inputs) as arrays:
        given = {each.name: arrays[key] for each, key in zip(interface.requested, arrays.files, strict=True)}
    outputs = session.run(program, given)
    np.savez(
        answers,
        *(outputs[each.name] if each.name in outputs else session.read(each.name) for each in interface.results),
    )


def _measured(session: RankSession, program: str, runs: int, warmup: int) -> Timing:
    """Durations by the device's own clock, or by the host's where the runtime has no trace of the device.

    A runtime that fails to trace has executed the program as often, so that the ranks stay in step."""
    if not session.has_device_clock:
        return session.time(program, runs=runs, warmup=warmup, clock="host")
    try:
        return session.time(program, runs=runs, warmup=warmup, clock="device")
    except DeviceFailure:
        return session.time(program, runs=runs, warmup=warmup, clock="host")
