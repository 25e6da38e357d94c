"""A program that was saved in a file, a `.pt2` of torch.export or an ONNX file, in place of a Hugging Face model.

Such a file holds one program, whose shapes are its own; ONNX may leave axes open, which have to be fixed by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from pipeline.errors import ModelSourceError
from pipeline.folders import expanded
from pipeline.models.file_digest import sha256_of_file
from pipeline.verification.verify import Arrays

if TYPE_CHECKING:
    from emulator.graph import Graph
    from emulator.passes import Pass, PassOptions

_SUFFIXES: Final = (".pt2", ".onnx")
# Options that choose among the programs of a Hugging Face model, or its weights.
_OF_MODELS: Final = ("task", "batches", "buckets", "phases", "weights", "revision")


@dataclass(frozen=True)
class SavedProgram:
    """The file, and the sizes of axes that it leaves open."""

    path: Path
    sizes: Mapping[str, int]

    @property
    def name(self) -> str:
        return self.path.name

    def capture(self) -> "Graph":
        from emulator.capture import capture_file

        self.require_readable()
        return capture_file(self.path, self.sizes)

    def parameters(self) -> Arrays:
        """The weights in the file and in those beside it."""
        from emulator.capture import file_parameters

        self.require_data()
        return file_parameters(self.path)

    def truth(self, graph: "Graph", inputs: Arrays) -> Arrays:
        """What PyTorch, or ONNX's reference evaluator, makes of these inputs."""
        from emulator.capture import file_outputs

        return file_outputs(self.path, graph, inputs)

    def digests(self) -> dict[str, str]:
        """What the file is, and those of data beside it: by digest, and free of its own name."""
        self.require_readable()
        beside = {name: sha256_of_file(self.path.parent / name) for name in self.require_data()}
        return {"": sha256_of_file(self.path), **beside}

    def require_data(self) -> tuple[str, ...]:
        """The names of the files of data beside it, once it is certain that they are there."""
        from emulator.capture import data_files

        needed = data_files(self.path)
        for name, size in needed.items():
            self._require_part(self.path.parent / name, size)
        return tuple(sorted(needed))

    def _require_part(self, part: Path, size: int) -> None:
        if not part.resolve().is_relative_to(self.path.parent.resolve()):
            raise ModelSourceError(f"{self.path}: its data in {part} is outside of its folder, and is never read")
        try:
            with part.open("rb") as file:
                found = file.seek(0, 2)
        except OSError as error:
            raise ModelSourceError(
                f"{self.path}: its weights in {part.name} cannot be read ({error.strerror or error}); "
                "keep both files in one folder"
            ) from error
        if found < size:
            raise ModelSourceError(
                f"{self.path}: its weights in {part.name} end at byte {found:,}, where {size:,} are promised; "
                "copy that file again"
            )

    def compile(self, options: "PassOptions", steps: "Sequence[Pass] | None" = None) -> "Graph":
        from emulator.passes import run_passes

        return run_passes(self.capture(), options, steps)

    def require_readable(self) -> None:
        try:
            with self.path.open("rb"):
                return
        except OSError as error:
            raise ModelSourceError(f"{self.path}: cannot be read ({error.strerror or error})") from error


def is_saved(model_id: str) -> bool:
    """Whether it names a file with a program in it."""
    return Path(model_id).suffix in _SUFFIXES and not Path(model_id).is_dir()


class Axis(click.ParamType[tuple[str, int]]):
    """An open axis of an ONNX file and the size that it is to have."""

    name = "NAME=SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        name, _, size = str(value).rpartition("=")
        if not name or not size.isdecimal() or not 1 <= int(size) <= 2**31:
            self.fail(f"{value!r} is not an axis and its size, as in batch=1", param, ctx)
        return name, int(size)


axis_option = click.option(
    "--axis",
    "axes",
    multiple=True,
    type=Axis(),
    help="Fix an axis that an ONNX file leaves open, by its name there; may be repeated.",
)


def saved_program(
    ctx: click.Context, model_id: str | None, flags: Mapping[str, Any], axes: Sequence[tuple[str, int]]
) -> SavedProgram | None:
    """The file that --model-id names, if it is one; words that say nothing about it are refused."""
    if model_id is None or not is_saved(model_id):
        if axes:
            raise click.UsageError("--axis fixes the open axes of an ONNX file; pass one by --model-id FILE.onnx", ctx)
        return None
    typed = [name for name in flags if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    useless = [name for name in typed if name in _OF_MODELS]
    if useless:
        raise click.UsageError(
            f"--{useless[0].replace('_', '-')} says nothing about {Path(model_id).name}, a program with shapes and "
            "weights of its own; leave it out, and fix open axes of an ONNX file by --axis NAME=SIZE",
            ctx,
        )
    return SavedProgram(expanded(model_id), dict(axes))
