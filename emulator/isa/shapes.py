"""What many instructions ask of their operands: equal shapes, a column, a type, an operator."""

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.faults import Breaches, Broken, Rule
from nxpipe.emulator.isa.instructions import Alu, Engine, Instruction
from nxpipe.emulator.isa.kinds import BITS
from nxpipe.emulator.isa.operands import Memory, Place, Tile


def equal(one: str, a: Tile, other: str, b: Tile) -> Breaches:
    if a.partitions != b.partitions or a.elements != b.elements:
        yield unequal(f"{one} is {a.partitions} x {a.elements}, {other} is {b.partitions} x {b.elements}")


def unequal(what: str) -> Broken:
    return Broken(Rule.SHAPE, what, "make them equal")


def sized(name: str, tile: Tile, partitions: int, elements: int) -> Breaches:
    if tile.partitions != partitions or tile.elements != elements:
        yield Broken(
            Rule.SHAPE,
            f"{name} is {tile.partitions} x {tile.elements}",
            f"make it {partitions} x {elements}",
        )


def column(name: str, value: object, like: Tile) -> Breaches:
    """A number for each partition, if it is not one for all."""
    if isinstance(value, Tile):
        yield from sized(name, value, like.partitions, 1)


def one_in_sbuf(one: str, a: Tile, other: str, b: Tile) -> Breaches:
    if a.memory is Memory.PSUM and b.memory is Memory.PSUM:
        yield Broken(Rule.MEMORY, f"{one} and {other} are both in PSUM", "copy one of them to SBUF first")


def typed(name: str, place: Place, allowed: tuple[DType, ...]) -> Breaches:
    if place.dtype not in allowed:
        yield Broken(Rule.DTYPE, f"{name} is {place.dtype}", f"it may be {', '.join(allowed)}")


def same_type(one: str, a: Place, other: str, b: Place) -> Breaches:
    if a.dtype is not b.dtype:
        yield Broken(Rule.DTYPE, f"{one} is {a.dtype} and {other} {b.dtype}", "convert one of them first")


def operator(name: str, op: Alu, allowed: frozenset[Alu]) -> Breaches:
    if op not in allowed:
        yield Broken(Rule.OPERATOR, f"{name} is {op}", f"it may be {', '.join(sorted(allowed))}")


def bits(instruction: Instruction, *ops: Alu | None) -> Breaches:
    """Bit operators leave no room for conversions."""
    if not any(op in BITS for op in ops):
        return
    if instruction.engine is not Engine.VECTOR:
        yield Broken(Rule.OPERATOR, f"{instruction.engine} has no bit operators", "give it to vector")
    for name, place in instruction.places.items():
        if place.dtype.is_float:
            yield Broken(Rule.DTYPE, f"{name} of a bit operator is {place.dtype}", "bit operators take integers")
