"""The base class of all instructions, modelled on the public kernel interface of NeuronCores (NKI).

An instruction is a frozen record. The module of its engine (`dma`, `tensor`, `scalar`, `vector`, `gpsimd`,
`collective`) declares its fields, the `engines` that execute it, the `violations` of its documented limits, and its
cost in `cycles`. `emulator.core.engines` has its semantics, and docs/reference/isa.md its specification.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.operands import Far, Place, Tile

if TYPE_CHECKING:
    from nxpipe.emulator.isa.constraints import InstructionContext, Violations


class Engine(StrEnum):
    """An instruction stream. Each engine executes its own instructions in order, in parallel with all others."""

    TENSOR = "tensor"
    VECTOR = "vector"
    SCALAR = "scalar"
    GPSIMD = "gpsimd"
    COLLECTIVE = "collective"
    DMA0 = "dma0"
    DMA1 = "dma1"
    DMA2 = "dma2"
    DMA3 = "dma3"
    DMA4 = "dma4"
    DMA5 = "dma5"
    DMA6 = "dma6"
    DMA7 = "dma7"

    __hash__ = str.__hash__  # that of Enum is a function in Python


DMA_QUEUES = tuple(engine for engine in Engine if engine.startswith("dma"))


class Alu(StrEnum):
    """Operators of the vector engine and of the engines that share its instructions."""

    ADD = "add"
    SUBTRACT = "subtract"
    MULTIPLY = "multiply"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"
    EQUAL = "equal"
    NOT_EQUAL = "not_equal"
    GREATER_EQUAL = "greater_equal"
    GREATER = "greater"
    LESS_EQUAL = "less_equal"
    LESS = "less"
    LOGICAL_AND = "logical_and"
    LOGICAL_OR = "logical_or"
    LOGICAL_XOR = "logical_xor"
    POWER = "power"
    ABS = "abs"
    SQUARE = "square"
    RELU = "relu"
    RSQRT = "rsqrt"
    RECIPROCAL = "reciprocal"
    BITWISE_AND = "bitwise_and"
    BITWISE_OR = "bitwise_or"
    BITWISE_XOR = "bitwise_xor"
    INVERT = "invert"
    LEFT_SHIFT = "left_shift"
    RIGHT_SHIFT = "right_shift"


BITS: Final = frozenset({Alu.BITWISE_AND, Alu.BITWISE_OR, Alu.BITWISE_XOR, Alu.INVERT, Alu.LEFT_SHIFT, Alu.RIGHT_SHIFT})
UNARY: Final = frozenset({Alu.ABS, Alu.SQUARE, Alu.RELU, Alu.RSQRT, Alu.RECIPROCAL, Alu.INVERT})
BINARY: Final = frozenset(Alu) - UNARY
COMPARISONS: Final = frozenset({Alu.EQUAL, Alu.NOT_EQUAL, Alu.GREATER_EQUAL, Alu.GREATER, Alu.LESS_EQUAL, Alu.LESS})


_PLACES: Final = (Tile, Far)


@dataclass(frozen=True, slots=True)
class Wait:
    """A semaphore wait: until `engine` has executed `done` of its instructions. A count below 1 is always fulfilled."""

    engine: Engine
    done: Affine


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """An instruction. It writes `dst` and reads all other operands, unless `writes` and `updates` declare otherwise.
    `note` is the number of its source position in the user's model; engines ignore it."""

    engine: Engine
    waits: tuple[Wait, ...] = ()
    note: int = 0

    name: ClassVar[str] = ""
    engines: ClassVar[Mapping[Engine, int]] = {}  # engines that execute it, each with its first NeuronCore generation
    writes: ClassVar[tuple[str, ...]] = ("dst",)  # fields whose operands are written
    updates: ClassVar[tuple[str, ...]] = ()  # written fields that are also read
    # For DMA: the share of a copy's rate, and the fields whose contiguous bytes limit it (empty: all fields).
    dma_rate: ClassVar[float] = 1.0
    dma_limited_by: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, name: str) -> None:
        super().__init_subclass__()
        cls.name = name

    def violations(self, context: "InstructionContext") -> "Violations":
        """The documented limits that the instruction exceeds, beyond the limits of every operand of any instruction."""
        raise NotImplementedError(self.name)

    def cycles(self, core: CoreSpec) -> float:
        """Cycles during which the engine is busy. DMA has no cycles: see `emulator.isa.cost`."""
        raise NotImplementedError(self.name)

    def with_fields(self, **changes: Any) -> Self:
        """The instruction with other values of some fields."""
        changed = object.__new__(type(self))
        vars(changed).update(vars(self), **changes)  # `replace`, without its checks of each field
        return changed

    def after(self, *waits: Wait) -> Self:
        return self.with_fields(waits=waits)

    @property
    def places(self) -> dict[str, Place]:
        """The operands in memory, by field."""
        # An instance's dictionary has the fields in their order, and is several times as fast to read as `fields`.
        return {name: value for name, value in vars(self).items() if isinstance(value, _PLACES)}

    def written(self) -> tuple[Place, ...]:
        return tuple(place for name, place in self.places.items() if name in self.writes)

    def read(self) -> tuple[Place, ...]:
        """The operands that are read, including the tiles with row numbers of indirect operands."""
        places, writes, updates = self.places, self.writes, self.reads_of_dst()
        own = [place for name, place in places.items() if name not in writes or name in updates]
        rows = [place.rows for place in places.values() if isinstance(place, Far) and place.rows]
        return (*own, *rows)

    def reads_of_dst(self) -> tuple[str, ...]:
        return self.updates
