"""Execution of a proto by XLA's CPU client with jaxlib alone: one array a rank and input, one a rank and output."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from jaxlib import _hlo, _jax, xla_client


class LoadedProto:
    """A proto, compiled for a device of each rank."""

    def __init__(self, proto: bytes, ranks: int) -> None:
        client = xla_client.make_cpu_client(num_devices=ranks)
        self._devices = client.local_devices()
        options = _jax.CompileOptions()
        options.num_replicas = ranks
        options.device_assignment = _jax.DeviceAssignment.create(np.arange(ranks, dtype=np.int32).reshape(ranks, 1))
        module = _jax.mlir.xla_computation_to_mlir_module(_hlo.XlaComputation(proto))
        self._program = client.compile_and_load(module, _jax.DeviceList(tuple(self._devices)), options)

    def run(self, inputs: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """The outputs of each rank for the inputs of each rank."""
        arguments = [_put(list(parts), self._devices) for parts in zip(*inputs, strict=True)]
        outputs = self._program.execute_sharded(arguments).disassemble_into_single_device_arrays()
        found = [[part._single_device_array_to_np_array_did_copy()[0].copy() for part in parts] for parts in outputs]
        return [list(parts) for parts in zip(*found, strict=True)]


def execute(proto: bytes, inputs: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """The outputs of each rank for the inputs of each rank."""
    return LoadedProto(proto, len(inputs)).run(inputs)


def _put(parts: list[np.ndarray], devices: Sequence[Any]) -> Any:
    """An array with a part of its own on each device. It is a copy: an aliased input is overwritten."""
    aval = SimpleNamespace(shape=parts[0].shape, dtype=parts[0].dtype, weak_type=False)
    single = [
        _jax.batched_device_put(aval, _sharding(device), [part], [device], True, True, enable_x64=True)
        for part, device in zip(parts, devices, strict=True)
    ]
    return _jax.ArrayImpl(aval, _sharding(*devices), single, True, True)


def _sharding(*devices: Any) -> Any:
    return _jax.GSPMDSharding(_jax.DeviceList(devices), _hlo.HloSharding.replicate())
