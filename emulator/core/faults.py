"""Faults of a program that the emulated core reports, where a real core would compute silently and wrongly."""

from collections.abc import Sequence

from nxpipe.emulator.errors import ExecutionError


class MachineFault(ExecutionError):
    """The root of these faults. `where` is the instruction at fault."""

    remedy = ""

    def __init__(self, what: str, where: str = "") -> None:
        self.what, self.where = what, where
        super().__init__(f"{where}: {what}; {self.remedy}" if where else f"{what}; {self.remedy}")

    def at(self, where: str) -> "MachineFault":
        """The same, as the fault of an instruction."""
        return type(self)(self.what, where)


class Unwritten(MachineFault):
    """A read of bytes that have not been written since the run began."""

    remedy = "write them first, or wait for the instruction that does"


class OutOfBounds(MachineFault):
    """An access outside of a partition or of a buffer."""

    remedy = "move it, or make it smaller"


class SumNotBegun(MachineFault):
    """A matmul that accumulates where no matmul has begun a sum."""

    remedy = "let the first matmul of a sum not accumulate, and let nothing else write there before the last"


class MalformedInstruction(MachineFault):
    """An instruction whose operands do not fit each other."""

    remedy = "check the program with emulator.isa.legality"


class Race(MachineFault):
    """Two accesses to the same bytes, one of them a write, that no semaphore wait orders."""

    remedy = "let the later one wait for the earlier one"


class Deadlock(MachineFault):
    """Engines with instructions left, none of which can proceed."""

    remedy = "wait only for instructions that come before in the program"

    def __init__(self, what: str, where: str = "", waiting: Sequence[str] = ()) -> None:
        self.waiting = tuple(waiting)
        super().__init__("; ".join([what, *waiting]), where)
