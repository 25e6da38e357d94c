"""Results of ONNX's own node tests through the standard backend interface: passed, unsupported, failed.

`python -m tests.conformance.onnx_report` prints the numbers and reasons.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep

from nxpipe.emulator.capture.onnx.reader import InputNeeded, capture_proto
from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.run.fast import execute

# The tests' tolerance is finer than these types: programs that round elsewhere differ by a last bit of the
# largest numbers.
_ROUNDING = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}


class EmulatorRep(BackendRep):
    """A prepared model. Inputs that determine sizes are constants; a run that changes them recompiles."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.used: frozenset[str] = frozenset()  # the graph's operators, after a run

    def run(self, inputs: Any, **_: Any) -> list[Array]:
        names = [declared.name for declared in self._model.graph.input]
        given = inputs if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=False))
        # Sequences and optional values are no tensors; a model that takes them is refused before they matter.
        arrays = {name: np.asarray(array) for name, array in given.items() if not isinstance(array, list | NoneType)}
        graph, constants = _compiled(self._model, arrays)
        self.used = frozenset(node.op.name for node in graph.nodes)
        results = execute(graph, {}, {name: arrays[name] for name in graph.inputs if name not in constants})
        return [_stored(results[output.name], output) for output in self._model.graph.output]


def _compiled(model: Any, arrays: Mapping[str, Array]) -> tuple[Graph, set[str]]:
    constants: dict[str, Array] = {}
    while True:
        try:
            return run_passes(capture_proto(model, constants=constants), PassOptions()), set(constants)
        except InputNeeded as needed:
            if set(needed.inputs) <= constants.keys():
                raise
            constants |= {name: arrays[name] for name in needed.inputs}


def _stored(array: Array, output: Any) -> Array:
    """The array in the model's type; floats leave the emulator as float32."""
    return array.astype(onnx.helper.tensor_dtype_to_np_dtype(output.type.tensor_type.elem_type))


class EmulatorBackend(Backend):
    """ONNX's standard interface to the emulator."""

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **_: Any) -> EmulatorRep:
        return EmulatorRep(model)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


@dataclass(frozen=True)
class Outcome:
    """The result of one node test; `operators` are those of its model, `used` those of the last graph."""

    test: str
    operators: tuple[str, ...]
    verdict: str
    reason: str
    used: frozenset[str]


@cache
def node_tests() -> tuple[Any, ...]:
    """Every node test of the installed onnx, generated in memory."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return tuple(load_model_tests(kind="node"))


def outcome(test: Any) -> Outcome:
    operators = tuple(sorted({node.op_type for node in test.model.graph.node}))
    backend = EmulatorBackend.prepare(test.model)
    verdict, reason = _verdict(test, backend)
    return Outcome(test.name, operators, verdict, " ".join(reason.split()), backend.used)


def _verdict(test: Any, backend: EmulatorRep) -> tuple[str, str]:
    for inputs, expected in test.data_sets:
        try:
            found = backend.run(_as_arrays(inputs))
        except CompileError as refusal:
            return "unsupported", str(refusal)
        except Exception as fault:  # other errors are defects of ours; list them and continue
            return "failed", f"{type(fault).__name__}: {fault}"
        for result, wanted in zip(found, _as_arrays(expected), strict=True):
            reason = _difference(result, wanted, test)
            if reason:
                return "failed", reason
    return "passed", ""


def _as_arrays(values: Sequence[Any]) -> list[Any]:
    return [onnx.numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in values]


def _difference(found: Array, wanted: Any, test: Any) -> str:
    try:
        exact = np.asarray(wanted)
        floating = exact.dtype.kind not in "biu"
        a, b = (x.astype(np.float64) if floating else x for x in (found, exact))
        assert found.dtype == exact.dtype, f"{found.dtype} instead of {exact.dtype}"
        assert a.shape == b.shape, f"{a.shape} instead of {b.shape}"
        slack = _ROUNDING.get(exact.dtype.name, 0.0) * np.max(np.abs(b), initial=0, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=test.rtol, atol=max(test.atol, slack))
    except AssertionError as difference:
        return str(difference)
    return ""


def outcomes() -> Iterator[Outcome]:
    return (outcome(test) for test in node_tests())


def report(found: Sequence[Outcome]) -> str:
    """The failures with reasons, then the totals."""
    rest = sorted((item.verdict, item.reason, item.test) for item in found if item.verdict != "passed")
    lines = [f"{verdict:12} {test:60} {reason[:240]}" for verdict, reason, test in rest]
    totals = ", ".join(f"{n} {verdict}" for verdict, n in sorted(Counter(item.verdict for item in found).items()))
    return "\n".join([*lines, f"onnx {onnx.__version__}, operator set {onnx.defs.onnx_opset_version()}: {totals}"])


if __name__ == "__main__":
    sys.stdout.write(report(list(outcomes())) + "\n")
