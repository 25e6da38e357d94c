"""Schema of HLO modules: the field numbers of XLA's protos that nxpipe reads, and a module as records.

The numbers are those of `xla/service/hlo.proto` and `xla/xla_data.proto`; a class of constants is
named after its message.
The records are views: they hold the message that they were read from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final

from nxpipe.emulator.errors import HloInvalid
from nxpipe.emulator.hlo.wire import Message

INPUT_NAMES: Final = "neff_input_names"  # the attribute of a parameter
OUTPUT_NAMES: Final = "neff_output_names"  # the attribute of the root, joined by commas
ALIAS_SUFFIX: Final = ".must_alias_input"  # nkipy's, of an input that shares an output's tensor and name
MUST_ALIAS: Final = 2
MAX_RANK: Final = 64


class ModuleField:
    NAME: Final = 1
    ENTRY_COMPUTATION_NAME: Final = 2
    COMPUTATIONS: Final = 3
    HOST_PROGRAM_SHAPE: Final = 4
    ENTRY_COMPUTATION_ID: Final = 6
    INPUT_OUTPUT_ALIAS: Final = 8
    IS_DYNAMIC: Final = 11
    SPMD_OUTPUT_SHARDING: Final = 12
    SPMD_PARAMETERS_SHARDINGS: Final = 14
    STACK_FRAME_INDEX: Final = 17
    FRONTEND_ATTRIBUTES: Final = 19


class ComputationField:
    NAME: Final = 1
    INSTRUCTIONS: Final = 2
    PROGRAM_SHAPE: Final = 4
    ID: Final = 5
    ROOT_ID: Final = 6


class InstructionField:
    NAME: Final = 1
    OPCODE: Final = 2
    SHAPE: Final = 3
    METADATA: Final = 7
    LITERAL: Final = 8
    PARAMETER_NUMBER: Final = 9
    TUPLE_INDEX: Final = 13
    DIMENSIONS: Final = 14
    WINDOW: Final = 15
    DISTRIBUTION: Final = 23
    CHANNEL_ID: Final = 26
    CUSTOM_CALL_TARGET: Final = 28
    GATHER_DIMENSION_NUMBERS: Final = 33
    ID: Final = 35
    OPERAND_IDS: Final = 36
    CONTROL_PREDECESSOR_IDS: Final = 37
    CALLED_COMPUTATION_IDS: Final = 38
    SHARDING: Final = 40
    BACKEND_CONFIG: Final = 43
    ALL_REDUCE_ID: Final = 45
    REPLICA_GROUPS: Final = 49
    SOURCE_TARGET_PAIRS: Final = 52
    COMPARISON_DIRECTION: Final = 63
    FRONTEND_ATTRIBUTES: Final = 68
    RNG_ALGORITHM: Final = 70
    USE_GLOBAL_DEVICE_IDS: Final = 71
    STATISTICS_VIZ: Final = 82
    COLLECTIVE_DEVICE_LIST: Final = 87
    ORIGINAL_VALUE: Final = 88
    RESULT_ACCURACY: Final = 91
    IOTA_REPLICA_GROUPS: Final = 92  # this and what follows is in jaxlib's schema, and not in that of nkipy
    SPARSITY_CONFIG: Final = 98


# A field outside of these may change what an instruction means. Reserved numbers are not in use.
KNOWN_FIELDS: Final = frozenset(range(1, 93)) - {4, 5, 6, 10, 12, 41, 42, 44, 46, 53, 64, 78, 83, 84, 86}


class ShapeField:
    ELEMENT_TYPE: Final = 2
    DIMENSIONS: Final = 3
    TUPLE_SHAPES: Final = 4
    LAYOUT: Final = 5
    IS_DYNAMIC_DIMENSION: Final = 6


class LayoutField:
    MINOR_TO_MAJOR: Final = 1
    TAIL_PADDING_ALIGNMENT_IN_ELEMENTS: Final = 16


class ProgramShapeField:
    PARAMETERS: Final = 1
    RESULT: Final = 2


class DeviceListField:
    REPLICA_GROUPS: Final = 1
    IOTA_REPLICA_GROUP_LIST: Final = 2


class IotaGroupsField:
    NUM_REPLICA_GROUPS: Final = 1
    NUM_DEVICES_PER_GROUP: Final = 2
    IOTA_RESHAPE_DIMS: Final = 3
    IOTA_TRANSPOSE_PERM: Final = 4


class AliasField:
    OUTPUT_SHAPE_INDEX: Final = 1
    PARAMETER_NUMBER: Final = 2
    PARAMETER_SHAPE_INDEX: Final = 3
    KIND: Final = 4


class WindowField:
    STRIDE: Final = 2
    WINDOW_DILATION: Final = 5
    BASE_DILATION: Final = 6


class MetadataField:
    SOURCE_FILE: Final = 3


# The only field of ReplicaGroup, Window, FrontendAttributes, HloInputOutputAliasProto; and the pair of a map entry.
ELEMENTS: Final = 1
KEY, VALUE = 1, 2
START_INDEX_MAP: Final = 3  # of GatherDimensionNumbers

# Name and bits of an element, by PrimitiveType.
ELEMENT_TYPES: Final[Mapping[int, tuple[str, int]]] = {
    1: ("pred", 8),
    2: ("s8", 8),
    3: ("s16", 16),
    4: ("s32", 32),
    5: ("s64", 64),
    6: ("u8", 8),
    7: ("u16", 16),
    8: ("u32", 32),
    9: ("u64", 64),
    10: ("f16", 16),
    11: ("f32", 32),
    12: ("f64", 64),
    16: ("bf16", 16),
    13: ("tuple", 0),
    14: ("opaque", 0),
    17: ("token", 0),
    34: ("buffer", 0),
    15: ("c64", 64),
    18: ("c128", 128),
    19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8),
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8),
    28: ("f8e4m3", 8),
    29: ("f8e3m4", 8),
    33: ("f8e8m0fnu", 8),
    21: ("s4", 4),
    22: ("u4", 4),
    26: ("s2", 2),
    27: ("u2", 2),
    30: ("s1", 1),
    31: ("u1", 1),
    32: ("f4e2m1fn", 4),
}


@dataclass(frozen=True, slots=True)
class HloShape:
    """An array's type, or a tuple of shapes. `minor_to_major` is None without a layout."""

    element_type: str
    dimensions: tuple[int, ...]
    parts: tuple["HloShape", ...]
    minor_to_major: tuple[int, ...] | None
    is_dynamic: bool
    is_tiled: bool  # its layout has a field besides the order and a tail padding of 1

    @property
    def is_array(self) -> bool:
        return self.element_type not in ("tuple", "token", "opaque", "buffer")

    @property
    def elements(self) -> int:
        return prod(self.dimensions)

    @property
    def nbytes(self) -> int:
        return (self.elements * _BITS[self.element_type] + 7) // 8

    def arrays(self) -> Iterator["HloShape"]:
        """The arrays of a tuple, or the array itself."""
        if self.element_type != "tuple":
            yield self
        for part in self.parts:
            yield from part.arrays()

    def __str__(self) -> str:
        if self.element_type == "tuple":
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.element_type}[{','.join(map(str, self.dimensions))}]"


_BITS: Final = dict(ELEMENT_TYPES.values())


@dataclass(frozen=True, slots=True)
class HloInstruction:
    proto: Message
    name: str
    opcode: str
    shape: HloShape
    id: int
    operand_ids: tuple[int, ...]

    def attribute(self, key: str) -> str | None:
        """The value of a frontend attribute; None without it."""
        return attributes(self.proto).get(key)


@dataclass(frozen=True, slots=True)
class HloComputation:
    name: str
    id: int
    root_id: int
    instructions: tuple[HloInstruction, ...]
    by_id: Mapping[int, HloInstruction] = field(repr=False)

    @property
    def root(self) -> HloInstruction | None:
        return self.by_id.get(self.root_id)

    def operands(self, instruction: HloInstruction) -> list[HloInstruction]:
        """Those that the computation has; a missing one is a finding of the checker."""
        return [self.by_id[number] for number in instruction.operand_ids if number in self.by_id]


@dataclass(frozen=True, slots=True)
class HloAlias:
    output_index: tuple[int, ...]
    parameter: int
    parameter_index: tuple[int, ...]
    kind: int


@dataclass(frozen=True, slots=True)
class HloModule:
    proto: Message
    nbytes: int
    computations: tuple[HloComputation, ...]
    entry_id: int
    aliases: tuple[HloAlias, ...]

    @classmethod
    def read(cls, data: bytes | memoryview) -> "HloModule":
        """HloInvalid unless the bytes are a module; whether a compiler accepts it is another question."""
        proto = Message.parse(data)
        shapes = _Shapes()
        computations = tuple(_computation(part, shapes) for part in proto.messages(ModuleField.COMPUTATIONS))
        if not computations:
            raise HloInvalid((ModuleField.COMPUTATIONS,), "it has no computation")
        listing = proto.message(ModuleField.INPUT_OUTPUT_ALIAS)
        aliases = tuple(map(_alias, listing.messages(ELEMENTS))) if listing else ()
        return cls(proto, len(data), computations, proto.number(ModuleField.ENTRY_COMPUTATION_ID), aliases)

    @property
    def entry(self) -> HloComputation | None:
        return next((part for part in self.computations if part.id == self.entry_id), None)

    def shape(self, proto: Message | None) -> HloShape:
        """The shape that a message holds, such as a literal's."""
        return _Shapes().read(proto)


class _Shapes:
    """Shapes by their bytes: a module has few different ones."""

    def __init__(self) -> None:
        self._known: dict[bytes, HloShape] = {}

    def of(self, owner: Message, number: int) -> HloShape:
        data = bytes(owner.data(number))
        if data not in self._known:
            self._known[data] = self.read(owner.message(number))
            owner.set(number, data)
        return self._known[data]

    def read(self, proto: Message | None) -> HloShape:
        if proto is None:
            raise HloInvalid((), "an instruction or a literal has no shape")
        number = proto.number(ShapeField.ELEMENT_TYPE)
        if number not in ELEMENT_TYPES:
            raise HloInvalid((*proto.path, ShapeField.ELEMENT_TYPE), f"no element type has the number {number}")
        dimensions = tuple(proto.numbers(ShapeField.DIMENSIONS))
        if len(dimensions) > MAX_RANK or any(size < 0 for size in dimensions):
            reason = f"it has more than {MAX_RANK} dimensions, or one is negative"
            raise HloInvalid((*proto.path, ShapeField.DIMENSIONS), reason)
        parts = tuple(map(self.read, proto.messages(ShapeField.TUPLE_SHAPES)))
        is_dynamic = any(proto.numbers(ShapeField.IS_DYNAMIC_DIMENSION))
        layout = proto.message(ShapeField.LAYOUT)
        order = None if layout is None else tuple(layout.numbers(LayoutField.MINOR_TO_MAJOR))
        return HloShape(ELEMENT_TYPES[number][0], dimensions, parts, order, is_dynamic, _is_tiled(layout))


def _is_tiled(layout: Message | None) -> bool:
    if layout is None:
        return False
    order, tail = LayoutField.MINOR_TO_MAJOR, LayoutField.TAIL_PADDING_ALIGNMENT_IN_ELEMENTS
    return any(number not in (order, tail) for number, _ in layout.fields) or layout.number(tail, 1) > 1


def _computation(proto: Message, shapes: _Shapes) -> HloComputation:
    instructions = tuple(_instruction(part, shapes) for part in proto.messages(ComputationField.INSTRUCTIONS))
    return HloComputation(
        name=proto.text(ComputationField.NAME),
        id=proto.number(ComputationField.ID),
        root_id=proto.number(ComputationField.ROOT_ID),
        instructions=instructions,
        by_id={each.id: each for each in instructions},
    )


def _instruction(proto: Message, shapes: _Shapes) -> HloInstruction:
    return HloInstruction(
        proto=proto,
        name=proto.text(InstructionField.NAME),
        opcode=proto.text(InstructionField.OPCODE),
        shape=shapes.of(proto, InstructionField.SHAPE),
        id=proto.number(InstructionField.ID),
        operand_ids=tuple(proto.numbers(InstructionField.OPERAND_IDS)),
    )


def _alias(proto: Message) -> HloAlias:
    return HloAlias(
        output_index=tuple(proto.numbers(AliasField.OUTPUT_SHAPE_INDEX)),
        parameter=proto.number(AliasField.PARAMETER_NUMBER),
        parameter_index=tuple(proto.numbers(AliasField.PARAMETER_SHAPE_INDEX)),
        kind=proto.number(AliasField.KIND),
    )


def attributes(instruction: Message) -> dict[str, str]:
    """The frontend attributes of an instruction."""
    found = instruction.message(InstructionField.FRONTEND_ATTRIBUTES)
    entries = found.messages(ELEMENTS) if found else []
    return {entry.text(KEY): entry.text(VALUE) for entry in entries}


def replica_groups(owner: Message, number: int = InstructionField.REPLICA_GROUPS) -> list[list[int]]:
    """The groups of a collective, or of another message that lists them in field `number`."""
    return [group.numbers(ELEMENTS) for group in owner.messages(number)]
