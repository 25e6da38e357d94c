"""The loader of devices: NEFFs with their interfaces, and the file of a model's weights, as the session of one rank.

It needs nothing of a graph: an interface has the types of all tensors on a rank, and the preparation of each weight.
Weights are mapped from the file and prepared one at a time. `describe` and `replay` are host functions of `run_ranks`.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from nxpipe.emulator.executable.interface import Argument, Interface, interface_from
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.devices.faults import DeviceFailure
from nxpipe.emulator.run.devices.protocol import Timing
from nxpipe.emulator.run.devices.ranks import Document, Rank
from nxpipe.emulator.run.devices.session import RankProgram, RankSession
from nxpipe.emulator.run.status import InvalidLoad

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
    """Run each program once on given inputs, write its results in order, and measure it; the timing by program.

    The argument has `weights`, a file; `runs` and `warmup`; and `programs`: by name the files `neff` and `interface`,
    and for each rank an .npz file with its `inputs` (those that are `requested`, in order) and one for its `answers`.
    """
    files = argument["programs"]
    interfaces = {name: interface_from(Path(own["interface"]).read_bytes()) for name, own in files.items()}
    programs = {name: (Path(files[name]["neff"]), interface) for name, interface in interfaces.items()}
    session = load_model(rank, programs, WeightsFile(Path(argument["weights"])))
    timings = {}
    for name, interface in sorted(interfaces.items()):
        with np.load(files[name]["inputs"][rank.number]) as inputs:
            given = {each.name: inputs[key] for each, key in zip(interface.requested, inputs.files, strict=True)}
        outputs = session.run(name, given)
        results = [
            outputs[each.name] if each.name in outputs else session.read(each.name) for each in interface.results
        ]
        np.savez(files[name]["answers"][rank.number], *results)
        timing = _measured(session, name, argument["runs"], argument["warmup"])
        timings[name] = {"clock": timing.clock, "durations_ms": timing.durations_ms}
    return timings


def _measured(session: RankSession, program: str, runs: int, warmup: int) -> Timing:
    """Durations by the device's own clock, or by the host's where the runtime has no trace of the device.

    A runtime that fails to trace has executed the program as often, so that the ranks stay in step."""
    if not session.has_device_clock:
        return session.time(program, runs=runs, warmup=warmup, clock="host")
    try:
        return session.time(program, runs=runs, warmup=warmup, clock="device")
    except DeviceFailure:
        return session.time(program, runs=runs, warmup=warmup, clock="host")
