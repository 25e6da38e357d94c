"""Errors of the compiler and emulator. Messages are one sentence; exit codes belong to the command line."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


class CompileError(Exception):
    """The root of everything that the compiler and the emulator raise on purpose."""

    deterministic = True  # the same request meets the same error again


class CaptureError(CompileError):
    """The model could not be traced into a graph; `source` is the line of its code that stopped it, if one did."""

    def __init__(self, message: str, source: str = "") -> None:
        super().__init__(message)
        self.source = source


class DataUnusable(CaptureError):
    """A file of weights beside a model's file is missing or cut short, or could be outside of the model's folder."""


class LimitExceeded(CompileError):
    """Reading a model took more time or memory than it was allowed."""

    deterministic = False


class GraphBreak(CaptureError):
    """The model decides in Python by a tensor's value, which a compiled program cannot do."""


@dataclass(frozen=True, order=True)
class Finding:
    """One thing in the user's model that stands in the way, and where it stands."""

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
    """Every operator of a model that the compiler cannot take, not only the first."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        calls = Counter[str]()
        for finding in self.findings:
            calls[finding.operator] += finding.count
        listing = ", ".join(f"{operator} ({count} calls)" for operator, count in calls.items())
        super().__init__(f"the model uses operators that cannot be compiled: {listing}; the first is {findings[0]}")


class GraphInvalid(CompileError):
    """A graph, or bytes that claim to be one, broke a rule of the intermediate representation."""


class IllTyped(GraphInvalid):
    """An operator was given operands or attributes that its shape rule refuses."""


class ExecutableInvalid(CompileError):
    """Bytes that claim to be an executable broke a rule of its format at `offset`."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"the executable is invalid at byte {offset}: {reason}")
        self.offset, self.reason = offset, reason


class OptionsInvalid(CompileError):
    """A compiler option has a value that does not exist."""


@dataclass(frozen=True)
class TensorAllocation:
    """A tensor that takes room: what it is to the model, its shape, and how large it is."""

    what: str
    shape: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.what} ({self.shape}, {self.nbytes:,} bytes)"


class OutOfMemory(CompileError):
    """Something does not fit into one of the machine's memories; `largest` are the tensors that are in it by then."""

    named = 3  # of them in the message

    def __init__(
        self, who: str, memory: str, need: int, room: int, largest: Sequence[TensorAllocation], way_out: str
    ) -> None:
        self.who, self.memory, self.need, self.room = who, memory, need, room
        self.largest = tuple(largest)
        listing = "; ".join(map(str, self.largest[: self.named]))
        tensors = f"; the largest tensors are {listing}" if listing else ""
        super().__init__(f"{who} needs {need:,} bytes of {memory}, and {room:,} are there{tensors}: {way_out}")


class ExecutionError(CompileError):
    """A checked graph could not be executed on the values given."""


class InputsInvalid(ExecutionError):
    """What was given to a program is none of its inputs, or would be read wrongly."""


class MissingTensor(ExecutionError):
    """A parameter or an input that the graph needs was not given."""

    def __init__(self, role: str, name: str, expected: str) -> None:
        super().__init__(f"{role} {name!r} is missing; the graph needs it as {expected}")


class WrongTensor(ExecutionError):
    """A parameter or an input does not have the type that the graph declares."""

    def __init__(self, role: str, name: str, expected: str, found: str) -> None:
        super().__init__(f"{role} {name!r} is {found}, but the graph declares {expected}")


class IndexOutOfRange(ExecutionError):
    """A gather met an index outside of its table."""

    def __init__(self, index: int, size: int, where: str = "") -> None:
        self.index, self.size = index, size
        place = f" at {where}" if where else ""
        super().__init__(f"index {index} is outside of an axis of size {size}{place}; check the input ids' range")
