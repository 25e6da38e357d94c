"""Errors across the process boundary: a name of a closed list, a message, and texts and numbers beside it."""

import traceback
from typing import Any, Final

from nxpipe.emulator import errors
from nxpipe.emulator.passes.precision import ConstantTooLarge

# Of other errors of ours the nearest of these stands for them: what they have beside a sentence is not told.
_TOLD: Final = (*vars(errors).values(), ConstantTooLarge)
_NOT_TOLD: Final = (errors.OutOfMemory, errors.ExecutableInvalid, errors.IndexOutOfRange)
_KNOWN: Final[dict[str, type[errors.CompileError]]] = {
    kind.__name__: kind
    for kind in _TOLD
    if isinstance(kind, type) and issubclass(kind, errors.CompileError) and kind not in _NOT_TOLD
}
_LONGEST: Final = 20_000  # characters
_FINDINGS: Final = 10_000
_ALLOCATOR: Final = "DefaultCPUAllocator"  # of PyTorch, which has no type for it


class ReaderFailed(Exception):
    """An error that nobody foresaw, or the end of the process; the text holds its traceback, if it had one."""


def serialize_error(fault: BaseException) -> dict[str, Any]:
    """For the wire."""
    fault = _of_memory(fault) or fault
    found: dict[str, Any] = {
        "message": str(fault)[:_LONGEST],
        "kind": "",
        "source": "",
        "findings": [],
        "trace": "",
        "behind": [],
    }
    for kind in type(fault).__mro__:
        if _KNOWN.get(kind.__name__) is kind:
            found["kind"] = kind.__name__
            break
    else:
        found["kind"] = type(fault).__name__ if isinstance(fault, MemoryError | ModuleNotFoundError) else ""
        found["trace"] = "".join(traceback.format_exception(fault))[-_LONGEST:]
    if isinstance(fault, ModuleNotFoundError):
        found["source"] = fault.name or ""
    if isinstance(fault, errors.CaptureError):
        found["source"] = fault.source
    found["behind"] = _of_the_machine(fault)
    if isinstance(fault, errors.UnsupportedOperators):
        rows = [[one.operator, one.module, one.source, one.count, one.advice] for one in fault.findings]
        found["findings"] = rows[:_FINDINGS]
    return found


def _of_memory(fault: BaseException | None) -> MemoryError | None:
    """That memory ran out, whatever library's words came around it."""
    while fault is not None:
        if isinstance(fault, MemoryError):
            return fault
        if isinstance(fault, RuntimeError) and _ALLOCATOR in str(fault):
            return MemoryError(str(fault))
        fault = fault.__cause__
    return None


def _of_the_machine(fault: BaseException) -> list[str]:
    """The kind and the words of an error of this machine's that an error of the model's stands for."""
    cause = fault.__cause__
    while cause is not None and not isinstance(cause, OSError | ImportError):
        cause = cause.__cause__
    if cause is None:
        return []
    return ["OSError" if isinstance(cause, OSError) else "ImportError", str(cause)[:_LONGEST]]


def deserialize_error(document: Any) -> Exception:
    """The error that `described` was given; anything but texts and numbers in it is a TypeError."""
    message, kind, source, trace = (_text(document[key]) for key in ("message", "kind", "source", "trace"))
    if kind == "MemoryError":
        return MemoryError(message)
    if kind == "ModuleNotFoundError":
        return ModuleNotFoundError(message, name=source)
    if kind not in _KNOWN:
        return ReaderFailed(f"the process that reads models failed: {message}\n{trace}")
    rows = [_finding(*row) for row in document["findings"]]
    error = _KNOWN[kind].__new__(_KNOWN[kind])
    Exception.__init__(error, message)
    if isinstance(error, errors.CaptureError):
        error.source = source
    if document["behind"]:
        behind, words = map(_text, document["behind"])
        error.__cause__ = OSError(words) if behind == "OSError" else ImportError(words)
    if isinstance(error, errors.UnsupportedOperators):
        error.findings = tuple(rows)
    return error


def _finding(operator: Any, module: Any, source: Any, count: Any, advice: Any) -> errors.Finding:
    return errors.Finding(_text(operator), _text(module), _text(source), _count(count), _text(advice))


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise TypeError("a text is expected in an error")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("a number is expected in an error")
    return value
