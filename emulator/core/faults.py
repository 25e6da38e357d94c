"""Faults of a program that the emulated core reports; a real core would silently compute a wrong result."""

from collections.abc import Sequence

from nxpipe.emulator.errors import ExecutionError


class MachineFault(ExecutionError):
    """The base class of program faults. `where` is the instruction at fault."""

    remedy = ""

    def __init__(self, what: str, where: str = "") -> None:
        self.what, self.where = what, where
        super().__init__(f"{where}: {what}; {self.remedy}" if where else f"{what}; {self.remedy}")

    def at(self, where: str) -> "MachineFault":
        """The same fault, attributed to an instruction."""
        return type(self)(self.what, where)


class Unwritten(MachineFault):
    """A read of bytes that have not been written since the run began."""

    remedy = "write them first, or wait for the instruction that writes them"


class OutOfBounds(MachineFault):
    """An access outside a partition or a buffer."""

    remedy = "move the operand, or make it smaller"


class SumNotBegun(MachineFault):
    """A matmul that accumulates into PSUM where no matmul has begun a sum."""

    remedy = "begin the sum with a matmul that does not accumulate; write nothing else there before the last matmul"


class MalformedInstruction(MachineFault):
    """An instruction whose operands are inconsistent."""

    remedy = "check the program with emulator.isa.legality"


class Race(MachineFault):
    """Two accesses to the same bytes, one of them a write, that no semaphore wait orders."""

    remedy = "make the later access wait for the earlier one"


class Deadlock(MachineFault):
    """Engines with instructions left, none of which can proceed."""

    remedy = "wait only for instructions that come earlier in the program"

    def __init__(self, what: str, where: str = "", waiting: Sequence[str] = ()) -> None:
        self.waiting = tuple(waiting)
        super().__init__("; ".join([what, *waiting]), where)
