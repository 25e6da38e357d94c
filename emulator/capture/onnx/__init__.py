"""Reader of ONNX files. The `onnx` package is an optional dependency, imported when a file is read."""

from collections.abc import Mapping
from pathlib import Path

from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.numerics import Array


def capture_onnx(path: Path, sizes: Mapping[str, int] | None = None) -> Graph:
    """The graph of an ONNX file; `sizes` fixes its dynamic axes, by name."""
    _require_onnx()
    from nxpipe.emulator.capture.onnx.reader import capture_file

    return capture_file(path, sizes or {})


def onnx_parameters(path: Path) -> dict[str, Array]:
    """The weights of an ONNX file and its external data, by name."""
    _require_onnx()
    from nxpipe.emulator.capture.onnx.file import parameters

    return parameters(path)


def onnx_data_files(path: Path) -> dict[str, int]:
    """The external data files of an ONNX file: name to minimum size in bytes."""
    _require_onnx()
    from nxpipe.emulator.capture.onnx.external import DataFolder
    from nxpipe.emulator.capture.onnx.file import load_model

    return DataFolder(path.parent, path.name).files(load_model(path))


def onnx_data_names(path: Path) -> tuple[str, ...]:
    """The names of the external data files of an ONNX file; they need not exist and are not opened."""
    _require_onnx()
    from nxpipe.emulator.capture.onnx.external import data_locations
    from nxpipe.emulator.capture.onnx.file import load_model

    return data_locations(load_model(path))


def onnx_dynamic_axes(path: Path) -> tuple[str, ...]:
    """The names of the dynamic axes of an ONNX file's inputs."""
    _require_onnx()
    from nxpipe.emulator.capture.onnx.file import dynamic_axes

    return dynamic_axes(path)


def run_onnx(path: Path, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of the file, computed by ONNX's reference evaluator."""
    _require_onnx()
    from nxpipe.emulator.capture.onnx.file import evaluate

    return evaluate(path, inputs)


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
    except ImportError as fault:
        raise CaptureError("reading ONNX files needs the onnx package; pip install 'nxpipe[onnx]'") from fault
