"""Execution of a proto by XLA's CPU client with jaxlib alone: one array a rank and input, one a rank and output."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from jaxlib import _hlo, _jax, xla_client


class _OnEachDevice(_jax.Sharding):
    """An array that has a part on each device; jaxlib asks a sharding of jax for no more than this."""

    memory_kind = None

    def __init__(self, devices: Sequence[Any]) -> None:
        self.device_set = set(devices)
        self._internal_device_list = _jax.DeviceList(tuple(devices))

    def _to_xla_hlo_sharding(self, rank: int) -> Any:
        return _hlo.HloSharding.replicate()


def execute(proto: bytes, inputs: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """The outputs of each rank for the inputs of each rank."""
    ranks = len(inputs)
    client = xla_client.make_cpu_client(num_devices=ranks)
    devices = client.local_devices()
    options = _jax.CompileOptions()
    options.num_replicas = ranks
    options.device_assignment = _jax.DeviceAssignment.create(np.arange(ranks, dtype=np.int32).reshape(ranks, 1))
    module = _jax.mlir.xla_computation_to_mlir_module(_hlo.XlaComputation(proto))
    program = client.compile_and_load(module, _jax.DeviceList(tuple(devices)), options)
    arguments = [_put(list(parts), devices) for parts in zip(*inputs, strict=True)]
    outputs = program.execute_sharded(arguments).disassemble_into_single_device_arrays()
    found = [[part._single_device_array_to_np_array_did_copy()[0].copy() for part in parts] for parts in outputs]
    return [list(parts) for parts in zip(*found, strict=True)]


def _put(parts: list[np.ndarray], devices: Sequence[Any]) -> Any:
    aval = SimpleNamespace(shape=parts[0].shape, dtype=parts[0].dtype, weak_type=False)
    copies = [np.array(part) for part in parts]  # an aliased input is overwritten
    return _jax.batched_device_put(aval, _OnEachDevice(devices), copies, list(devices), True, enable_x64=False)
