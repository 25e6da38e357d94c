"""Errors of the compiler and emulator. Messages are one sentence; exit codes belong to the command line."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


class CompileError(Exception):
    """Base class of the errors of the compiler and the emulator."""

    deterministic = True  # the same request fails in the same way again


class CaptureError(CompileError):
    """The model could not be captured as a graph; `source` is the line of its code that failed, if known."""

    def __init__(self, message: str, source: str = "") -> None:
        super().__init__(message)
        self.source = source


class DataUnusable(CaptureError):
    """An external data file of a model is missing or truncated, or may lie outside of the model's folder."""


class LimitExceeded(CompileError):
    """Reading a model exceeded its limit of time or memory."""

    deterministic = False


class GraphBreak(CaptureError):
    """The model has data-dependent control flow: Python code that branches on a tensor's value."""


@dataclass(frozen=True, order=True)
class Finding:
    """One operator of the user's model that cannot be compiled, and its location."""

    operator: str
    module: str
    source: str
    count: int
    advice: str

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        place = ", ".join(part for part in (self.module, self.source) if part)
        return f"{self.operator}{times} at {place or 'an unknown place'}: {self.advice}"


class UnsupportedOperators(CompileError):
    """All operators of a model that the compiler does not support, not only the first."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        calls = Counter[str]()
        for finding in self.findings:
            calls[finding.operator] += finding.count
        listing = ", ".join(f"{operator} ({count} calls)" for operator, count in calls.items())
        super().__init__(f"the model uses operators that cannot be compiled: {listing}; the first is {findings[0]}")


class GraphInvalid(CompileError):
    """A graph, or its encoding, violates a rule of the intermediate representation."""


class IllTyped(GraphInvalid):
    """Operands or attributes of an operator violate its shape rule."""


class HloUnsupported(CompileError):
    """An operator, or a name, that a module for neuronx-cc cannot hold."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what} cannot be written as HLO for neuronx-cc: {reason}")


class ToolMissing(CompileError):
    """Software that a step needs is not installed."""

    deterministic = False

    def __init__(self, tool: str, purpose: str, remedy: str) -> None:
        super().__init__(f"{purpose} needs {tool}, which is not installed; run {remedy}")


class ExecutableInvalid(CompileError):
    """An encoded executable violates a rule of its format at byte `offset`."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"the executable is invalid at byte {offset}: {reason}")
        self.offset, self.reason = offset, reason


class InterfaceInvalid(CompileError):
    """The interface document of a device program is damaged, or of another version."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the interface of the program is invalid ({reason}); build it again")
        self.reason = reason


class HloInvalid(CompileError):
    """An encoded HLO module violates the format at `path`, the numbers of the fields that lead to the place."""

    def __init__(self, path: Sequence[int], reason: str) -> None:
        place = f" in field {'.'.join(map(str, path))}" if path else ""
        super().__init__(f"the HLO module is invalid{place}: {reason}")
        self.path, self.reason = tuple(path), reason


class NeffInvalid(CompileError):
    """A NEFF cannot be read: it is damaged, or of a layout other than the documented one."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the NEFF cannot be read: {reason}; compile the program again")
        self.reason = reason


class OptionsInvalid(CompileError):
    """A compiler option has an unknown value."""


@dataclass(frozen=True)
class TensorAllocation:
    """A tensor in memory: its role in the model, its shape, and its size in bytes."""

    what: str
    shape: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.what} ({self.shape}, {self.nbytes:,} bytes)"


class OutOfMemory(CompileError):
    """An allocation exceeds one of the machine's memories; `largest` are the tensors allocated there at that point."""

    named = 3  # tensors in the message

    def __init__(
        self, subject: str, memory: str, need: int, capacity: int, largest: Sequence[TensorAllocation], remedy: str
    ) -> None:
        self.subject, self.memory, self.need, self.capacity = subject, memory, need, capacity
        self.largest = tuple(largest)
        listing = "; ".join(map(str, self.largest[: self.named]))
        tensors = f"; the largest tensors are {listing}" if listing else ""
        super().__init__(
            f"{subject} needs {need:,} bytes of {memory}, and {capacity:,} are available{tensors}: {remedy}"
        )


class ExecutionError(CompileError):
    """A valid graph could not be executed on the given values."""


class InputsInvalid(ExecutionError):
    """A value given to a program is not one of its inputs, or would be misread."""


class MissingTensor(ExecutionError):
    """A parameter or an input of the graph is missing."""

    def __init__(self, role: str, name: str, expected: str) -> None:
        super().__init__(f"{role} {name!r} is missing; the graph needs it as {expected}")


class WrongTensor(ExecutionError):
    """A parameter or an input does not have the type that the graph declares."""

    def __init__(self, role: str, name: str, expected: str, found: str) -> None:
        super().__init__(f"{role} {name!r} is {found}, but the graph declares {expected}")


class IndexOutOfRange(ExecutionError):
    """A gather index is outside of its axis."""

    def __init__(self, index: int, size: int, where: str = "") -> None:
        self.index, self.size = index, size
        place = f" at {where}" if where else ""
        super().__init__(f"index {index} is outside of an axis of size {size}{place}; check the input ids' range")
