"""Serialization of errors between processes: a class name of a closed list, a message, and strings and numbers."""

import traceback
from typing import Any, Final

from nxpipe.emulator import errors
from nxpipe.emulator.passes.precision import ConstantTooLarge

# An error of any other class is sent as its nearest base class in this list, without its extra attributes.
_SENT: Final = (*vars(errors).values(), ConstantTooLarge)
_NOT_SENT: Final = (errors.OutOfMemory, errors.ExecutableInvalid, errors.IndexOutOfRange)
_KNOWN: Final[dict[str, type[errors.CompileError]]] = {
    kind.__name__: kind
    for kind in _SENT
    if isinstance(kind, type) and issubclass(kind, errors.CompileError) and kind not in _NOT_SENT
}
_LONGEST: Final = 20_000  # characters
_FINDINGS: Final = 10_000
_ALLOCATOR: Final = "DefaultCPUAllocator"  # in the message of PyTorch's RuntimeError: it has no class of its own


class ReaderFailed(Exception):
    """An unexpected error in the confined process, or its end; the message holds the traceback, if any."""


def serialize_error(fault: BaseException) -> dict[str, Any]:
    """The JSON document of an error."""
    fault = _find_memory_error(fault) or fault
    document: dict[str, Any] = {
        "message": str(fault)[:_LONGEST],
        "kind": "",
        "source": "",
        "findings": [],
        "trace": "",
        "behind": [],
    }
    for kind in type(fault).__mro__:
        if _KNOWN.get(kind.__name__) is kind:
            document["kind"] = kind.__name__
            break
    else:
        document["kind"] = type(fault).__name__ if isinstance(fault, MemoryError | ModuleNotFoundError) else ""
        document["trace"] = "".join(traceback.format_exception(fault))[-_LONGEST:]
    if isinstance(fault, ModuleNotFoundError):
        document["source"] = fault.name or ""
    if isinstance(fault, errors.CaptureError):
        document["source"] = fault.source
    document["behind"] = _find_machine_error(fault)
    if isinstance(fault, errors.UnsupportedOperators):
        rows = [[row.operator, row.module, row.source, row.count, row.advice] for row in fault.findings]
        document["findings"] = rows[:_FINDINGS]
    return document


def _find_memory_error(fault: BaseException | None) -> MemoryError | None:
    """The MemoryError, or PyTorch's allocation failure, in a chain of causes."""
    while fault is not None:
        if isinstance(fault, MemoryError):
            return fault
        if isinstance(fault, RuntimeError) and _ALLOCATOR in str(fault):
            return MemoryError(str(fault))
        fault = fault.__cause__
    return None


def _find_machine_error(fault: BaseException) -> list[str]:
    """Class and message of the OSError or ImportError in a chain of causes: a fault of this machine, not of the
    model."""
    cause = fault.__cause__
    while cause is not None and not isinstance(cause, OSError | ImportError):
        cause = cause.__cause__
    if cause is None:
        return []
    return ["OSError" if isinstance(cause, OSError) else "ImportError", str(cause)[:_LONGEST]]


def deserialize_error(document: Any) -> Exception:
    """The error of a document; TypeError for fields that are neither strings nor numbers."""
    message, kind, source, trace = (_text(document[key]) for key in ("message", "kind", "source", "trace"))
    if kind == "MemoryError":
        return MemoryError(message)
    if kind == "ModuleNotFoundError":
        return ModuleNotFoundError(message, name=source)
    if kind not in _KNOWN:
        return ReaderFailed(f"the confined process failed: {message}\n{trace}")
    rows = [_finding(*row) for row in document["findings"]]
    error = _KNOWN[kind].__new__(_KNOWN[kind])
    Exception.__init__(error, message)
    if isinstance(error, errors.CaptureError):
        error.source = source
    if document["behind"]:
        cause, reason = map(_text, document["behind"])
        error.__cause__ = OSError(reason) if cause == "OSError" else ImportError(reason)
    if isinstance(error, errors.UnsupportedOperators):
        error.findings = tuple(rows)
    return error


def _finding(operator: Any, module: Any, source: Any, count: Any, advice: Any) -> errors.Finding:
    return errors.Finding(_text(operator), _text(module), _text(source), _count(count), _text(advice))


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise TypeError("a string is expected in an error")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("a number is expected in an error")
    return value
