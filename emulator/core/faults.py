"""What a program can do wrong on a core that hides nothing."""

from collections.abc import Sequence

from nxpipe.emulator.errors import ExecutionError


class MachineFault(ExecutionError):
    """Something that a real core would do silently, and wrongly. `where` is the instruction that did it."""

    way_out = ""

    def __init__(self, what: str, where: str = "") -> None:
        self.what, self.where = what, where
        super().__init__(f"{where}: {what}; {self.way_out}" if where else f"{what}; {self.way_out}")

    def at(self, where: str) -> "MachineFault":
        """The same, as the fault of an instruction."""
        return type(self)(self.what, where)


class Unwritten(MachineFault):
    """A read of bytes that nobody has written since the run began."""

    way_out = "write them first, or wait for whoever does"


class OutOfBounds(MachineFault):
    """An access outside of a partition or of a buffer."""

    way_out = "move it, or make it smaller"


class SumNotBegun(MachineFault):
    """A matmul that adds to what no matmul has begun."""

    way_out = "let the first matmul of a sum not accumulate, and nothing else write there before the last"


class Malformed(MachineFault):
    """An instruction whose operands do not go together."""

    way_out = "check the program with emulator.isa.limits, which says what each instruction takes"


class Race(MachineFault):
    """Two accesses to the same bytes, one of them a write, that no wait has put in order."""

    way_out = "let the later one wait for the earlier one"


class Deadlock(MachineFault):
    """Engines have work left, and none of them can go on."""

    way_out = "let nobody wait for more than what comes before it in the program"

    def __init__(self, what: str, where: str = "", waiting: Sequence[str] = ()) -> None:
        self.waiting = tuple(waiting)
        super().__init__("; ".join([what, *waiting]), where)
