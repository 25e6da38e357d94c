"""Execution of a proto by XLA's CPU client with jaxlib alone: one array a rank and input, one a rank and output."""

from collections.abc import Sequence

import numpy as np
from jaxlib import _hlo, _jax

from nxpipe.emulator.hlo.xla import _Devices


def execute(proto: bytes, inputs: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """The outputs of each rank for the inputs of each rank."""
    ranks = len(inputs)
    client, devices = _Devices.of(ranks).client, _Devices.of(ranks).devices
    options = _jax.CompileOptions()
    options.num_replicas = ranks
    options.device_assignment = _jax.DeviceAssignment.create(np.arange(ranks, dtype=np.int32).reshape(ranks, 1))
    module = _jax.mlir.xla_computation_to_mlir_module(_hlo.XlaComputation(proto))
    program = client.compile_and_load(module, _jax.DeviceList(devices), options)
    arguments = [
        _Devices.of(ranks).placed([np.array(part) for part in parts]).array  # copies: an aliased input is overwritten
        for parts in zip(*inputs, strict=True)
    ]
    outputs = program.execute_sharded(arguments).disassemble_into_single_device_arrays()
    found = [[part._single_device_array_to_np_array_did_copy()[0].copy() for part in parts] for parts in outputs]
    return [list(parts) for parts in zip(*found, strict=True)]
