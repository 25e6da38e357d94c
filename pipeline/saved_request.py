"""A build of a program that was saved in a file: the walk of a model, from a graph and weights that the file holds."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from nxpipe.emulator.hardware import instance
from nxpipe.pipeline.models.source import ModelSource
from nxpipe.pipeline.models.weights import Tensors, numpy_dtype
from nxpipe.pipeline.order import Order
from nxpipe.pipeline.request import SAVED, BuildRequest, Shape, compiler_digest, library_version
from nxpipe.pipeline.saved import SavedProgram
from nxpipe.pipeline.verify.verify import Arrays

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.emulator.ir.types import TensorType
    from nxpipe.emulator.passes import PassOptions

# Releases of these can change what a file is read as.
_LIBRARIES: Final = {".pt2": ("torch", "numpy"), ".onnx": ("onnx", "numpy")}


@dataclass(frozen=True)
class _FileWeights:
    """The tensors in the file, whose digest is in the key already."""

    program: SavedProgram

    def identity(self) -> dict[str, object]:
        return {"kind": "program"}

    def load(self, name: str, kind: "TensorType") -> "np.ndarray[Any, Any]":
        return self._all[name].astype(numpy_dtype(str(kind.dtype)), copy=False)

    @cached_property
    def _all(self) -> Arrays:
        return self.program.parameters()


@dataclass(frozen=True, kw_only=True)
class SavedRequest(BuildRequest):
    """A request for the one program of a file."""

    program: SavedProgram

    @classmethod
    def of(cls, program: SavedProgram, order: Order) -> "SavedRequest":
        return cls(
            source=ModelSource(program.name, None, {}, SAVED, None),
            weights=_FileWeights(program),
            shapes=(Shape(SAVED, 1, 1),),
            target=instance(order.target),
            autocast=order.autocast,
            autocast_type=order.autocast_type,
            tensor_parallel=order.tp or 1,
            program=program,
        )

    @property
    def yardstick(self) -> str:
        return "PyTorch, as saved" if self.program.path.suffix == ".pt2" else "ONNX's reference evaluator"

    @cached_property
    def graph(self) -> "Graph":
        return self.program.capture()

    def check(self) -> None:
        self.require_degree()

    def model_question(self) -> dict[str, object]:
        kind, axes = self.program.path.suffix, dict(self.program.sizes)
        return {"program": {"kind": kind, "files": self.program.digests(), "axes": axes}}

    def _program_inputs(self) -> dict[str, object]:
        libraries = {name: library_version(name) for name in _LIBRARIES[self.program.path.suffix]}
        return {
            **self.model_question(),
            "compiler": {"backend": "emulator", "source": compiler_digest()},
            "libraries": libraries,
        }

    def compile(self, shape: Shape, options: "PassOptions") -> "CompiledGraph":
        from nxpipe.emulator.compile import divided
        from nxpipe.emulator.passes import run_passes

        return divided(run_passes(self.graph, replace(options, tensor_parallel=1)), options)

    def tensors(self) -> Tensors:
        return Tensors(self.weights, {name: value.type for name, value in self.graph.parameters.items()})

    def truth(self, shape: Shape, weights: Arrays, inputs: Arrays) -> Arrays:
        return self.program.truth(self.graph, inputs)
