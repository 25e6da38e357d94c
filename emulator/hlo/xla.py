"""XLA, by jaxlib alone: a module's HLO proto, and its execution on XLA's CPU devices, one for each rank.

The execution is a second opinion on a compiled graph: software of others computes the same module. The
names under `jaxlib._jax` are private, so the version of jaxlib is pinned (`nxpipe[neuron]`), and this file alone
imports it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from nxpipe.emulator.errors import ExecutionError, ToolMissing
from nxpipe.emulator.executable.interface import Argument, Interface, held
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.fast import States

# Types are explicit in a module: XLA may not keep more digits than they have. The algebraic simplifier replaces a
# division by a broadcast with a product with its reciprocal, which rounds twice.
_OVERRIDES: Final = (("xla_allow_excess_precision", False), ("xla_disable_hlo_passes", "algsimp"))


def proto_of(text: str) -> bytes:
    """The serialized HloModuleProto of a StableHLO module; equal but for the module's number in its process."""
    extension, _, _ = _jaxlib()
    try:
        computation = extension.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=True)
    except (ValueError, RuntimeError) as fault:
        raise ExecutionError(f"XLA does not read the module: {fault}") from fault
    return bytes(computation.as_serialized_hlo_module_proto())


def _jaxlib() -> tuple[Any, Any, Any]:
    """jaxlib's extension modules, imported when they are first needed: that takes a quarter of a second."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # a line on stderr for each device otherwise
    try:
        from jaxlib import _hlo, _jax, xla_client
    except ImportError as fault:
        raise ToolMissing("jaxlib", "conversion to HLO", "pip install 'nxpipe[neuron]'") from fault
    return _jax, _hlo, xla_client


@dataclass(frozen=True)
class _Type:
    """What jaxlib asks of an array's abstract value."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak_type: bool = False


@dataclass(frozen=True)
class DeviceArray:
    """An array in the memory of each device: its type, the devices' arrays, and what XLA takes as argument."""

    type: _Type
    shards: tuple[Any, ...]
    array: Any

    @property
    def addresses(self) -> list[int]:
        """The place of the array in each device's memory."""
        return [int(shard.unsafe_buffer_pointer()) for shard in self.shards]


class LoadedModule:
    """A module with its weights on XLA's CPU devices, ready to run any number of times.

    Weights are passed whole, by their names in the checkpoint; each rank keeps what the interface says. States stay in
    the devices' memory between runs if they are passed on as they were returned.
    """

    def __init__(self, module: str | bytes, interface: Interface, parameters: Mapping[str, Array]) -> None:
        """`module` is StableHLO text, or a serialized HloModuleProto."""
        self._interface = interface
        self._devices = _Devices.of(interface.degree)
        self._program = self._devices.compiled(module)
        same = [parameters] * interface.degree
        self._weights = {weight.name: self._placed(weight, same) for weight in self._arguments(Role.PARAMETER)}

    def run(
        self, inputs: Mapping[str, Array], states: States | None = None
    ) -> tuple[dict[str, Array], list[dict[str, Array]]]:
        """One forward pass: the first rank's outputs, and each rank's states after the run."""
        resident = self.place(states or [inputs] * self._interface.degree)
        given = {name: array for name, array in inputs.items() if name not in resident}
        outputs = self.step(given, resident)
        return outputs, self.read(resident)

    def place(self, states: States) -> dict[str, DeviceArray]:
        """States in the devices' memory, by name."""
        return {argument.name: self._placed(argument, states) for argument in self._arguments(Role.STATE)}

    def step(self, inputs: Mapping[str, Array], resident: dict[str, DeviceArray]) -> dict[str, Array]:
        """One forward pass: the first rank's outputs. It replaces the states, whose memory the new ones take over."""
        known = {**self._weights, **resident}
        for argument in self._arguments(Role.INPUT):
            known[argument.name] = self._placed(argument, [inputs] * self._interface.degree)
        arguments = [known[argument.name].array for argument in self._interface.arguments]
        outputs = {}
        for result, array in zip(self._interface.results, self._devices.results(self._program, arguments), strict=True):
            if result.name in resident:
                resident[result.name] = self._devices.joined(resident[result.name].type, array)
            else:
                outputs[result.name] = held(_numbers(array[0]), result.type.dtype)
        return outputs

    def read(self, resident: Mapping[str, DeviceArray]) -> list[dict[str, Array]]:
        """Each rank's states."""
        types = {result.name: result.type.dtype for result in self._interface.results}
        return [
            {name: held(_numbers(state.shards[rank]), types[name]) for name, state in resident.items()}
            for rank in range(self._interface.degree)
        ]

    def _arguments(self, role: Role) -> list[Argument]:
        return [argument for argument in self._interface.arguments if argument.role is role]

    def _placed(self, argument: Argument, by_rank: States) -> DeviceArray:
        return self._devices.placed([argument.on_rank(own, rank) for rank, own in enumerate(by_rank)])


def _numbers(array: Any) -> Array:
    """The numbers of an array on one device."""
    numbers, _ = array._single_device_array_to_np_array_did_copy()
    return np.array(numbers)


@dataclass(frozen=True)
class _Devices:
    """So many CPU devices of one XLA client, which form one group of replicas."""

    client: Any
    devices: tuple[Any, ...]
    sharding: Any  # an array of its own on each device; XLA calls it replicated
    shardings: tuple[Any, ...]  # of each device alone

    @staticmethod
    @cache
    def of(degree: int) -> "_Devices":
        extension, hlo, xla_client = _jaxlib()
        client = xla_client.make_cpu_client(num_devices=degree)
        devices = tuple(client.devices())
        replicated = hlo.OpSharding()
        replicated.type = hlo.OpSharding.Type.REPLICATED

        def over(*group: Any) -> Any:
            return extension.GSPMDSharding(extension.DeviceList(group), hlo.HloSharding.from_proto(replicated))

        return _Devices(client, devices, over(*devices), tuple(over(device) for device in devices))

    def compiled(self, module: str | bytes) -> Any:
        extension, hlo, _ = _jaxlib()
        options = extension.CompileOptions()
        options.num_replicas, options.num_partitions = len(self.devices), 1
        ranks = np.arange(len(self.devices), dtype=np.int32).reshape(-1, 1)
        options.device_assignment = extension.DeviceAssignment.create(ranks)
        options.env_option_overrides = list(_OVERRIDES)
        try:
            if isinstance(module, bytes):
                module = extension.mlir.xla_computation_to_mlir_module(hlo.XlaComputation(module))
            return self.client.compile_and_load(module, extension.DeviceList(self.devices), options)
        except (ValueError, RuntimeError) as fault:
            raise ExecutionError(f"XLA does not compile the module: {fault}") from fault

    def placed(self, shards: Sequence[Array]) -> DeviceArray:
        """A copy of one array for each device."""
        extension, _, _ = _jaxlib()
        type_ = _Type(shards[0].shape, shards[0].dtype)
        single = [
            extension.batched_device_put(type_, own, [shard], [device], True, True, enable_x64=True)
            for shard, device, own in zip(shards, self.devices, self.shardings, strict=True)
        ]
        return self.joined(type_, single)

    def joined(self, type_: _Type, shards: Sequence[Any]) -> DeviceArray:
        """One array from its arrays on each device."""
        extension, _, _ = _jaxlib()
        return DeviceArray(type_, tuple(shards), extension.ArrayImpl(type_, self.sharding, list(shards), True, True))

    def results(self, program: Any, arguments: Sequence[Any]) -> list[list[Any]]:
        """The results of a run, each as arrays on each device."""
        try:
            return list(program.execute_sharded(list(arguments)).disassemble_into_single_device_arrays())
        except RuntimeError as fault:
            raise ExecutionError(f"XLA does not execute the module: {fault}") from fault
