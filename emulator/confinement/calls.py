"""Closed list of calls to the confined process, each with the type of its result."""

import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.types import TensorType


def _graph(value: Any) -> bool:
    return isinstance(value, Graph)


def _table(kind: type | tuple[type, ...]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(isinstance(entry, kind) for entry in value.values())


def _sizes(value: Any) -> bool:
    return isinstance(value, dict) and all(type(size) is int and size >= 0 for size in value.values())


def _names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


def _pairs(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in value
    )


def _tokens(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) and all(type(token) is int for token in row) for row in value
    )


class Call(NamedTuple):
    """One call: the function, the modules to import before untrusted bytes are opened, and a check of the result."""

    module: str
    function: str
    preload: tuple[str, ...]
    is_valid: Callable[[Any], bool]


WARM: Final = "nxpipe.emulator.capture.warm"
_MODEL: Final = (WARM,)
_PT2: Final = ("nxpipe.emulator.capture.pt2",)
_ONNX: Final = ("nxpipe.emulator.capture.onnx.reader",)

CALLS: Final = {
    "capture": Call("nxpipe.emulator.capture.export", "capture_model", _MODEL, _graph),
    "compile_graph": Call("nxpipe.emulator.compile", "compile_graph_in_process", _MODEL, _graph),
    "parameter_specs": Call("nxpipe.emulator.capture.model", "weight_types", _MODEL, _table(TensorType)),
    "published_plan": Call("nxpipe.emulator.capture.model", "published_plan_in_process", _MODEL, _pairs),
    "token_ids": Call(
        "nxpipe.emulator.capture.tokens", "token_ids_in_process", ("nxpipe.emulator.capture.tokens",), _tokens
    ),
    "capture_pt2": Call("nxpipe.emulator.capture.pt2", "capture_exported", _PT2, _graph),
    "parameters_pt2": Call("nxpipe.emulator.capture.pt2", "exported_parameters", _PT2, _table(np.ndarray)),
    "outputs_pt2": Call("nxpipe.emulator.capture.pt2", "run_exported", _PT2, _table(np.ndarray)),
    "capture_onnx": Call("nxpipe.emulator.capture.onnx", "capture_onnx", _ONNX, _graph),
    "data_onnx": Call("nxpipe.emulator.capture.onnx", "onnx_data_files", _ONNX, _sizes),
    "names_onnx": Call("nxpipe.emulator.capture.onnx", "onnx_data_names", _ONNX, _names),
    "axes_onnx": Call("nxpipe.emulator.capture.onnx", "onnx_dynamic_axes", _ONNX, _names),
    "parameters_onnx": Call("nxpipe.emulator.capture.onnx", "onnx_parameters", _ONNX, _table(np.ndarray)),
    "outputs_onnx": Call("nxpipe.emulator.capture.onnx", "run_onnx", _ONNX, _table(np.ndarray)),
}


def run_call(name: str, arguments: tuple[Any, ...]) -> Any:
    """Execute a call in this process."""
    call = CALLS[name]
    return getattr(importlib.import_module(call.module), call.function)(*arguments)
