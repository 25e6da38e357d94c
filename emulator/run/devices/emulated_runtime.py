"""The runtime of devices on emulated cores: `.nxe` programs, all ranks in one process, one thread for each.

A program of several ranks is one machine, which runs when the last rank has called `execute`, as cores wait for each
other in their first collective. Tensors hold bytes as a device does; a tensor that has not changed since the machine
read it is not read again, so weights are loaded once.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Condition, Lock
from typing import Final

import numpy as np

from nxpipe.emulator.analysis.graph_memory import data_capacity
from nxpipe.emulator.core.arithmetic import decode, encode, raw
from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.errors import ExecutableInvalid
from nxpipe.emulator.executable.code import write_code
from nxpipe.emulator.executable.executable import from_bytes
from nxpipe.emulator.hardware import instance
from nxpipe.emulator.isa.constraints import ProgramInvalid
from nxpipe.emulator.isa.legality import check
from nxpipe.emulator.isa.program import Buffer, Program, Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.counters import Category, Prediction, ProgramCounters, process_counters
from nxpipe.emulator.run.devices.faults import CollectiveFault, DeviceTimeout
from nxpipe.emulator.run.devices.protocol import (
    Binding,
    Clock,
    CoreCounters,
    DeviceDescription,
    DeviceTensor,
    ProcessRuntime,
    TensorInfo,
    Timing,
    open_program,
    require_binding,
    require_bytes,
    require_rank,
    require_runs,
    require_size,
)
from nxpipe.emulator.run.status import (
    BadInput,
    CoreBusy,
    CoresUnavailable,
    DeviceMemoryExhausted,
    ExecutionFailed,
    InvalidLoad,
    RuntimeFault,
    Unloaded,
    WrongGeneration,
    translated_faults,
)
from nxpipe.emulator.schedule.timeline import latency_ns

_INPUTS: Final = (Role.INPUT, Role.STATE, Role.PARAMETER)
_OUTPUTS: Final = (Role.OUTPUT, Role.STATE)


class EmulatedRuntime(ProcessRuntime):
    """The cores of one emulated instance. A wait for other ranks ends after `limit` seconds."""

    def __init__(
        self, name: str = "inf2.xlarge", *, limit: float = 600.0, order: str = "hostile", races: bool = True
    ) -> None:
        self._target, self.limit = instance(name), limit
        self._machine_options = (order, races)
        self.cores = [_Core(data_capacity(self._target)) for _ in range(self._target.logical_cores)]
        self._arrival = Condition()
        self._incomplete: dict[tuple[bytes, int], _RankGroup] = {}
        self._groups: list[_RankGroup] = []
        self.process = process_counters()
        self.process.instance = name
        self._models: list[EmulatedModel] = []

    @property
    def description(self) -> DeviceDescription:
        self.require_open()
        return DeviceDescription("emulated", self._target.name, len(self.cores), self._target.core)

    def load(self, program: Path, *, core: int = 0, rank: int = 0, world: int = 1) -> "EmulatedModel":
        self.require_open()
        require_rank(rank, world)
        self._require_core(core)
        with open_program(program) as file:
            group = self._join(file.read(), rank, world, core)
        self.take(core, group.own_bytes, program.stem)
        counters = ProgramCounters(
            program.stem, group.digest, range(core, core + 1), group.memory, partial(Prediction.of, group.program)
        )
        model = EmulatedModel(self, group, program.stem, rank, core, self.process.load(counters))
        self._models.append(model)
        self.publish(core, group.memory)
        return model

    def allocate(self, nbytes: int, *, core: int = 0, name: str = "") -> "EmulatedTensor":
        self.require_open()
        require_size(nbytes, name)
        self._require_core(core)
        self.take(core, nbytes, name)
        self.publish(core, {"tensors": nbytes})
        return EmulatedTensor(self, name, core, nbytes)

    def counters(self, core: int = 0) -> CoreCounters:
        self.require_open()
        own = self.cores[core]
        return CoreCounters(own.used, own.capacity, own.executions)

    def close(self) -> None:
        """Close the runtime; ranks that wait for others stop waiting."""
        with self._arrival:
            self._is_open = False
            self._arrival.notify_all()
            for group in self._groups:
                group.abort()
        for model in self._models:
            self.process.unload(model.counters)
        for number, own in enumerate(self.cores):
            self.publish(number, {category: -nbytes for category, nbytes in own.published.items()})

    def publish(self, core: int, memory: Mapping[Category, int]) -> None:
        """Count memory for the device tools."""
        for category, nbytes in memory.items():
            self.cores[core].published[category] += nbytes
            self.process.take(core, category, nbytes)

    def take(self, core: int, nbytes: int, name: str) -> None:
        """Reserve memory of a core; a negative number releases it."""
        own = self.cores[core]
        with own.accounting:
            left = own.capacity - own.used
            if nbytes > left:
                raise DeviceMemoryExhausted(
                    f"{name!r} takes {nbytes:,} bytes on core {core}, and {left:,} are left; free tensors, unload "
                    "programs, or use more ranks"
                )
            own.used += nbytes

    def _require_core(self, core: int) -> None:
        if not 0 <= core < len(self.cores):
            raise CoresUnavailable(f"core {core} was requested; {self._target.name} has {len(self.cores)}")

    def _join(self, data: bytes, rank: int, world: int, core: int) -> "_RankGroup":
        """The group of the ranks that load this program; the last one to arrive makes its machine."""
        key = (hashlib.sha256(data).digest(), world)
        with self._arrival:
            group = self._incomplete.setdefault(key, _RankGroup(world, key[0].hex()[:32]))
            if rank in group.cores or core in group.cores.values():
                raise InvalidLoad(f"rank {rank} or core {core} takes part twice; give each rank a core of its own")
            group.cores[rank] = core
            if len(group.cores) == world:
                del self._incomplete[key]
                self._groups.append(group)
                group.prepare(data, self._target.core, *self._machine_options)
                self._arrival.notify_all()
            elif not self._arrival.wait_for(lambda: group.is_complete or not self._is_open, self.limit):
                missing = ", ".join(str(other) for other in range(world) if other not in group.cores)
                del group.cores[rank]
                raise DeviceTimeout(
                    f"rank {rank} waited {self.limit:g} s for ranks {missing} to load the program; load it on all "
                    "ranks, in one order"
                )
        self.require_open()
        return group.require_loaded()


class _Core:
    """What is allocated on one core."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used, self.executions = capacity, 0, 0
        self.published: Counter[Category] = Counter()
        self.busy, self.accounting = Lock(), Lock()


class _RankGroup:
    """The ranks of one loaded program, and the machine that they share."""

    def __init__(self, world: int, digest: str) -> None:
        self.digest = digest
        self.cores: dict[int, int] = {}  # core of each rank
        self.is_complete = False
        self._world = world
        self._machine: Machine | None = None
        self._fault: RuntimeFault | None = None
        self._meeting = Barrier(world, action=self._execute)

    def prepare(self, data: bytes, core: str, order: str, races: bool) -> None:
        """Make the machine; its failure is that of all ranks."""
        try:
            self.program = _legal(data, core, self._world)
            self._machine = Machine(self.program, order=order, check=races)
        except RuntimeFault as fault:
            self._fault = fault
        self.is_complete = True

    def require_loaded(self) -> "_RankGroup":
        if self._fault is not None:
            raise self._fault
        return self

    @property
    def machine(self) -> Machine:
        assert self._machine is not None
        return self._machine

    @property
    def own_bytes(self) -> int:
        """Bytes of constants and scratch on each core; tensors of the interface are allocated by the caller."""
        roles = (Role.CONSTANT, Role.SCRATCH)
        spans = [(b.address, b.address + b.nbytes) for b in self.program.buffers if b.role in roles]
        return max((end for _, end in spans), default=0) - min((start for start, _ in spans), default=0)

    @cached_property
    def memory(self) -> Mapping[Category, int]:
        """Bytes on each core, as the device tools divide them."""
        constants = sum(b.nbytes for b in self.program.buffers if b.role is Role.CONSTANT)
        code = len(write_code(self.program.body))
        return {
            "constants": constants,
            "model_code": code,
            "model_shared_scratchpad": max(self.own_bytes - constants, 0),
        }

    def execute(self, rank: int, limit: float) -> None:
        """Run the program once all ranks have arrived, within `limit` seconds. A group in which a rank failed must be
        loaded again."""
        if self._world == 1:
            self._execute()
            return
        try:
            self._meeting.wait(limit)
        except BrokenBarrierError:
            raise CollectiveFault(
                f"rank {rank} waited for another rank, which failed or did not execute within {limit:g} s; look "
                "for the rank that failed first, then load the program again"
            ) from None

    def abort(self) -> None:
        self._meeting.abort()

    def _execute(self) -> None:
        with translated_faults():
            self.machine.execute()


def _legal(data: bytes, core: str, world: int) -> Program:
    try:
        program = from_bytes(data).program
        check(program)
    except (ExecutableInvalid, ProgramInvalid) as fault:
        raise InvalidLoad(str(fault)) from fault
    if program.core != core:
        raise WrongGeneration(f"the program is for NeuronCore-{program.core}, and this instance has NeuronCore-{core}")
    if program.ranks != world:
        raise InvalidLoad(f"the program is for {program.ranks} ranks, and {world} load it")
    return program


class EmulatedTensor:
    """A tensor on an emulated core. `version` counts the writes."""

    def __init__(self, runtime: EmulatedRuntime, name: str, core: int, nbytes: int) -> None:
        self.name, self.core, self.nbytes = name, core, nbytes
        self.version = 0
        self._runtime = runtime
        self._bytes: Array | None = np.full(nbytes, 0xFF, np.uint8)  # undefined: NaN in every type

    @property
    def bytes(self) -> Array:
        self._runtime.require_open()
        if self._bytes is None:
            raise Unloaded(f"tensor {self.name!r} was freed; allocate it again")
        return self._bytes

    def write(self, array: Array) -> None:
        data = np.ascontiguousarray(array)
        require_bytes(self, data.nbytes)
        self.bytes[:] = data.reshape(-1).view(np.uint8)
        self.version += 1

    def read(self) -> Array:
        return self.bytes.copy()

    def free(self) -> None:
        if self._bytes is not None:
            self._bytes = None
            self._runtime.take(self.core, -self.nbytes, self.name)
            self._runtime.publish(self.core, {"tensors": -self.nbytes})


class EmulatedModel:
    """One rank of a loaded program."""

    def __init__(
        self,
        runtime: EmulatedRuntime,
        group: _RankGroup,
        name: str,
        rank: int,
        core: int,
        counters: ProgramCounters,
    ) -> None:
        self.name, self.core, self._rank, self.counters = name, core, rank, counters
        self._runtime, self._group = runtime, group
        self._is_loaded = True
        self._buffers: Mapping[str, Buffer] = {
            name: buffer for buffer in group.program.buffers if buffer.role in (*_INPUTS, *_OUTPUTS)
            for name in buffer.names
        }  # fmt: skip
        self.inputs, self.outputs = self._infos(*_INPUTS), self._infos(*_OUTPUTS)
        self._held: dict[str, tuple[DeviceTensor, int]] = {}  # the tensor, with its version, that the machine has read

    def execute(self, inputs: Binding, outputs: Binding) -> None:
        self.counters.run(self._execute, inputs, outputs)

    def _execute(self, inputs: Binding, outputs: Binding) -> None:
        self._require_ready(inputs, outputs)
        own = self._runtime.cores[self.core]
        if not own.busy.acquire(blocking=False):
            raise CoreBusy(f"core {self.core} runs another program; wait for its result")
        try:
            self._write(inputs)
            self._group.execute(self._rank, self._runtime.limit)
            self._read(outputs)
            own.executions += 1
        except BaseException:
            self._group.abort()
            raise
        finally:
            own.busy.release()

    def time(
        self, inputs: Binding, outputs: Binding, *, runs: int, warmup: int = 0, clock: Clock | None = None
    ) -> Timing:
        """The predicted duration of one execution; nothing is executed."""
        if clock not in (None, "predicted"):
            raise BadInput(f"the emulator predicts durations and cannot measure them by the {clock}; leave it out")
        require_runs(runs, warmup)
        self._require_ready(inputs, outputs)
        latency = latency_ns(self._group.program)
        if latency is None:
            raise ExecutionFailed(f"the duration of {self.name} cannot be predicted: its timeline has too many steps")
        return Timing("predicted", (latency / 1e6,))

    def unload(self) -> None:
        if self._is_loaded:
            self._is_loaded = False
            self._runtime.take(self.core, -self._group.own_bytes, self.name)
            self._runtime.publish(self.core, {own: -nbytes for own, nbytes in self._group.memory.items()})
            self._runtime.process.unload(self.counters)

    def _require_ready(self, inputs: Binding, outputs: Binding) -> None:
        self._runtime.require_open()
        if not self._is_loaded:
            raise Unloaded(f"{self.name} was unloaded; load it again")
        require_binding(self, inputs, outputs)

    def _infos(self, *roles: Role) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(name, buffer.elements * buffer.dtype.itemsize, buffer.dtype.value, buffer.host_shape)
            for name, buffer in self._buffers.items()
            if buffer.role in roles
        }

    def _write(self, inputs: Binding) -> None:
        for name, tensor in inputs.items():
            own = _emulated(tensor)
            data = own.bytes
            if self._held.get(name) != (own, own.version):
                buffer = self._buffers[name]
                words = data.view(raw(buffer.dtype)).reshape(buffer.host_shape)
                with translated_faults():
                    self._group.machine.write(name, decode(words, buffer.dtype), self._rank)
                self._held[name] = (own, own.version)

    def _read(self, outputs: Binding) -> None:
        for name, tensor in outputs.items():
            own = _emulated(tensor)
            with translated_faults():
                array = self._group.machine.read(name, self._rank)
            own.write(encode(array, self._buffers[name].dtype))
            self._held[name] = (own, own.version)


def _emulated(tensor: DeviceTensor) -> EmulatedTensor:
    if not isinstance(tensor, EmulatedTensor):
        raise BadInput(f"tensor {tensor.name!r} belongs to another runtime; allocate it in this one")
    return tensor
