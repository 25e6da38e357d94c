"""Dispatch of capture calls: to the confined process inside `emulator.confinement.confined()`, else to this process."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from nxpipe.emulator.capture.request import CaptureRequest
from nxpipe.emulator.confinement import ModelAccess, active_limits

_Result = TypeVar("_Result")
_MODEL_TYPE: Final = 100  # characters
_WITHOUT_DATA: Final = ("names_onnx", "axes_onnx")  # calls that need no external data


def call_for_model(kind: type[_Result], name: str, request: CaptureRequest, *more: Any) -> _Result:
    """A call about the model of a configuration; the confined process receives only the configuration."""
    text = json.dumps([dict(request.config), request.task], default=str)
    model_type = request.config.get("model_type")
    access = ModelAccess(
        f"model {hashlib.sha256(text.encode()).hexdigest()}",
        model_type[:_MODEL_TYPE] if isinstance(model_type, str) else "",
    )
    return _call(kind, name, (request, *more), access)


def call_for_file(kind: type[_Result], name: str, path: Path, *more: Any) -> _Result:
    """A call about a saved program. The confined process may read the file and its external data in the same folder."""
    path = path.absolute()
    data = _external_data(path) if path.suffix == ".onnx" and name not in _WITHOUT_DATA and active_limits() else ()
    return _call(kind, name, (path, *more), ModelAccess(_version(path), reads=(path, *data)))


def call_for_folder(kind: type[_Result], name: str, folder: Path, *more: Any) -> _Result:
    """A call about the files in a folder, which may be symlinks into a cache."""
    folder = folder.absolute()
    linked = [path.resolve() for path in folder.iterdir() if path.is_symlink()] if folder.is_dir() else []
    return _call(kind, name, (folder, *more), ModelAccess(f"folder {folder}", reads=(folder, *linked)))


def _call(kind: type[_Result], name: str, arguments: tuple[Any, ...], access: ModelAccess) -> _Result:
    limits = active_limits()
    result: Any = None
    if limits is not None:
        from nxpipe.emulator.confinement import client

        result = client.call(name, arguments, limits, access)
    else:
        from nxpipe.emulator.confinement.calls import run_call

        result = run_call(name, arguments)
    assert isinstance(result, kind)
    return result


def _version(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return f"file {path}"
    return f"file {path} {status.st_mtime_ns} {status.st_size}"


def _external_data(path: Path) -> Sequence[Path]:
    """The external data files inside of the folder; others are refused when they are read."""
    folder = path.parent.resolve()
    parts = [(path.parent / name).resolve() for name in call_for_file(tuple, "names_onnx", path)]
    return [part for part in parts if part.is_relative_to(folder)]
