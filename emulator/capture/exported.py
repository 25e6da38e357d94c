"""A program that torch.export saved (`.pt2`), as a graph.

`torch.export.load` unpickles parts of such a file, imports what it names and evaluates its expressions, so a file can
make it run any code. This reader never does: it takes the program's JSON, checked field by field, and the raw bytes of
tensors. Weights are not read for the graph.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nxpipe.emulator.capture.export import lower_to_known_operators, quiet_torch
from nxpipe.emulator.capture.exported_archive import Archive
from nxpipe.emulator.capture.importer import import_program
from nxpipe.emulator.capture.model import quiet_libraries
from nxpipe.emulator.errors import CaptureError, CompileError
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.numerics import Array

_REASON = 300  # characters of what torch says


def capture_exported(path: Path) -> Graph:
    """The graph of a saved program; its parameters go by the names that the exported module had."""
    with Archive(path) as archive, _explaining(path):
        program = archive.deserialised(read=False)
        _share_mode(program)
        return import_program(lower_to_known_operators(program), {})


def run_exported(path: Path, graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """What PyTorch computes with a saved program and its weights, one operator after another.

    `graph` is the file's own: that it exists shows that the file calls nothing but operators of ours.
    """
    with Archive(path) as archive, _explaining(path):
        program = archive.deserialised(read=True)
        results = torch.fx.Interpreter(program.graph_module).run(*_arguments(program, inputs))
    kinds = (spec.kind.name for spec in program.graph_signature.output_specs)
    wanted = [result for kind, result in zip(kinds, results, strict=True) if kind == "USER_OUTPUT"]
    tensors = [result for result in wanted if isinstance(result, torch.Tensor)]
    return {name: _plain(tensor) for name, tensor in zip(graph.outputs, tensors, strict=True)}


def _arguments(program: Any, inputs: Mapping[str, Array]) -> Iterator[Any]:
    """Weights, constants and inputs, in the order of the program's placeholders."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    copies: dict[int, Any] = {}  # of tensors that may be written to; names of one tensor have one between them
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        value = node.meta.get("val")
        if spec.kind.name != "USER_INPUT":
            held = program.state_dict if spec.target in program.state_dict else program.constants
            tensor = held[spec.target]
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.clone()
            yield copies[id(tensor)]
        elif isinstance(value, torch.Tensor):
            yield torch.from_numpy(inputs[node.name].copy()).to(value.dtype)
        else:
            yield getattr(spec.arg, "value", None)


def _plain(tensor: Any) -> Array:
    exact: Array = (tensor.float() if tensor.is_floating_point() else tensor).detach().numpy()
    return exact


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Whatever a damaged or newer program leads torch to raise becomes a sentence."""
    try:
        with quiet_libraries(), quiet_torch(), torch.no_grad():
            yield
    except CompileError:
        raise
    except Exception as fault:
        first = fault.__cause__ or fault  # torch wraps it in the whole node, and the traceback as text
        reason = " ".join(f"{type(first).__name__}: {first}".split())[:_REASON]
        raise CaptureError(f"{path.name} is no program that torch {torch.__version__} reads: {reason}") from fault


def exported_parameters(path: Path) -> dict[str, Array]:
    """The weights that a saved program carries, by name."""
    with Archive(path) as archive, _explaining(path):
        weights = archive.weights(read=True)
        plain = {id(tensor): _plain(tensor) for tensor in weights.values()}
    return {name: plain[id(tensor)] for name, tensor in weights.items()}


def _share_mode(program: Any) -> None:
    """Give the program weights of the kind of the values in it: fakes of one mode that claim to be on the CPU."""
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None:
        return
    mode.allow_non_fake_inputs = True  # constants are real
    for name, tensor in program.state_dict.items():
        fake = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        program.state_dict[name] = torch.nn.Parameter(fake, requires_grad=False) if is_parameter else fake
