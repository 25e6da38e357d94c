"""Dispatch of capture calls: to the confined process inside `emulator.confinement.confined()`, else to this process."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from nxpipe.emulator.capture.request import CaptureRequest
from nxpipe.emulator.confinement import ModelAccess, active_limits

_Found = TypeVar("_Found")
_MODEL_TYPE: Final = 100  # characters
_ALONE: Final = ("names_onnx", "axes_onnx")  # what an ONNX file says without its data


def call_for_model(kind: type[_Found], name: str, request: CaptureRequest, *more: Any) -> _Found:
    """An answer about the model of a configuration, which is all that the other process is given of it."""
    text = json.dumps([dict(request.config), request.task], default=str)
    model_type = request.config.get("model_type")
    about = ModelAccess(
        f"model {hashlib.sha256(text.encode()).hexdigest()}",
        model_type[:_MODEL_TYPE] if isinstance(model_type, str) else "",
    )
    return _asked(kind, name, (request, *more), about)


def call_for_file(kind: type[_Found], name: str, path: Path, *more: Any) -> _Found:
    """An answer about a saved program. The other process reads this file, and those of its data that lie beside it."""
    path = path.absolute()
    beside = _data_beside(path) if path.suffix == ".onnx" and name not in _ALONE and active_limits() else ()
    return _asked(kind, name, (path, *more), ModelAccess(_version(path), reads=(path, *beside)))


def call_for_folder(kind: type[_Found], name: str, folder: Path, *more: Any) -> _Found:
    """An answer about the files in a folder, which may be links to where a cache keeps them."""
    folder = folder.absolute()
    linked = [path.resolve() for path in folder.iterdir() if path.is_symlink()] if folder.is_dir() else []
    return _asked(kind, name, (folder, *more), ModelAccess(f"folder {folder}", reads=(folder, *linked)))


def _asked(kind: type[_Found], name: str, arguments: tuple[Any, ...], about: ModelAccess) -> _Found:
    limits = active_limits()
    found: Any = None
    if limits is not None:
        from nxpipe.emulator.confinement import client

        found = client.call(name, arguments, limits, about)
    else:
        from nxpipe.emulator.confinement.calls import run_call

        found = run_call(name, arguments)
    assert isinstance(found, kind)
    return found


def _version(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return f"file {path}"
    return f"file {path} {found.st_mtime_ns} {found.st_size}"


def _data_beside(path: Path) -> Sequence[Path]:
    """Inside of the folder; anything else is refused when it is read."""
    folder = path.parent.resolve()
    parts = [(path.parent / name).resolve() for name in call_for_file(tuple, "names_onnx", path)]
    return [part for part in parts if part.is_relative_to(folder)]
