"""torch.export, and what it says when a model cannot be traced.

The model is traced on fake tensors that claim to be on the CPU rather than on the meta device: both need no memory,
but constants that a model makes on its inputs' device keep their values, and so do its buffers.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from emulator.capture.aten import is_known
from emulator.capture.importer import import_program
from emulator.capture.model import build_model, quiet_libraries
from emulator.capture.provenance import failing_line
from emulator.capture.request import CaptureRequest
from emulator.errors import CaptureError
from emulator.graph import Graph


def capture_model(request: CaptureRequest) -> Graph:
    """Build the model, trace it, import the trace."""
    model = build_model(request)
    shape = (request.batch, request.sequence)
    ids = {name: torch.zeros(shape, dtype=torch.int64, device="meta") for name in ("input_ids", "attention_mask")}
    return capture_module(model, ids)


def capture_module(module: Any, inputs: Mapping[str, Any]) -> Graph:
    """The graph of any PyTorch module, called with keyword arguments of these tensors' types.

    The module is used up: its parameters are replaced by fakes, because real ones would be copied.
    """
    mode = FakeTensorMode()
    names = _first_names(module)
    _replace_parameters_by_fakes(module, mode)
    fakes = {name: FakeTensor(mode, tensor.to("meta"), torch.device("cpu")) for name, tensor in inputs.items()}
    try:
        with quiet_libraries(), _quiet_torch(), torch.no_grad():
            program = torch.export.export(module, (), fakes, strict=False)
            program = _lower_to_known_operators(program)
    except Exception as fault:  # the model's own code runs here, and may raise anything
        raise CaptureError(_explain(module, inputs, fault)) from fault
    return import_program(program, names)


def _first_names(module: Any) -> dict[str, str]:
    """Of each tied parameter's several names, the first: the one that a checkpoint stores it under."""
    first: dict[int, str] = {}
    names = module.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in names}


def _replace_parameters_by_fakes(module: Any, mode: FakeTensorMode) -> None:
    fakes: dict[int, Any] = {}  # tied parameters stay tied
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or isinstance(parameter, FakeTensor):
                continue
            if id(parameter) not in fakes:
                fake = FakeTensor(mode, parameter.detach().to("meta"), torch.device("cpu"))
                fakes[id(parameter)] = torch.nn.Parameter(fake, requires_grad=False)
            owner._parameters[name] = fakes[id(parameter)]


def _lower_to_known_operators(program: Any) -> Any:
    """Let PyTorch take apart the composite operators that we do not keep whole, and remove in-place writes.

    Most models need neither, and the round trip costs as much as the export.
    """
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    called = {node.target for module in modules for node in module.graph.nodes}
    targets = {target for target in called if isinstance(target, torch._ops.OpOverload)}
    if all(is_known(target) and not target._schema.is_mutable for target in targets):
        return program
    table = torch.export.default_decompositions()
    return program.run_decompositions({target: table[target] for target in table if not is_known(target)})


def _explain(module: Any, inputs: Mapping[str, Any], fault: Exception) -> str:
    place = failing_line(fault.__traceback__)
    at = f" at {place}" if place else ""
    if isinstance(fault, GuardOnDataDependentSymNode | DataDependentOutputException):
        return (
            f"the model decides by a tensor's value{at}, which a compiled program cannot: "
            "use torch.where for a branch, and padding or buckets for a size"
        )
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
    reason = next(iter(str(fault).splitlines()), "") or "no reason given"
    return f"{type(module).__name__} cannot be traced with {shapes}: {type(fault).__name__}{at}: {reason}"


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """On failure torch prints the partial trace and logs; the exception that follows says it better."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
