"""A stand-in for `nrtpy` that computes: it executes the HLO module inside a NEFF of tests/neuronx by XLA on the CPU.

It is imported as `nrtpy`. Tensors, sizes and statuses are those of the stand-in library, as for `nrtpy.py`; only
programs are its own. Ranks meet at NEURON_RT_ROOT_COMM_ID: rank 0 executes a program for all ranks when all have come.
`STANDIN_DEFECT` chooses a defect of the device: `zeros`, `wrong`, `stale` (states keep their values), `slow`, `hang`,
`crash`, `hardware`; on the rank `STANDIN_DEFECT_RANK`, by default all.
"""

import hashlib
import io
import os
import signal
import tarfile
import time
from functools import cached_property
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import ml_dtypes
import numpy as np

from nxpipe.emulator.executable.neff import HEADER, open_neff
from nxpipe.emulator.hlo.constraints import TARGETS, CheckedModule, HloLimits
from nxpipe.emulator.hlo.schema import ALIAS_SUFFIX, INPUT_NAMES, HloModule, HloShape, InstructionField
from tests.hlo.xla_cpu import LoadedProto
from tests.neuronx.stand_in import interface
from tests.runtime.devices import nrtpy as base
from tests.runtime.devices.nrtpy import NrtError, NrtpyError, NrtpyTensor, configure, get_nrtpy_singleton, reset

__all__ = ["NrtError", "NrtpyError", "NrtpyModel", "NrtpyTensor", "configure", "get_nrtpy_singleton", "reset"]

_TYPES: Final = {"pred": np.bool_, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16} | {
    f"{sign}{8 * size}": np.dtype(f"{'i' if sign == 's' else 'u'}{size}") for sign in "su" for size in (1, 2, 4, 8)
}
_KEY: Final = b"ranks"
_SLOW: Final = 0.3  # seconds, of programs that take milliseconds
_NUMBER: Final = InstructionField.PARAMETER_NUMBER


class _Meeting:
    """The connections of this process to the other ranks, in star form around rank 0."""

    current: "_Meeting | None" = None

    def __init__(self, rank: int, world: int) -> None:
        host, _, port = os.environ["NEURON_RT_ROOT_COMM_ID"].partition(":")
        address = (host, int(port))
        self.rank, self.world = rank, world
        self._peers: dict[int, Connection] = {}
        if rank:
            self._peers[0] = _connected(address)
            self._peers[0].send(rank)
            return
        with Listener(address, backlog=world, authkey=_KEY) as listener:
            for _ in range(world - 1):
                peer = listener.accept()
                self._peers[peer.recv()] = peer

    @classmethod
    def of(cls, rank: int, world: int) -> "_Meeting":
        if cls.current is None:
            cls.current = cls(rank, world)
        return cls.current

    def gathered(self, value: Any) -> list[Any] | None:
        """What all ranks send, on rank 0; None on the others."""
        if self.rank:
            self._peers[0].send(value)
            return None
        return [value, *(self._peers[rank].recv() for rank in range(1, self.world))]

    def scattered(self, values: list[Any] | None) -> Any:
        """What rank 0 has for this rank."""
        if values is None:
            return self._peers[0].recv()
        for rank in range(1, self.world):
            self._peers[rank].send(values[rank])
        return values[0]


def _connected(address: tuple[str, int]) -> Connection:
    deadline = time.monotonic() + 60
    while True:
        try:
            return Client(address, authkey=_KEY)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise NrtError("NRT Error NRT_TIMEOUT(5): Failed to meet rank 0") from None
            time.sleep(0.02)


class NrtpyModel(base.NrtpyModel):
    """A loaded NEFF with its module."""

    def __init__(self, path: Path, core: int, rank: int, world: int) -> None:
        self._owner, self._path, self._core = get_nrtpy_singleton(), path, core
        self._rank, self._world = rank, world
        self._proto = _member(path, "hlo.pb")
        neff = open_neff(path)
        self._inputs = {each.name: each.nbytes for each in neff.inputs}
        self._outputs = {each.name: each.nbytes for each in neff.outputs}
        module = HloModule.read(self._proto)
        checked = CheckedModule(module, TARGETS[0], HloLimits())
        self._parameters = [
            (each.attribute(INPUT_NAMES) or "", each.shape)
            for each in sorted(checked.parameters(), key=lambda each: each.proto.number(_NUMBER))
        ]
        self._results = [each.name for each in interface(module) if each.kind == "output"]
        self.input_tensors_info, self.output_tensors_info = (
            {name: SimpleNamespace(shape=(nbytes,), size=nbytes) for name, nbytes in reversed(sizes.items())}
            for sizes in (self._inputs, self._outputs)
        )
        if world > 1:
            meeting = _Meeting.of(rank, world)
            digests = meeting.gathered(hashlib.sha256(self._proto).hexdigest())
            if not meeting.scattered(None if digests is None else [len(set(digests)) == 1] * world):
                raise NrtError("NRT Error NRT_INVALID(2): the ranks load different programs")

    @classmethod
    def load_from_neff(
        cls,
        neff_path: Path | str,
        name: str | None = None,
        core_id: int = 0,
        cc_enabled: bool = False,
        rank_id: int = 0,
        world_size: int = 1,
    ) -> "NrtpyModel":
        numbers = (core_id, rank_id, world_size)
        if not isinstance(neff_path, Path | str) or not all(type(number) is int for number in numbers):
            raise TypeError("load_from_neff takes a path and integers")
        if type(cc_enabled) is not bool or not isinstance(name, str | None):
            raise TypeError("cc_enabled is a bool, name a text")
        if cc_enabled != (world_size > 1):
            raise NrtpyError("several ranks need cc_enabled, and one does not")
        if not Path(neff_path).exists():
            raise NrtError("NRT Error NRT_FAILURE(1): Failed to load model")
        return cls(Path(neff_path), core_id, rank_id, world_size)

    def __call__(
        self, inputs: Any, outputs: Any = None, save_trace: bool = False, ntff_name: str | None = None
    ) -> None:
        if get_nrtpy_singleton() is not self._owner:
            raise NrtpyError("the model is of a runtime that was reset")
        base._require_tensors(inputs)
        base._require_tensors(outputs)
        for bound, sizes in ((inputs, self._inputs), (outputs, self._outputs)):
            if {name: tensor._nbytes for name, tensor in bound.items()} != sizes:
                raise NrtError("NRT Error NRT_EXEC_BAD_INPUT(1002): names or sizes are not those of the program")
        defect = _defect(self._rank)
        given = [self._value(name, shape, inputs) for name, shape in self._parameters]
        for name, result in zip(self._results, self._computed(given), strict=True):
            if defect == "stale" and any(each.removesuffix(ALIAS_SUFFIX) == name for each in self._inputs):
                continue
            if defect == "zeros":
                result = np.zeros_like(result)
            if defect == "wrong" and result.dtype.kind in "fV":
                result = (result.astype(np.float32)[..., ::-1] * 1.5 + 1).astype(result.dtype)
            outputs[name].write_from_numpy(result.reshape(-1).view(np.uint8))

    def __del__(self) -> None:
        """Nothing of the library belongs to a model."""

    def _value(self, name: str, shape: HloShape, inputs: Any) -> Any:
        """An argument from a tensor; zeros for one that the compiler removed, because nothing reads it."""
        dtype = np.dtype(_TYPES[shape.element_type])
        if name not in inputs:
            return np.zeros(shape.dimensions, dtype)
        return np.ascontiguousarray(inputs[name].numpy()).reshape(-1).view(np.uint8).view(dtype).reshape(
            shape.dimensions
        )  # fmt: skip

    def _computed(self, given: list[Any]) -> list[Any]:
        if self._world == 1:
            return self._program.run([given])[0]
        meeting = _Meeting.of(self._rank, self._world)
        ranks = meeting.gathered(given)
        found: list[Any] = meeting.scattered(None if ranks is None else self._program.run(ranks))
        return found

    @cached_property
    def _program(self) -> LoadedProto:
        return LoadedProto(self._proto, self._world)


def _defect(rank: int) -> str:
    if os.environ.get("STANDIN_DEFECT_RANK", str(rank)) != str(rank):
        return ""
    defect = os.environ.get("STANDIN_DEFECT", "")
    if defect == "hang":
        time.sleep(600)
    if defect == "slow":
        time.sleep(_SLOW)
    if defect == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if defect == "hardware":
        raise NrtError("NRT Error NRT_EXEC_HW_ERR_HBM_UE(1201): Failed to execute model")
    return defect


def _member(path: Path, name: str) -> bytes:
    """A file of a NEFF's archive."""
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes()[HEADER.size :])) as archive:
        file = archive.extractfile(name)
        assert file is not None
        return file.read()
