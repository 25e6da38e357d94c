"""Canonical form of an HLO module: the proto that jaxlib writes, in the form of producers that neuronx-cc accepts.

Ids of instructions and computations are small and dense, replica groups are lists in field 49, aliases are demanded,
the root has the names of the outputs, and nothing of the machine or the process that wrote the module is left. The
function is idempotent, and equal modules have equal bytes. docs/reference/hlo-proto.md has the table.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Final

from nxpipe.emulator.errors import HloInvalid
from nxpipe.emulator.hlo.schema import (
    ALIAS_SUFFIX,
    ELEMENTS,
    INPUT_NAMES,
    KEY,
    KNOWN_FIELDS,
    MAX_RANK,
    MUST_ALIAS,
    OUTPUT_NAMES,
    VALUE,
    AliasField,
    ComputationField,
    DeviceListField,
    InstructionField,
    IotaGroupsField,
    LayoutField,
    MetadataField,
    ModuleField,
    ProgramShapeField,
    ShapeField,
    attributes,
    replica_groups,
)
from nxpipe.emulator.hlo.wire import Message

MAX_WORLD: Final = 1 << 16  # ranks in a list of groups

# Everything else of a module describes the process that wrote it (its id), or a compiler's later steps (a schedule).
_KEPT: Final = frozenset(
    [
        ModuleField.NAME,
        ModuleField.ENTRY_COMPUTATION_NAME,
        ModuleField.COMPUTATIONS,
        ModuleField.HOST_PROGRAM_SHAPE,
        ModuleField.ENTRY_COMPUTATION_ID,
        ModuleField.INPUT_OUTPUT_ALIAS,
        ModuleField.IS_DYNAMIC,
        ModuleField.SPMD_OUTPUT_SHARDING,
        ModuleField.SPMD_PARAMETERS_SHARDINGS,
        ModuleField.FRONTEND_ATTRIBUTES,
    ]
)
# Names for the partitioned modules of XLA, which Neuron's modules are not: one program, its rank given when it loads.
_DROPPED: Final = (
    InstructionField.CHANNEL_ID,
    InstructionField.ALL_REDUCE_ID,
    InstructionField.USE_GLOBAL_DEVICE_IDS,
    InstructionField.STATISTICS_VIZ,
    InstructionField.ORIGINAL_VALUE,
)
_DROPPED_IF_EMPTY: Final = (
    InstructionField.FRONTEND_ATTRIBUTES,
    InstructionField.RESULT_ACCURACY,
    InstructionField.SPARSITY_CONFIG,
)
_OPERANDS: Final = InstructionField.OPERAND_IDS
_PREDECESSORS: Final = InstructionField.CONTROL_PREDECESSOR_IDS
_CALLED: Final = InstructionField.CALLED_COMPUTATION_IDS
_GROUPS: Final = (
    InstructionField.REPLICA_GROUPS,
    InstructionField.COLLECTIVE_DEVICE_LIST,
    InstructionField.IOTA_REPLICA_GROUPS,
)
_GROUP_FORMS: Final = (DeviceListField.REPLICA_GROUPS, DeviceListField.IOTA_REPLICA_GROUP_LIST)
_NO_FILE: Final = "-"  # jaxlib's source file where there is none: the line is one of the StableHLO text


def canonical(data: bytes | memoryview, *, output_names: Sequence[str] = (), keep_locations: bool = False) -> bytes:
    """The module in canonical form; HloInvalid if it is none.

    `output_names` are the root's, in its order; without them it keeps those that it has. An input that an output of the
    same name replaces gets a suffix, as nkipy does it. `keep_locations` keeps operator names and source locations,
    which make the bytes depend on where the model's source is.
    """
    module = Message.parse(data)
    computations = module.messages(ModuleField.COMPUTATIONS)
    instructions = [(part, part.messages(ComputationField.INSTRUCTIONS)) for part in computations]
    _renumber(module, instructions)
    layouts = _Layouts()
    layouts.reset_program(module.message(ModuleField.HOST_PROGRAM_SHAPE))
    for computation, members in instructions:
        layouts.reset_program(computation.message(ComputationField.PROGRAM_SHAPE))
        for instruction in members:
            layouts.reset(instruction, InstructionField.SHAPE)
            _normalise(instruction, keep_locations)
    _demand_aliases(module)
    if output_names:
        _name_outputs(module, instructions, output_names)
    kept = _KEPT | {ModuleField.STACK_FRAME_INDEX} if keep_locations else _KEPT
    module.fields = [
        (number, value)
        for number, value in module.fields
        if number in kept and not (number == ModuleField.FRONTEND_ATTRIBUTES and value == b"")
    ]
    return module.encode()


def _renumber(module: Message, computations: Iterable[tuple[Message, list[Message]]]) -> None:
    """Ids 1...N of instructions over the whole module and 1...C of computations, in the order of the module.

    An operand must have been numbered before its user, and a computation before its caller.
    """
    callees: dict[int, int] = {}
    count = 0
    for number, (computation, instructions) in enumerate(computations, 1):
        ids: dict[int, int] = {}
        for instruction in instructions:
            count += 1
            old = instruction.number(InstructionField.ID)
            present = {field for field, _ in instruction.fields}
            for field, targets in ((_OPERANDS, ids), (_PREDECESSORS, ids), (_CALLED, callees)):
                if field in present:
                    _map_ids(instruction, field, targets)
            if old in ids:
                raise HloInvalid(instruction.path, f"the id {old} of {_name(instruction)} occurs twice")
            ids[old] = count
            instruction.set(InstructionField.ID, count)
        root = computation.number(ComputationField.ROOT_ID)
        if root not in ids:
            raise HloInvalid(computation.path, f"no instruction has the id {root} of the root")
        computation.set(ComputationField.ROOT_ID, ids[root])
        called = computation.number(ComputationField.ID)
        if called in callees:
            raise HloInvalid(computation.path, f"the id {called} of a computation occurs twice")
        callees[called] = number
        computation.set(ComputationField.ID, number)
    entry = module.number(ModuleField.ENTRY_COMPUTATION_ID)
    if entry not in callees:
        raise HloInvalid((ModuleField.ENTRY_COMPUTATION_ID,), f"no computation has the id {entry}")
    module.set(ModuleField.ENTRY_COMPUTATION_ID, callees[entry])


def _map_ids(instruction: Message, number: int, ids: dict[int, int]) -> None:
    found = instruction.numbers(number)
    try:
        instruction.set_numbers(number, [ids[each] for each in found])
    except KeyError as error:
        reason = f"{_name(instruction)} refers to the id {error.args[0]}, which nothing before it has"
        raise HloInvalid((*instruction.path, number), reason) from None


def _normalise(instruction: Message, keep_locations: bool) -> None:
    present = {number for number, _ in instruction.fields}
    empty = [number for number in _DROPPED_IF_EMPTY if number in present and not instruction.data(number)]
    instruction.remove(*_DROPPED, *empty)
    if unknown := present - KNOWN_FIELDS - set(empty):
        reason = f"{_name(instruction)} has a field that the compiler does not know; write the operator without it"
        raise HloInvalid((*instruction.path, min(unknown)), reason)
    if not present.isdisjoint(_GROUPS):
        _list_groups(instruction)
    if InstructionField.FRONTEND_ATTRIBUTES in present:
        _set_attributes(instruction, attributes(instruction))
    if InstructionField.METADATA in present:
        _clean_metadata(instruction, keep_locations)


class _Layouts:
    """Row-major layouts. An instruction's layout changes no value: jaxlib gives a transposition the one that makes it
    free, and this is for the compiler to choose. That of a literal says in which order its values are, and stays."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def reset(self, owner: Message, number: int) -> None:
        """Reset that of the shape in a field. A module has few different shapes, so each is read once."""
        data = bytes(owner.data(number))
        if data not in self._known:
            self._known[data] = _row_major(Message.parse(data)).encode()
        if self._known[data] != data:
            owner.set(number, self._known[data])

    def reset_program(self, program: Message | None) -> None:
        for number in (ProgramShapeField.PARAMETERS, ProgramShapeField.RESULT):
            for shape in program.messages(number) if program else ():
                _row_major(shape)


def _row_major(shape: Message) -> Message:
    layout = shape.message(ShapeField.LAYOUT)
    if layout is not None:
        rank = len(shape.numbers(ShapeField.DIMENSIONS))
        layout.set_numbers(LayoutField.MINOR_TO_MAJOR, reversed(range(rank)))
    for part in shape.messages(ShapeField.TUPLE_SHAPES):
        _row_major(part)
    return shape


def _list_groups(instruction: Message) -> None:
    """Move the groups of fields 87 and 92 to field 49, which every release of the compiler reads."""
    listing = instruction.message(InstructionField.COLLECTIVE_DEVICE_LIST) or Message()
    if any(number not in _GROUP_FORMS for number, _ in listing.fields):
        raise HloInvalid(listing.path, f"the groups of {_name(instruction)} have an unknown form; list their ranks")
    forms = [
        replica_groups(instruction),
        replica_groups(listing, DeviceListField.REPLICA_GROUPS),
        _iota_groups(listing.message(DeviceListField.IOTA_REPLICA_GROUP_LIST)),
        _iota_groups(instruction.message(InstructionField.IOTA_REPLICA_GROUPS)),
    ]
    found = [groups for groups in forms if groups]
    if any(groups != found[0] for groups in found):
        raise HloInvalid(instruction.path, f"{_name(instruction)} has different lists of groups")
    instruction.remove(*_GROUPS)
    for ranks in found[0] if found else ():
        group = Message()
        group.set_numbers(ELEMENTS, ranks)
        instruction.add(InstructionField.REPLICA_GROUPS, group)


def _iota_groups(iota: Message | None) -> list[list[int]]:
    """The ranks 0, 1, ... in an array, its axes permuted, cut into groups."""
    if iota is None:
        return []
    shape = iota.numbers(IotaGroupsField.IOTA_RESHAPE_DIMS)
    order = iota.numbers(IotaGroupsField.IOTA_TRANSPOSE_PERM) or list(range(len(shape)))
    groups, size = (iota.number(IotaGroupsField.NUM_REPLICA_GROUPS), iota.number(IotaGroupsField.NUM_DEVICES_PER_GROUP))
    if len(shape) > MAX_RANK or min([groups, size, *shape]) < 1 or prod(shape) > MAX_WORLD:
        raise HloInvalid(iota.path, f"a list of groups has from 1 to {MAX_WORLD:,} ranks")
    if sorted(order) != list(range(len(shape))) or groups * size != prod(shape):
        raise HloInvalid(iota.path, f"{groups} groups of {size} ranks are not those of an array {shape}")
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    ranks = [0]
    for axis in order:
        ranks = [rank + index * strides[axis] for rank in ranks for index in range(shape[axis])]
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def _clean_metadata(instruction: Message, keep_locations: bool) -> None:
    metadata = instruction.message(InstructionField.METADATA) if keep_locations else None
    if metadata is None or not metadata.fields or metadata.text(MetadataField.SOURCE_FILE) == _NO_FILE:
        instruction.remove(InstructionField.METADATA)


def _set_attributes(instruction: Message, values: dict[str, str]) -> None:
    """Set the frontend attributes; protobuf leaves the order of a map open, so they are sorted by their keys."""
    listing = Message()
    for key, value in sorted(values.items()):
        entry = Message()
        entry.add(KEY, key)
        entry.add(VALUE, value)
        listing.add(ELEMENTS, entry)
    instruction.remove(InstructionField.FRONTEND_ATTRIBUTES)
    if values:
        instruction.add(InstructionField.FRONTEND_ATTRIBUTES, listing)


def _demand_aliases(module: Message) -> None:
    listing = module.message(ModuleField.INPUT_OUTPUT_ALIAS)
    entries = listing.messages(ELEMENTS) if listing else []
    for entry in entries:
        entry.set(AliasField.KIND, MUST_ALIAS)
    if not entries:
        module.remove(ModuleField.INPUT_OUTPUT_ALIAS)


def _name_outputs(module: Message, computations: Iterable[tuple[Message, list[Message]]], names: Sequence[str]) -> None:
    entry_id = module.number(ModuleField.ENTRY_COMPUTATION_ID)
    entry, instructions = next(each for each in computations if each[0].number(ComputationField.ID) == entry_id)
    root_id = entry.number(ComputationField.ROOT_ID)
    root = next(each for each in instructions if each.number(InstructionField.ID) == root_id)
    is_tuple = root.text(InstructionField.OPCODE) == "tuple"
    count = len(root.numbers(InstructionField.OPERAND_IDS)) if is_tuple else 1
    if count != len(names):
        raise HloInvalid(root.path, f"the root has {count} outputs, and {len(names)} names are given")
    if any("," in name for name in names):
        raise HloInvalid(root.path, "the name of an output has a comma, which separates the names")
    _set_attributes(root, attributes(root) | {OUTPUT_NAMES: ",".join(names)})
    _name_aliased_inputs(module, instructions, names)


def _name_aliased_inputs(module: Message, instructions: Iterable[Message], names: Sequence[str]) -> None:
    """Give an input that has the name of the output in its place the suffix: a NEFF has one table of names for both."""
    listing = module.message(ModuleField.INPUT_OUTPUT_ALIAS)
    aliased = {
        (entry.number(AliasField.PARAMETER_NUMBER), names[index])
        for entry in (listing.messages(ELEMENTS) if listing else ())
        for index in entry.numbers(AliasField.OUTPUT_SHAPE_INDEX)[:1] or [0]
        if 0 <= index < len(names)
    }
    for each in instructions:
        if each.text(InstructionField.OPCODE) == "parameter":
            known = attributes(each)
            name = known.get(INPUT_NAMES, "")
            if (each.number(InstructionField.PARAMETER_NUMBER), name) in aliased:
                _set_attributes(each, known | {INPUT_NAMES: name + ALIAS_SUFFIX})


def _name(instruction: Message) -> str:
    return instruction.text(InstructionField.NAME)
