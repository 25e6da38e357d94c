"""A program that was saved in a file, a `.pt2` of torch.export or an ONNX file, in place of a Hugging Face model.

Such a file holds one program, whose shapes are its own; ONNX may leave axes open, which have to be fixed by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.emulator.regular_file import open_regular
from nxpipe.pipeline.models.file_digest import sha256_of_file
from nxpipe.pipeline.util.errors import BuildRefused, ModelSourceError, NotEnoughMemory
from nxpipe.pipeline.util.process import available_memory
from nxpipe.pipeline.util.text import did_you_mean, human_bytes
from nxpipe.pipeline.verify.verify import Arrays

if TYPE_CHECKING:
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.emulator.passes import Pass, PassOptions

_SUFFIXES: Final = (".pt2", ".onnx")


class UnknownAxis(BuildRefused):
    """A size for an axis that the program does not leave open."""

    def __init__(self, program: str, axis: str, known: Sequence[str]) -> None:
        listing = f"its open axes are {', '.join(map(repr, known))}" if known else "all of its sizes are fixed"
        super().__init__(
            f"{program} has no open axis {axis!r}, {listing}{did_you_mean(axis, known) or '; leave it out'}"
        )


@dataclass(frozen=True)
class SavedProgram:
    """The file, and the sizes of axes that it leaves open."""

    path: Path
    sizes: Mapping[str, int]

    @property
    def name(self) -> str:
        return self.path.name

    def capture(self) -> "Graph":
        from nxpipe.emulator.capture import capture_file

        self.require_readable()
        self.require_axes()
        return capture_file(self.path, self.sizes)

    def parameters(self) -> Arrays:
        """The weights in the file and in those beside it."""
        from nxpipe.emulator.capture import file_parameters

        self.require_data()
        return file_parameters(self.path)

    def truth(self, graph: "Graph", inputs: Arrays) -> Arrays:
        """What PyTorch, or ONNX's reference evaluator, makes of these inputs."""
        from nxpipe.emulator.capture import file_outputs

        if self.path.suffix == ".onnx":
            self._require_memory(graph)
        return file_outputs(self.path, graph, inputs)

    def _require_memory(self, graph: "Graph") -> None:
        """ONNX's evaluator keeps every result until it ends, those that no output needs too."""
        from nxpipe.emulator.ops import Reshape, Slice, Transpose

        made = [node.result.type for node in graph.nodes if not isinstance(node.op, Reshape | Slice | Transpose)]
        need = sum(type_.elements * type_.dtype.held.itemsize for type_ in made)
        room = available_memory()
        if need > room:
            raise NotEnoughMemory(
                f"{self.name}: ONNX's reference evaluator needs about {human_bytes(need)} for results on the way, and "
                f"{human_bytes(room)} are free; pass --no-verify to publish without the comparison"
            )

    def digests(self) -> dict[str, str]:
        """What the file is, and those of data beside it: by digest, and free of its own name."""
        self.require_readable()
        self.require_axes()
        beside = {name: sha256_of_file(self.path.parent / name) for name in self.require_data()}
        return {"": sha256_of_file(self.path), **beside}

    def require_data(self) -> tuple[str, ...]:
        """The names of the files of data beside it, once it is certain that they are there, whole, and inside."""
        from nxpipe.emulator.capture import data_files
        from nxpipe.emulator.errors import DataUnusable

        try:
            return tuple(sorted(data_files(self.path)))
        except DataUnusable as error:
            raise ModelSourceError(str(error)) from error

    def require_axes(self) -> None:
        """A size is given to axes alone that the program leaves open: any other would be a part of its key."""
        if not self.sizes:
            return
        from nxpipe.emulator.capture import open_axes

        known = open_axes(self.path)
        for name in self.sizes.keys() - set(known):
            raise UnknownAxis(self.name, name, known)

    def compile(self, options: "PassOptions", steps: "Sequence[Pass] | None" = None) -> "Graph":
        from nxpipe.emulator.passes import run_passes

        return run_passes(self.capture(), options, steps)

    def require_readable(self) -> None:
        try:
            with open_regular(self.path):
                return
        except OSError as error:
            raise ModelSourceError(f"{self.path}: cannot be read ({error.strerror or error})") from error


def is_saved(model_id: str) -> bool:
    """Whether it names a file with a program in it."""
    return Path(model_id).suffix in _SUFFIXES and not Path(model_id).is_dir()
