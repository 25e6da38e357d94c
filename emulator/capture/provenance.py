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
# What Python and PyTorch raise when they are given nothing in place of a number or a table.
_OF_THE_WRONG_KIND = TypeError | AttributeError | ValueError
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
# Code that runs models is never the user's model.
_MACHINERY = ("torch/", "nxpipe/emulator/")


def origin_of(meta: Mapping[str, Any]) -> Origin:
    """The module that a traced node ran in, and the innermost line of the model's code."""
    stack = meta.get("nn_module_stack") or {}
    module = next((path for path, *_ in reversed(stack.values())), "")
    return Origin(str(module), _innermost_of_trace(meta.get("stack_trace") or ""))


@cache
def _innermost_of_trace(stack_trace: str) -> str:
    return _innermost(_FRAME.findall(stack_trace))


def failing_line(failure: TracebackType | None) -> str:
    """The innermost line of a traceback that belongs to the model, or an empty string.

    A line of the user's own comes before one of a library that it calls: that is where something can be done.
    """
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(failure)]
    own = [(path, line) for path, line in frames if "site-packages" not in Path(path).parts]
    return _innermost(own) or _innermost(frames)


def failure_details(fault: BaseException) -> str:
    """In a message's words: the line that failed, and the settings read there that the configuration leaves unset."""
    place = failing_line(fault.__traceback__)
    return (f", at {place}" if place else "") + unset_settings(fault)


def unset_settings(fault: BaseException) -> str:
    unset = _unset_settings(fault.__traceback__) if isinstance(fault, _OF_THE_WRONG_KIND) else []
    return f"; the configuration leaves {', '.join(unset)} unset" if unset else ""


def _unset_settings(failure: TracebackType | None) -> list[str]:
    """Settings that are None where the innermost line of a model's code, or one that called it, reads them."""
    for frame, line in reversed(list(traceback.walk_tb(failure))):
        if _place(frame.f_code.co_filename):
            found = list(_unset_on(linecache.getline(frame.f_code.co_filename, line), frame.f_locals))
            if found:
                return list(dict.fromkeys(found))
    return []


def _unset_on(line: str, known: Mapping[str, Any]) -> Iterator[str]:
    """Of `config.width` the width; of `self.width` the setting that the attribute was taken from."""
    owner = known.get("self")
    config = known.get("config", getattr(owner, "config", None))
    for holder, name in _READ.findall(line):
        if holder.endswith("config") and config is not None:
            if _holds_nothing(config, name):
                yield name
        elif owner is not None and _holds_nothing(owner, name):
            yield from _taken_from(type(owner), name)


def _holds_nothing(owner: Any, name: str) -> bool:
    """Without asking properties, which are code that may fail once more."""
    return getattr(owner, "__dict__", {}).get(name, 0) is None


def _taken_from(kind: type, attribute: str) -> list[str]:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # a class that was made without a file
        return []
    return re.findall(rf"self\.{attribute}\s*=\s*(?:self\.)?config\.(\w+)", source)


def _innermost(frames: Iterable[tuple[str, Any]]) -> str:
    places = ((_place(path), line) for path, line in reversed(list(frames)))
    return next((f"{place}:{line}" for place, line in places if place), "")


@cache
def _place(path: str) -> str:
    """A file below the import root that it was found in (`transformers/models/bert/modeling_bert.py`), if a model's."""
    file = Path(path)
    installed = "site-packages" in file.parts
    if path.startswith("<") or (file.is_relative_to(_STANDARD_LIBRARY) and not installed):
        return ""
    roots = [Path(root) for root in sys.path if root and file.is_relative_to(root)]
    deepest = max(roots, key=lambda root: len(root.parts), default=file.parent)
    place = file.relative_to(deepest).as_posix()
    return "" if place.startswith(_MACHINERY) else place
