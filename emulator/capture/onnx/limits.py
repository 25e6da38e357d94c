"""What an ONNX file may ask of the compiler, and the one error for a file that asks for more.

A file of a few kilobytes can ask for any amount of work: loops in loops, functions that call each other, tables of any
size. Each limit is several times what the largest models need that anyone exports.
"""

from typing import Final

from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import NOWHERE, Origin, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Operator

MiB: Final = 2**20

FILE_BYTES: Final = 2**31 - 1  # protobuf reads no message that is longer
FILE_PARTS: Final = 2_000_000  # fields of all messages, the bytes of a tensor being one; a node takes about ten
UNCOUNTED_BYTES: Final = 4 * MiB  # as many parts as that can have take no more memory
FILE_NODES: Final = 50_000  # a decoder of 80 layers has 20,000 when it is exported without functions
FILE_NAMES: Final = 2_000_000  # operands, results and attributes of all nodes
NAME_CHARACTERS: Final = 1024  # a name is repeated in the origin of each node that is made of its node
WRITTEN_OUT: Final = 150_000  # nodes read and made, once functions and loops are written out: a check of a minute
LOOP_TURNS: Final = 4096  # a loop that turns more often is none that a program with fixed shapes should have
DEPTH: Final = 48  # bodies in bodies and calls in calls; Python's stack ends at about three times that
CONSTANT_BYTES: Final = 1024 * MiB  # all tables that the importer makes or computes with
SHARED_DATA: Final = 4  # tied weights are read twice; more often than this on the average is a bomb


class BeyondLimit(CaptureError):
    """The file asks for more than the compiler does for any model."""

    def __init__(self, name: str, what: str, found: int, limit: int, way_out: str) -> None:
        super().__init__(f"{name} {what.format(f'{found:,}')}, and the limit is {limit:,}; {way_out}")


class BoundedBuilder(GraphBuilder):
    """A graph in the making that counts nodes and the bytes of tables, and refuses what is beyond the limits."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._steps = 0
        self._bytes = 0

    def step(self, count: int = 1) -> None:
        """Nodes were read or written, or as much work was done as they take."""
        self._steps += count
        if self._steps > WRITTEN_OUT:
            raise BeyondLimit(
                self._name,
                "has more than {} nodes once its loops and functions are written out",
                WRITTEN_OUT,
                WRITTEN_OUT,
                "use operators on whole tensors in place of loops, or export a smaller part of the model",
            )

    def handle(self, nbytes: int) -> None:
        """Tables of so many bytes were made, or computed with."""
        self._bytes += nbytes
        if self._bytes > CONSTANT_BYTES:
            raise BeyondLimit(
                self._name,
                "computes with {} bytes of constants",
                self._bytes,
                CONSTANT_BYTES,
                "make large tables initialisers, which are weights, or compute them at run time",
            )

    def add(self, op: Operator, *operands: Value, origin: Origin = NOWHERE) -> Value:
        self.step()
        return super().add(op, *operands, origin=origin)

    def constant(self, data: Array, dtype: DType) -> Value:
        self.handle(data.nbytes)
        return super().constant(data, dtype)
