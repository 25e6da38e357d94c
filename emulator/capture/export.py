"""torch.export, and what it says when a model cannot be traced.

The model is traced on fake tensors that claim to be on the CPU rather than on the meta device: both need no memory,
but constants that a model makes on its inputs' device keep their values, and so do its buffers.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from nxpipe.emulator.capture.aten import is_known
from nxpipe.emulator.capture.decoder import cache_types, flat, grouped, make_stepwise, step_input_types
from nxpipe.emulator.capture.host import small_constants_known, with_constants_if_needed
from nxpipe.emulator.capture.importer import import_program
from nxpipe.emulator.capture.inplace import without_safe_writes
from nxpipe.emulator.capture.model import build_model, quiet_libraries, stored_names
from nxpipe.emulator.capture.provenance import failing_line, why
from nxpipe.emulator.capture.request import CaptureRequest
from nxpipe.emulator.capture.signature import input_types
from nxpipe.emulator.errors import CaptureError, GraphBreak
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.types import TensorType

# What a tensor without values says when it is asked for them in ways that have no exception of their own.
_ESCAPES = ("passed to FakeTensor.__format__", ".numpy() is not supported for tensor subclasses")


def capture_model(request: CaptureRequest) -> Graph:
    """Build the model, trace it, import the trace."""
    return capture_built(build_model(request), request)


def capture_built(model: Any, request: CaptureRequest) -> Graph:
    """The graph of a model that `build_model` made; it is used up."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    names = _replace_parameters_by_fakes(model, mode)
    if not request.has_cache:
        return _traced(model, _fakes(mode, input_types(model, request)), names)
    inputs = _fakes(mode, step_input_types(request))
    with _explaining(model, inputs), mode, _compiling_state_context(), _unchanged(model):
        states = cache_types(model, request, inputs["input_ids"])
    make_stepwise(model, request)
    return _traced(model, inputs | _fakes(mode, states), names)


@contextlib.contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Whatever modules note about a run, such as the longest sequence so far, is forgotten again."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def capture_module(module: Any, inputs: Mapping[str, Any]) -> Graph:
    """The graph of any PyTorch module, called with keyword arguments of these tensors' types.

    The module is used up: its parameters are replaced by fakes, because real ones would be copied.
    """
    mode = FakeTensorMode()
    names = _replace_parameters_by_fakes(module, mode)
    return _traced(module, {name: _fake(mode, tensor) for name, tensor in inputs.items()}, names)


def _fake(mode: FakeTensorMode, tensor: Any) -> Any:
    return FakeTensor(mode, tensor.to("meta"), torch.device("cpu"))


def _fakes(mode: FakeTensorMode, types: Mapping[str, TensorType]) -> dict[str, Any]:
    def empty(type_: TensorType) -> Any:
        return torch.empty(type_.shape, dtype=getattr(torch, type_.dtype), device="meta")

    return {name: _fake(mode, empty(type_)) for name, type_ in types.items()}


def _traced(module: Any, inputs: Mapping[str, Any], names: Mapping[str, str]) -> Graph:
    return with_constants_if_needed(lambda: _traced_once(module, inputs, names))


def _traced_once(module: Any, inputs: Mapping[str, Any], names: Mapping[str, str]) -> Graph:
    with _explaining(module, inputs):
        arguments = grouped(inputs)
        program = torch.export.export(module, (), arguments, strict=False)
        program = lower_to_known_operators(program)
    graph = import_program(program, names)
    # The exporter has its own spelling of names, and keeps the order of the arguments.
    given = flat({key: arguments[key] for key in program.call_spec.in_spec.child(1).context})
    return replace(graph, inputs=dict(zip(given, graph.inputs.values(), strict=True)))


def _replace_parameters_by_fakes(module: Any, mode: FakeTensorMode) -> dict[str, str]:
    """Fakes in place of parameters, tied as they were. Returns, for each one's name, that which it is stored under."""
    stored = stored_names(module)
    fakes: dict[int, Any] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or isinstance(parameter, FakeTensor):
                continue
            if id(parameter) not in fakes:
                fake = _fake(mode, parameter.detach())
                fakes[id(parameter)] = torch.nn.Parameter(fake, requires_grad=False)
            owner._parameters[name] = fakes[id(parameter)]
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:  # it is in the checkpoint, as parameters are
                owner._buffers[name] = _fake(mode, buffer)
    return stored


def lower_to_known_operators(program: Any) -> Any:
    """Let PyTorch take apart the composite operators that we do not keep whole, and remove other in-place writes.

    Most models need neither, and the round trip costs as much as the export.
    """
    without_safe_writes(program.graph)
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    called = {node.target for module in modules for node in module.graph.nodes}
    targets = {target for target in called if isinstance(target, torch._ops.OpOverload)}
    if all(is_known(target) and not target._schema.is_mutable for target in targets):
        return program
    table = {**torch._decomp.decomposition_table, **torch.export.default_decompositions()}
    return program.run_decompositions({target: rule for target, rule in table.items() if not is_known(target)})


@contextlib.contextmanager
def _explaining(module: Any, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Run the model's own code quietly; it may raise anything, and what it raises becomes a sentence."""
    try:
        with quiet_libraries(), quiet_torch(), torch.no_grad(), small_constants_known():
            yield
    except CaptureError:
        raise
    except Exception as fault:
        raise _explained(module, inputs, fault) from fault


def _explained(module: Any, inputs: Mapping[str, Any], fault: Exception) -> CaptureError:
    place = failing_line(fault.__traceback__)
    at = f" at {place}" if place else ""
    escapes = any(sign in str(fault) for sign in _ESCAPES)
    if escapes or isinstance(fault, GuardOnDataDependentSymNode | DataDependentOutputException):
        return GraphBreak(
            f"the model decides by a tensor's value{at}, which a compiled program cannot: "
            "use torch.where for a branch, and padding or buckets for a size",
            place,
        )
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
    reason = (next(iter(str(fault).splitlines()), "") or "no reason given")[:300] + why(fault)
    return CaptureError(
        f"{type(module).__name__} cannot be traced with {shapes}: {type(fault).__name__}{at}: {reason}", place
    )


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """On failure torch prints the partial trace and logs; the exception that follows says it better."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
