"""Where a traced operation, or a failure to trace, stands in the user's model; never a path of this machine."""

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from emulator.graph import Origin

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
# Code that runs models is never the user's model.
_MACHINERY = ("torch/", "emulator/")


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
