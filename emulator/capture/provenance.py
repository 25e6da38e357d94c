"""Provenance of a traced operation or failure: module path and source line in the user's model, never a path of this
machine.
"""

import inspect
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from nxpipe.emulator.ir.nodes import Origin

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_READ = re.compile(r"\b((?:self\.)?config|self)\.(\w+)")
# Exceptions of Python and PyTorch for None in place of a number or a table.
_NONE_ERRORS = TypeError | AttributeError | ValueError
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
# Frames of these libraries are not the model's code.
_MACHINERY = ("torch/", "nxpipe/emulator/")


def origin_of(meta: Mapping[str, Any]) -> Origin:
    """The module path of a traced node, and the innermost source line of the model's code."""
    stack = meta.get("nn_module_stack") or {}
    module = next((path for path, *_ in reversed(stack.values())), "")
    return Origin(str(module), _innermost_of_trace(meta.get("stack_trace") or ""))


@cache
def _innermost_of_trace(stack_trace: str) -> str:
    return _innermost(_FRAME.findall(stack_trace))


def failing_line(failure: TracebackType | None) -> str:
    """The innermost traceback line in the model's code, or an empty string.

    A line of the user's code takes precedence over one of an installed library.
    """
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(failure)]
    user = [(path, line) for path, line in frames if "site-packages" not in Path(path).parts]
    return _innermost(user) or _innermost(frames)


def failure_details(fault: BaseException) -> str:
    """For an error message: the failing line, and the settings read there that are unset in the configuration."""
    place = failing_line(fault.__traceback__)
    return (f", at {place}" if place else "") + unset_settings(fault)


def unset_settings(fault: BaseException) -> str:
    unset = _unset_settings(fault.__traceback__) if isinstance(fault, _NONE_ERRORS) else []
    return f"; the configuration leaves {', '.join(unset)} unset" if unset else ""


def _unset_settings(failure: TracebackType | None) -> list[str]:
    """Settings that are None, read by the innermost line of the model's code or by a caller of it."""
    for frame, line in reversed(list(traceback.walk_tb(failure))):
        if _model_file(frame.f_code.co_filename):
            names = list(_unset_on(linecache.getline(frame.f_code.co_filename, line), frame.f_locals))
            if names:
                return list(dict.fromkeys(names))
    return []


def _unset_on(line: str, variables: Mapping[str, Any]) -> Iterator[str]:
    """The unset settings on one line: `width` for `config.width`; for `self.width` the setting assigned to it."""
    owner = variables.get("self")
    config = variables.get("config", getattr(owner, "config", None))
    for holder, name in _READ.findall(line):
        if holder.endswith("config") and config is not None:
            if _is_none(config, name):
                yield name
        elif owner is not None and _is_none(owner, name):
            yield from _settings_assigned_to(type(owner), name)


def _is_none(owner: Any, name: str) -> bool:
    """True if an instance attribute is None; properties are not evaluated, because they may fail."""
    return getattr(owner, "__dict__", {}).get(name, 0) is None


def _settings_assigned_to(kind: type, attribute: str) -> list[str]:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # a class without a source file
        return []
    return re.findall(rf"self\.{attribute}\s*=\s*(?:self\.)?config\.(\w+)", source)


def _innermost(frames: Iterable[tuple[str, Any]]) -> str:
    places = ((_model_file(path), line) for path, line in reversed(list(frames)))
    return next((f"{place}:{line}" for place, line in places if place), "")


@cache
def _model_file(path: str) -> str:
    """A source file relative to its import root (`transformers/models/bert/modeling_bert.py`); empty for other
    files."""
    file = Path(path)
    installed = "site-packages" in file.parts
    if path.startswith("<") or (file.is_relative_to(_STANDARD_LIBRARY) and not installed):
        return ""
    roots = [Path(root) for root in sys.path if root and file.is_relative_to(root)]
    deepest = max(roots, key=lambda root: len(root.parts), default=file.parent)
    place = file.relative_to(deepest).as_posix()
    return "" if place.startswith(_MACHINERY) else place
