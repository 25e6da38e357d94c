"""Saved programs: a `.pt2` file of torch.export or an ONNX file, in place of a Hugging Face model.

A file contains one program with static shapes and its own weights; dynamic axes of an ONNX file get a size by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.emulator.regular_file import open_regular
from nxpipe.pipeline.models.configuration import SAVED_PROGRAM, Shape
from nxpipe.pipeline.models.versions import library_version
from nxpipe.pipeline.models.weights import Arrays, Weights, WeightsSource, numpy_dtype, sha256_of_file
from nxpipe.pipeline.util.errors import BuildRefused, ModelSourceError, NotEnoughMemory
from nxpipe.pipeline.util.process import available_memory
from nxpipe.pipeline.util.text import did_you_mean, human_bytes

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.emulator.ir.types import TensorType

# Libraries that read each kind of file: their releases can change the graph.
_LIBRARIES: Final = {".pt2": ("torch", "numpy"), ".onnx": ("onnx", "numpy")}


class UnknownAxis(BuildRefused):
    """A size for a name that is not a dynamic axis of the program."""

    def __init__(self, program: str, axis: str, known: Sequence[str]) -> None:
        listing = f"its dynamic axes are {', '.join(map(repr, known))}" if known else "all of its sizes are fixed"
        super().__init__(
            f"{program} has no dynamic axis {axis!r}, {listing}{did_you_mean(axis, known) or '; leave it out'}"
        )


@dataclass(frozen=True)
class SavedProgram:
    """A program file, and the sizes of its dynamic axes: a `ModelSource` of one program."""

    path: Path
    sizes: Mapping[str, int]

    revision = None
    task = SAVED_PROGRAM
    folder = None
    phases = default_phases = (SAVED_PROGRAM,)

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Mapping[str, object]:
        return {}

    @property
    def reference(self) -> str:
        return "PyTorch, as saved" if self.path.suffix == ".pt2" else "ONNX's reference evaluator"

    def shapes(
        self, phases: Iterable[str], batches: Iterable[int], buckets: tuple[int, ...] | None
    ) -> tuple[Shape, ...]:
        return (Shape(SAVED_PROGRAM, 1, 1),)

    def check_shapes(self, shapes: Iterable[Shape]) -> None:
        """The file's own shapes are the only ones."""

    def relevant_config(self) -> dict[str, object]:
        return {}

    def identity(self) -> dict[str, object]:
        return {"program": {"kind": self.path.suffix, "files": self.digests(), "axes": dict(self.sizes)}}

    def key_inputs(self, shapes: Iterable[Shape]) -> dict[str, object]:
        libraries = {name: library_version(name) for name in _LIBRARIES[self.path.suffix]}
        return {**self.identity(), "libraries": libraries}

    def open_weights(self, weights: WeightsSource) -> Weights:
        self.require_readable()
        self.require_axes()
        self.require_data()
        return FileWeights(self)

    def capture_request(self, shape: Shape, siblings: Iterable[Shape] = ()) -> None:
        return None

    def capture(self, shape: Shape, siblings: Iterable[Shape] = ()) -> "Graph":
        return self.graph

    @cached_property
    def graph(self) -> "Graph":
        from nxpipe.emulator.capture import capture_file

        self.require_readable()
        self.require_axes()
        return capture_file(self.path, self.sizes)

    def parameters(self, shape: Shape, siblings: Iterable[Shape] = ()) -> "Mapping[str, TensorType]":
        return {name: value.type for name, value in self.graph.parameters.items()}

    def outputs(self, shape: Shape, siblings: Iterable[Shape], weights: Arrays, inputs: Arrays) -> Arrays:
        """The outputs of PyTorch, or of ONNX's reference evaluator, with the weights in the file."""
        from nxpipe.emulator.capture import file_outputs

        if self.path.suffix == ".onnx":
            self._require_memory()
        return file_outputs(self.path, self.graph, inputs)

    def read_weights(self) -> Arrays:
        """The weights in the file and in the data files beside it."""
        from nxpipe.emulator.capture import file_parameters

        self.require_data()
        return file_parameters(self.path)

    def _require_memory(self) -> None:
        """ONNX's evaluator keeps every intermediate result until it ends."""
        from nxpipe.emulator.ops import Reshape, Slice, Transpose

        copies = [node.result.type for node in self.graph.nodes if not isinstance(node.op, Reshape | Slice | Transpose)]
        need = sum(type_.elements * type_.dtype.held.itemsize for type_ in copies)
        free = available_memory()
        if need > free:
            raise NotEnoughMemory(
                f"{self.id}: ONNX's reference evaluator needs about {human_bytes(need)} for intermediate results, and "
                f"{human_bytes(free)} are free; pass --no-verify to publish without the comparison"
            )

    def digests(self) -> dict[str, str]:
        """SHA-256 of the file, under "", and of the data files beside it; the file's own name is not part of a key."""
        self.require_readable()
        self.require_axes()
        data_files = {name: sha256_of_file(self.path.parent / name) for name in self.require_data()}
        return {"": sha256_of_file(self.path), **data_files}

    def require_data(self) -> tuple[str, ...]:
        """The names of the program's data files; ModelSourceError if one is missing, truncated or elsewhere."""
        return self._data_files

    @cached_property
    def _data_files(self) -> tuple[str, ...]:
        from nxpipe.emulator.capture import data_files
        from nxpipe.emulator.errors import DataUnusable

        try:
            return tuple(sorted(data_files(self.path)))
        except DataUnusable as error:
            raise ModelSourceError(str(error)) from error

    def require_axes(self) -> None:
        """Raise UnknownAxis for a size of an unknown axis: it would change the key and not the program."""
        for name in self.sizes.keys() - set(self._dynamic_axes if self.sizes else ()):
            raise UnknownAxis(self.id, name, self._dynamic_axes)

    @cached_property
    def _dynamic_axes(self) -> tuple[str, ...]:
        from nxpipe.emulator.capture import dynamic_axes

        return dynamic_axes(self.path)

    def require_readable(self) -> None:
        try:
            with open_regular(self.path):
                return
        except OSError as error:
            raise ModelSourceError(f"{self.path}: cannot be read ({error.strerror or error})") from error


@dataclass(frozen=True)
class FileWeights:
    """The tensors in a program file. Their digest is part of the program's key."""

    program: SavedProgram

    def identity(self) -> dict[str, object]:
        return {"kind": "program"}

    def load(self, name: str, kind: "TensorType") -> "np.ndarray[Any, Any]":
        return self._tensors[name].astype(numpy_dtype(str(kind.dtype)), copy=False)

    @cached_property
    def _tensors(self) -> Arrays:
        return self.program.read_weights()


def is_saved(model_id: str) -> bool:
    """True for a path of a .pt2 or .onnx file."""
    return Path(model_id).suffix in _LIBRARIES and not Path(model_id).is_dir()
