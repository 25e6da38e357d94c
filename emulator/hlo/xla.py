"""XLA, by jaxlib alone: a module's HLO proto, and its execution on XLA's CPU devices, one for each rank.

The execution is a second opinion on a compiled graph: software that nobody here wrote computes the same module. The
names under `jaxlib._jax` are private, so the version of jaxlib is pinned (`nxpipe[neuron]`), and this file alone
imports it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from nxpipe.emulator.errors import ExecutionError, MissingTensor, ToolMissing
from nxpipe.emulator.hlo.interface import Argument, Interface, held, stored
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.fast import States

# Types are explicit in a module: XLA may not keep more digits than they have.
_OVERRIDES: Final = (("xla_allow_excess_precision", False),)


def proto_of(text: str) -> bytes:
    """The serialized HloModuleProto of a StableHLO module; equal texts give equal bytes."""
    extension, _, _ = _jaxlib()
    computation = extension.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=True)
    return bytes(computation.as_serialized_hlo_module_proto())


def _jaxlib() -> tuple[Any, Any, Any]:
    """jaxlib's extension modules, imported when they are first needed: that takes a quarter of a second."""
    try:
        from jaxlib import _hlo, _jax, xla_client
    except ImportError as fault:
        raise ToolMissing("jaxlib", "conversion to HLO", "pip install 'nxpipe[neuron]'") from fault
    return _jax, _hlo, xla_client


class LoadedModule:
    """A module with its weights on XLA's CPU devices, ready to run any number of times.

    Weights are passed whole, by their names in the checkpoint; each rank keeps what the interface says. States stay in
    the devices' memory between runs if they are passed on as they were returned.
    """

    def __init__(self, text: str, interface: Interface, parameters: Mapping[str, Array]) -> None:
        self._interface = interface
        self._devices = _Devices.of(interface.degree)
        self._program = self._devices.compiled(text)
        weights = [argument for argument in interface.arguments if argument.role is Role.PARAMETER]
        self._weights = {argument.name: self._placed(argument, parameters) for argument in weights}

    def run(
        self, inputs: Mapping[str, Array], states: States | None = None
    ) -> tuple[dict[str, Array], list[dict[str, Array]]]:
        """One forward pass: the first rank's outputs, and each rank's states after the run."""
        results = [dict[str, Array]() for _ in range(self._interface.degree)]
        for result, shards in zip(self._interface.results, self.execute(inputs, states), strict=True):
            for own, shard in zip(results, shards, strict=True):
                own[result.name] = held(shard, result.type.dtype)
        state_names = {argument.name for argument in self._interface.arguments if argument.role is Role.STATE}
        after = [{name: own[name] for name in own if name in state_names} for own in results]
        return {name: array for name, array in results[0].items() if name not in state_names}, after

    def execute(self, inputs: Mapping[str, Array], states: States | None = None) -> list[list[Array]]:
        """The stored results of each rank, in the order of the interface."""
        given = [{**inputs, **own} for own in states or [{}] * self._interface.degree]
        arguments = [self._weights.get(argument.name) for argument in self._interface.arguments]
        for number, argument in enumerate(self._interface.arguments):
            if arguments[number] is None:
                arguments[number] = self._placed(argument, given)
        return self._devices.results(self._program, arguments)

    def _placed(self, argument: Argument, arrays: Mapping[str, Array] | Sequence[Mapping[str, Array]]) -> Any:
        """An argument on all devices, from one array for all ranks, or one for each."""
        by_rank = [arrays] * self._interface.degree if isinstance(arrays, Mapping) else arrays
        return self._devices.placed([argument.on_rank(own, rank) for rank, own in enumerate(by_rank)])


@dataclass(frozen=True)
class _Type:
    """What jaxlib asks of an array's abstract value."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak_type: bool = False


@dataclass(frozen=True)
class _Devices:
    """So many CPU devices of one XLA client, which form one group of replicas."""

    client: Any
    devices: tuple[Any, ...]
    sharding: Any

    @staticmethod
    @cache
    def of(degree: int) -> "_Devices":
        extension, hlo, xla_client = _jaxlib()
        client = xla_client.make_cpu_client(num_devices=degree)
        devices = tuple(client.devices())
        replicated = hlo.OpSharding()
        replicated.type = hlo.OpSharding.Type.REPLICATED
        sharding = extension.GSPMDSharding(extension.DeviceList(devices), hlo.HloSharding.from_proto(replicated))
        return _Devices(client, devices, sharding)

    def compiled(self, text: str) -> Any:
        extension, _, _ = _jaxlib()
        options = extension.CompileOptions()
        options.num_replicas, options.num_partitions = len(self.devices), 1
        ranks = np.arange(len(self.devices), dtype=np.int32).reshape(-1, 1)
        options.device_assignment = extension.DeviceAssignment.create(ranks)
        options.env_option_overrides = list(_OVERRIDES)
        try:
            return self.client.compile_and_load(text, extension.DeviceList(self.devices), options)
        except extension.JaxRuntimeError as fault:
            raise ExecutionError(f"XLA does not compile the module: {fault}") from fault

    def placed(self, shards: Sequence[Array]) -> Any:
        """A copy of one array for each device."""
        extension, _, _ = _jaxlib()
        type_ = _Type(shards[0].shape, shards[0].dtype)
        return extension.batched_device_put(
            type_, self.sharding, list(shards), list(self.devices), True, True, enable_x64=True
        )

    def results(self, program: Any, arguments: Sequence[Any]) -> list[list[Array]]:
        executed = program.execute_sharded(list(arguments))
        rows = executed.disassemble_into_single_device_arrays()
        return [[shard._single_device_array_to_np_array_did_copy()[0] for shard in row] for row in rows]
