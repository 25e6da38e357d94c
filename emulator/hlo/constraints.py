"""Constraints of neuronx-cc on an HLO module, as far as they are documented: one table of rules, one function a rule.

`violations` reads a canonical module and returns every breach of a rule, with the instruction, the source of the rule
(an NCC code where the compiler has one) and a remedy. A module without one may still fail: AWS publishes no complete
list. docs/reference/hlo-proto.md has the table of rules.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from nxpipe.emulator.errors import HloInvalid
from nxpipe.emulator.hlo.schema import (
    ELEMENTS,
    INPUT_NAMES,
    MUST_ALIAS,
    OUTPUT_NAMES,
    START_INDEX_MAP,
    HloComputation,
    HloInstruction,
    HloModule,
    HloShape,
    InstructionField,
    ModuleField,
    ProgramShapeField,
    WindowField,
    replica_groups,
)
from nxpipe.emulator.hlo.wire import Message

TARGETS: Final = ("inf2", "trn1", "trn1n", "trn2", "trn3")
INT_MAX: Final = (1 << 31) - 1
NAME_BYTES: Final = 255  # a name is a C string in 256 bytes
REPLICA_GROUPS: Final = 16  # of a NEFF, in runtime 2.34
TOP_K: Final = 16384
TOP_K_ROW: Final = 8  # the row's length is a multiple


@dataclass(frozen=True)
class HloLimits:
    """Sizes that no module may exceed."""

    nbytes: int = (1 << 31) - 1  # protobuf's, for a whole module: SDK issue #987
    instructions: int = 300_000  # of the machine, in NCC_EXTP003; an HLO instruction takes at least one


_LIMITS: Final = HloLimits()


@dataclass(frozen=True)
class HloViolation:
    """A breach of one rule by `subject`, an instruction or the module."""

    rule: str
    subject: str
    detail: str
    source: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.detail} ({self.source}); {self.remedy}"


Breaches = Iterator[tuple[str, str]]  # subject and detail


@dataclass(frozen=True)
class HloRule:
    id: str
    source: str
    remedy: str
    check: "Check" = field(repr=False)


class CheckedModule:
    """A module with the indexes that the rules share."""

    def __init__(self, module: HloModule, target: str, limits: HloLimits) -> None:
        self.module, self.target, self.limits = module, target, limits
        self.computations = {each.id: each for each in module.computations}
        self._by_opcode: dict[str, list[tuple[HloComputation, HloInstruction]]] = defaultdict(list)
        for computation in module.computations:
            for instruction in computation.instructions:
                self._by_opcode[instruction.opcode].append((computation, instruction))

    @property
    def opcodes(self) -> Iterable[str]:
        return self._by_opcode

    def each(self, *opcodes: str) -> Iterator[tuple[HloComputation, HloInstruction]]:
        """The instructions of some opcodes; of all without an argument."""
        for opcode in opcodes or self._by_opcode:
            yield from self._by_opcode.get(opcode, ())

    def called(self, instruction: HloInstruction) -> list[HloComputation]:
        ids = instruction.proto.numbers(InstructionField.CALLED_COMPUTATION_IDS)
        return [self.computations[number] for number in ids if number in self.computations]

    def combiner(self, instruction: HloInstruction) -> str | None:
        """The opcode of the called computation's root: `add`, or `parameter` where it assigns. None if it is missing,
        which is a breach of another rule."""
        called = self.called(instruction)
        return called[0].root.opcode if called and called[0].root else None

    def parameters(self) -> list[HloInstruction]:
        entry = self.module.entry
        return [each for each in entry.instructions if each.opcode == "parameter"] if entry else []

    def outputs(self) -> list[tuple[HloInstruction | None, HloShape]]:
        """The outputs in their order, each with the instruction that computes it if the root is a list of those."""
        entry = self.module.entry
        root = entry.root if entry else None
        if entry is None or root is None:
            return []
        if root.opcode == "tuple":
            return [(each, each.shape) for each in entry.operands(root)]
        if root.shape.element_type == "tuple":
            return [(None, shape) for shape in root.shape.parts]
        return [(root, root.shape)]


Check = Callable[[CheckedModule], Breaches]


def violations(
    module: bytes | memoryview | HloModule,
    target: str,
    limits: HloLimits = _LIMITS,
) -> list[HloViolation]:
    """Every breach by a module for a target, in the order of the rules; HloInvalid if the bytes are no module."""
    if target not in TARGETS:
        raise HloInvalid((), f"neuronx-cc has no target {target!r}; its targets are {', '.join(TARGETS)}")
    read = module if isinstance(module, HloModule) else HloModule.read(module)
    checked = CheckedModule(read, target, limits)
    return [
        HloViolation(rule.id, subject, detail, rule.source, rule.remedy)
        for rule in RULES
        for subject, detail in rule.check(checked)
    ]


# Ids and references ---------------------------------------------------------------------------------------------------


def _id_range(checked: CheckedModule) -> Breaches:
    for _, each in checked.each():
        if not 0 <= each.id <= INT_MAX:
            yield each.name, f"its id {each.id} is not within 0 and {INT_MAX}"


def _id_density(checked: CheckedModule) -> Breaches:
    """Ids from 1, as ours, or from 0, as NKIPY's."""
    ids = [each.id for _, each in checked.each()]
    count = len(ids)
    in_range = all(0 <= each <= INT_MAX for each in ids)  # otherwise it is a breach of id-range
    if in_range and set(ids) not in (set(range(count)), set(range(1, count + 1))):
        yield "the module", f"the ids of its {count} instructions do not follow one another from 0 or 1"


def _computation_ids(checked: CheckedModule) -> Breaches:
    ids = sorted(each.id for each in checked.module.computations)
    if ids not in (list(range(len(ids))), list(range(1, len(ids) + 1))):
        yield "the module", f"the ids of its {len(ids)} computations do not follow one another from 0 or 1"


def _operand_order(checked: CheckedModule) -> Breaches:
    for computation in checked.module.computations:
        seen: set[int] = set()
        for each in computation.instructions:
            predecessors = each.proto.numbers(InstructionField.CONTROL_PREDECESSOR_IDS)
            if missing := [number for number in (*each.operand_ids, *predecessors) if number not in seen]:
                yield each.name, f"no instruction before it in {computation.name} has the id {missing[0]}"
            seen.add(each.id)


def _callee_order(checked: CheckedModule) -> Breaches:
    seen: set[int] = set()
    for computation in checked.module.computations:
        for each in computation.instructions:
            for called in each.proto.numbers(InstructionField.CALLED_COMPUTATION_IDS):
                if called not in seen:
                    yield each.name, f"no computation before its own has the id {called} that it calls"
        seen.add(computation.id)


def _root(checked: CheckedModule) -> Breaches:
    for computation in checked.module.computations:
        if computation.root is None:
            yield computation.name, f"it has no instruction with the id {computation.root_id} of its root"


def _entry(checked: CheckedModule) -> Breaches:
    if checked.module.entry is None:
        yield "the module", f"it has no computation with the id {checked.module.entry_id} of its entry"


def _parameter_numbers(checked: CheckedModule) -> Breaches:
    found = sorted(each.proto.number(InstructionField.PARAMETER_NUMBER) for each in checked.parameters())
    if found != list(range(len(found))):
        yield "the module", f"its {len(found)} parameters do not have the numbers 0 to {len(found) - 1}"


def _program_shape(checked: CheckedModule) -> Breaches:
    program = checked.module.proto.message(ModuleField.HOST_PROGRAM_SHAPE)
    declared = len(program.messages(ProgramShapeField.PARAMETERS)) if program else 0
    found = len(checked.parameters())
    if checked.module.entry and declared != found:
        yield "the module", f"its program shape declares {declared} parameters, and its entry has {found}"


# Operators ------------------------------------------------------------------------------------------------------------

OPCODES: Final = frozenset(
    re.findall(
        r"\S+",
        """
        abs add all-gather all-reduce all-to-all and atan2 batch-norm-grad batch-norm-inference
        batch-norm-training bitcast-convert broadcast ceil clamp collective-permute compare concatenate constant
        convert convolution copy cosine custom-call divide dot dynamic-slice dynamic-update-slice exponential
        floor gather get-tuple-element iota log maximum minimum multiply negate not or pad parameter power
        reduce reduce-scatter reduce-window remainder reshape reverse rng rng-bit-generator rsqrt scatter select
        select-and-scatter shift-right-arithmetic shift-right-logical sign sine slice sort sqrt subtract tanh
        transpose tuple xor
        """,
    )
)
_CONTROL_FLOW: Final = ("call", "conditional", "while")
_RANKS: Final = ("partition-id", "replica-id")
_DYNAMIC: Final = ("dynamic-reshape", "get-dimension-size", "set-dimension-size")
_ELSEWHERE: Final = frozenset([*_CONTROL_FLOW, *_RANKS, *_DYNAMIC, "topk"])  # opcodes that a rule of their own refuses

CUSTOM_CALLS: Final = frozenset(
    re.findall(
        r"\S+",
        """
        AwsNeuronArgMax AwsNeuronArgMin AwsNeuronCollectiveMatmul AwsNeuronCustomNativeKernel
        AwsNeuronCustomOp AwsNeuronDevicePrint AwsNeuronDropoutMaskV1 AwsNeuronErf AwsNeuronGelu
        AwsNeuronGeluApprxTanh AwsNeuronGeluBackward AwsNeuronIntMatmult AwsNeuronLNCShardingConstraint
        AwsNeuronModuleMarkerEnd-Backward AwsNeuronModuleMarkerEnd-Forward
        AwsNeuronModuleMarkerStart-Backward AwsNeuronModuleMarkerStart-Forward AwsNeuronRmsNorm
        AwsNeuronSilu AwsNeuronSiluBackward AwsNeuronSoftmax AwsNeuronSoftmaxBackward AwsNeuronTopK
        AwsNeuronTransferWithStaticRing NeuronBoundaryMarker-End NeuronBoundaryMarker-Start ResizeBilinear
        ResizeNearest ResizeNearestGrad
        """,
    )
)


def _opcode(checked: CheckedModule) -> Breaches:
    unknown = [opcode for opcode in checked.opcodes if opcode not in OPCODES | _ELSEWHERE]
    for _, each in checked.each(*unknown) if unknown else ():
        yield each.name, f"{each.opcode} is in no list of operators that the compiler supports"


def _control_flow(checked: CheckedModule) -> Breaches:
    for _, each in checked.each(*_CONTROL_FLOW):
        yield each.name, f"{each.opcode} is control flow, which the compiler does not have"


def _rank_opcode(checked: CheckedModule) -> Breaches:
    for _, each in checked.each(*_RANKS):
        yield each.name, f"{each.opcode} is not supported"


def _dynamic_shape(checked: CheckedModule) -> Breaches:
    for _, each in checked.each():
        if each.opcode in _DYNAMIC or any(shape.is_dynamic for shape in each.shape.arrays()):
            yield each.name, "its shape depends on values"


def _topk_opcode(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("topk"):
        yield each.name, "topk is in no list of operators that the compiler supports"


def _sort_target(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("sort") if checked.target in ("trn2", "trn3") else ():
        yield each.name, f"{checked.target} has no sort"


def _sort_comparator(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("sort"):
        for called in checked.called(each):
            root = called.root
            direction = root.proto.text(InstructionField.COMPARISON_DIRECTION) if root else ""
            if direction not in ("LE", "GE", "LT", "GT"):
                yield each.name, "its comparator is none of <, <=, > and >="


def _custom_call(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("custom-call"):
        target = each.proto.text(InstructionField.CUSTOM_CALL_TARGET)
        if target not in CUSTOM_CALLS:
            yield each.name, f"the compiler has no custom call {target!r}"


def _topk_calls(checked: CheckedModule) -> Iterator[tuple[HloInstruction, HloInstruction]]:
    """Calls of AwsNeuronTopK with their operand."""
    for computation, each in checked.each("custom-call"):
        operands = computation.operands(each)
        if operands and each.proto.text(InstructionField.CUSTOM_CALL_TARGET) == "AwsNeuronTopK":
            yield each, operands[0]


def _topk_limit(checked: CheckedModule) -> Breaches:
    for each, operand in _topk_calls(checked):
        text = bytes(each.proto.data(InstructionField.BACKEND_CONFIG)).decode("ascii", "replace")
        row = operand.shape.dimensions[-1] if operand.shape.dimensions else 0
        if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= min(TOP_K, row)):
            yield each.name, f"its k, {text!r}, is no number from 1 to {min(TOP_K, row)}"


def _topk_type(checked: CheckedModule) -> Breaches:
    for each, operand in _topk_calls(checked):
        if operand.shape.element_type not in _FLOATS:
            yield each.name, f"its operand is {operand.shape}, and top-k needs floats"


def _topk_row(checked: CheckedModule) -> Breaches:
    for each, operand in _topk_calls(checked):
        if operand.shape.dimensions and operand.shape.dimensions[-1] % TOP_K_ROW:
            yield each.name, f"its operand is {operand.shape}, whose rows are no multiple of {TOP_K_ROW} long"


def _rng_algorithm(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("rng-bit-generator"):
        if each.proto.number(InstructionField.RNG_ALGORITHM):
            yield each.name, "its algorithm is not the default one"


def _rng_distribution(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("rng"):
        if each.proto.number(InstructionField.DISTRIBUTION) != 1:
            yield each.name, "its distribution is not uniform"


def _reduce_operands(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("reduce"):
        if len(each.operand_ids) != 2:
            yield each.name, f"it reduces {len(each.operand_ids) // 2} operands at once"


def _reduce_init(checked: CheckedModule) -> Breaches:
    for computation, each in checked.each("reduce"):
        operands = computation.operands(each)
        if any(init.opcode != "constant" for init in operands[len(operands) // 2 :]):
            yield each.name, "its initial value is computed"


def _reduce_combiner(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("reduce"):
        combiner = checked.combiner(each)
        if combiner and combiner not in ("add", "maximum", "minimum", "multiply", "tuple"):  # a tuple: several operands
            yield each.name, f"it combines by {combiner}"


def _integer_dot(checked: CheckedModule) -> Breaches:
    for computation, each in checked.each("dot", "convolution"):
        if any(operand.shape.element_type in _INTEGERS for operand in computation.operands(each)):
            yield each.name, "it multiplies integers, in fp32: exact to 2^24 only"


def _integer_scatter(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("scatter"):
        combiner = checked.combiner(each)
        if each.shape.element_type in _INTEGERS and combiner not in (None, "parameter"):
            yield each.name, f"it combines {each.shape.element_type} by {combiner}"


def _shift_type(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("shift-right-arithmetic"):
        if each.shape.element_type not in ("s32", "u32"):
            yield each.name, f"it shifts {each.shape.element_type}"


def _index_type(checked: CheckedModule) -> Breaches:
    for computation, each in checked.each("dynamic-slice", "dynamic-update-slice"):
        first = 1 if each.opcode == "dynamic-slice" else 2
        for index in computation.operands(each)[first:]:
            if index.shape.element_type not in ("s32", "u32") or index.shape.dimensions:
                yield each.name, f"its index {index.name} is {index.shape}, and has to be a scalar of s32 or u32"


def _index_range(checked: CheckedModule) -> Breaches:
    """Indices that are an iota longer than the dimension: position embeddings shorter than the sequence."""
    for computation, each in checked.each("gather"):
        numbers = each.proto.message(InstructionField.GATHER_DIMENSION_NUMBERS)
        axes = numbers.numbers(START_INDEX_MAP) if numbers else []
        operands = computation.operands(each)
        if len(axes) != 1 or len(operands) != 2 or not 0 <= axes[0] < len(operands[0].shape.dimensions):
            continue
        size, length = operands[0].shape.dimensions[axes[0]], _iota_length(computation, operands[1])
        if length > size:
            yield each.name, f"its indices reach {length - 1}, and the dimension has {size} elements"


_VIEWS: Final = 8  # between an iota and its use; the limit ends a cycle, which is a breach of operand-order


def _iota_length(computation: HloComputation, instruction: HloInstruction) -> int:
    for _ in range(_VIEWS):
        operands = computation.operands(instruction)
        if instruction.opcode not in ("bitcast-convert", "broadcast", "convert", "copy", "reshape") or not operands:
            break
        instruction = operands[0]
    axes = instruction.proto.numbers(InstructionField.DIMENSIONS) if instruction.opcode == "iota" else []
    dimensions = instruction.shape.dimensions
    return dimensions[axes[0]] if axes and 0 <= axes[0] < len(dimensions) else 0


def _windows(instruction: HloInstruction) -> list[Message]:
    window = instruction.proto.message(InstructionField.WINDOW)
    return window.messages(ELEMENTS) if window else []


def _exceeds_one(instruction: HloInstruction, number: int) -> bool:
    return any(each.number(number, 1) > 1 for each in _windows(instruction))


def _convolution_dilation(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("convolution"):
        if _exceeds_one(each, WindowField.BASE_DILATION) and _exceeds_one(each, WindowField.WINDOW_DILATION):
            yield each.name, "it dilates its input and its kernel"


def _convolution_stride(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("convolution"):
        if _exceeds_one(each, WindowField.BASE_DILATION) and _exceeds_one(each, WindowField.STRIDE):
            yield each.name, "it has a stride and dilates its input"


def _pool_base_dilation(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("reduce-window"):
        if _exceeds_one(each, WindowField.BASE_DILATION):
            yield each.name, "it dilates its input"


def _pool_window_dilation(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("reduce-window"):
        if _exceeds_one(each, WindowField.WINDOW_DILATION):
            yield each.name, "it dilates its window"


def _pool_operands(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("reduce-window"):
        if len(each.operand_ids) != 2:
            yield each.name, f"it has {len(each.operand_ids)} operands, and has to have 2"


_ELEMENTWISE: Final = (
    *("add", "subtract", "multiply", "divide", "maximum", "minimum", "and", "or", "xor", "compare", "power", "atan2"),
    *("remainder", "shift-right-logical", "shift-right-arithmetic", "abs", "exponential", "log", "sqrt", "rsqrt"),
    *("sine", "cosine", "tanh", "negate", "ceil", "floor", "sign", "not", "convert", "copy"),
)


def _elementwise_shape(checked: CheckedModule) -> Breaches:
    for computation, each in checked.each(*_ELEMENTWISE):
        for operand in computation.operands(each):
            if operand.shape.dimensions != each.shape.dimensions:
                yield each.name, f"its operand {operand.name} is {operand.shape}, and it is {each.shape}"


# Collectives ----------------------------------------------------------------------------------------------------------

_GROUPED: Final = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")
_COLLECTIVES: Final = (*_GROUPED, "collective-permute")


def _group_form(checked: CheckedModule) -> Breaches:
    for _, each in checked.each():
        for number in (InstructionField.COLLECTIVE_DEVICE_LIST, InstructionField.IOTA_REPLICA_GROUPS):
            if each.proto.has(number):
                yield each.name, f"its groups are in field {number}, and not in field 49 (replica_groups)"


def _group_size(checked: CheckedModule) -> Breaches:
    for _, each in checked.each(*_GROUPED):
        sizes = sorted({len(group) for group in replica_groups(each.proto)})
        if len(sizes) > 1 or sizes[:1] == [0]:
            yield each.name, f"its groups have {' and '.join(map(str, sizes))} ranks"


def _group_members(checked: CheckedModule) -> Breaches:
    for _, each in checked.each(*_GROUPED):
        ranks = Counter(rank for group in replica_groups(each.proto) for rank in group)
        if sorted(ranks.elements()) != list(range(ranks.total())):
            yield each.name, "its groups do not have each rank of the world once"


def _group_count(checked: CheckedModule) -> Breaches:
    groups = {tuple(group) for _, each in checked.each(*_GROUPED) for group in replica_groups(each.proto)}
    if len(groups) > REPLICA_GROUPS:
        yield "the module", f"it has {len(groups)} different replica groups, and a NEFF {REPLICA_GROUPS} at most"


def _channel_id(checked: CheckedModule) -> Breaches:
    for _, each in checked.each():
        if max(each.proto.number(InstructionField.CHANNEL_ID), each.proto.number(InstructionField.ALL_REDUCE_ID)) > 0:
            yield each.name, "it has a channel id"


def _global_device_ids(checked: CheckedModule) -> Breaches:
    for _, each in checked.each():
        if each.proto.number(InstructionField.USE_GLOBAL_DEVICE_IDS):
            yield each.name, "it numbers devices over replicas and partitions"


def _collective_combiner(checked: CheckedModule) -> Breaches:
    allowed = {"all-reduce": ("add", "maximum", "minimum"), "reduce-scatter": ("add",)}
    for _, each in checked.each(*allowed):
        combiner = checked.combiner(each)
        if combiner and combiner not in allowed[each.opcode]:
            yield each.name, f"it combines by {combiner}"


def _collective_type(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("all-reduce", "reduce-scatter"):
        if any(shape.element_type in _INTEGERS for shape in each.shape.arrays()):
            yield each.name, "it adds integers, in fp32: exact to 2^24 only"


def _all_to_all_dimension(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("all-to-all"):
        if each.proto.numbers(InstructionField.DIMENSIONS) not in ([], [0]):
            yield each.name, "it splits a dimension that is not the outermost"


def _permute_pairs(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("collective-permute"):
        pairs = [(pair.number(1), pair.number(2)) for pair in each.proto.messages(InstructionField.SOURCE_TARGET_PAIRS)]
        if any(len(set(side)) < len(pairs) for side in zip(*pairs, strict=True)):
            yield each.name, "two of its pairs have the same source or the same target"


def _sharding(checked: CheckedModule) -> Breaches:
    proto = checked.module.proto
    if proto.has(ModuleField.SPMD_OUTPUT_SHARDING) or proto.has(ModuleField.SPMD_PARAMETERS_SHARDINGS):
        yield "the module", "it is to be partitioned"
    for _, each in checked.each():
        if each.proto.has(InstructionField.SHARDING):
            yield each.name, "it has a sharding"


# Types, layouts and sizes ---------------------------------------------------------------------------------------------

_FLOATS: Final = frozenset(["f16", "bf16", "f32", "f8e5m2", "f8e4m3", "f8e3m4", "f8e4m3fn"])
_INTEGERS: Final = frozenset(["pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"])
_FNUZ: Final = frozenset(["f8e4m3fnuz", "f8e4m3b11fnuz", "f8e5m2fnuz"])
_WIDE: Final = frozenset(["s64", "u64"])
_COMPLEX: Final = frozenset(["c64", "c128"])
_KNOWN: Final = _FLOATS | _INTEGERS | _FNUZ | _COMPLEX | {"f64"}  # each refused one has a rule of its own


def _of_type(checked: CheckedModule, refused: Callable[[str], bool], why: str) -> Breaches:
    """Instructions with such an element; a tuple's are those of its operands."""
    for _, each in checked.each():
        found = [part for part in each.shape.arrays() if refused(part.element_type)]
        if found and each.opcode not in ("tuple", "get-tuple-element"):
            yield each.name, f"it is {found[0]}, and {why}"


def _f64(checked: CheckedModule) -> Breaches:
    return _of_type(checked, lambda name: name == "f64", "64-bit floats are not supported")


def _int64(checked: CheckedModule) -> Breaches:
    return _of_type(checked, _WIDE.__contains__, "the compiler makes 32 bits of 64")


def _complex(checked: CheckedModule) -> Breaches:
    return _of_type(checked, _COMPLEX.__contains__, "complex types are not supported")


def _fp8_fnuz(checked: CheckedModule) -> Breaches:
    return _of_type(checked, _FNUZ.__contains__, "this FP8 type is not supported")


def _fp8_e4m3fn(checked: CheckedModule) -> Breaches:
    if checked.target == "trn3":
        return iter(())
    return _of_type(checked, lambda name: name == "f8e4m3fn", f"{checked.target} has E4M3 with a maximum of 240")


def _element_type(checked: CheckedModule) -> Breaches:
    return _of_type(checked, lambda name: name not in _KNOWN, "this type is not supported")


def _layout(checked: CheckedModule) -> Breaches:
    for _, each in checked.each():
        literal = each.proto.message(InstructionField.LITERAL)
        values = checked.module.shape(literal.message(1)) if literal else each.shape
        if any(not _is_default(shape) for shape in (*each.shape.arrays(), *values.arrays())):
            yield each.name, "its layout is not the default one, row-major and without tiles"


def _program_layout(checked: CheckedModule) -> Breaches:
    """The layouts in which a caller passes inputs and reads outputs."""
    program = checked.module.proto.message(ModuleField.HOST_PROGRAM_SHAPE)
    for what, number in (("input", ProgramShapeField.PARAMETERS), ("output", ProgramShapeField.RESULT)):
        shapes = map(checked.module.shape, program.messages(number)) if program else ()
        for index, shape in enumerate(part for each in shapes for part in each.arrays()):
            if not _is_default(shape):
                yield "the module", f"its {what} {index} ({shape}) is not row-major"


def _is_default(shape: HloShape) -> bool:
    order = tuple(range(len(shape.dimensions)))[::-1]
    return not shape.is_tiled and (shape.minor_to_major is None or shape.minor_to_major == order)


# The field of a literal's values by element type: little-endian bytes, or varints where the size in bits is negative.
_LITERALS: Final[Mapping[str, tuple[int, int]]] = {
    "pred": (2, -8),
    "s8": (15, 8),
    "u8": (3, 8),
    "s16": (17, 16),
    "u16": (16, 16),
    "s32": (4, -32),
    "u32": (6, -32),
    "s64": (5, -64),
    "u64": (7, -64),
    "f32": (8, 32),
    "f64": (9, 64),
    "f16": (11, 16),
    "bf16": (13, 16),
    "f8e5m2": (19, 8),
    "f8e4m3fn": (20, 8),
    "f8e4m3": (28, 8),
    "f8e3m4": (29, 8),
}
_CONTINUED: Final = bytes(range(128, 256))  # the bytes of a varint but for its last


def _literal_size(checked: CheckedModule) -> Breaches:
    for _, each in checked.each("constant"):
        literal = each.proto.message(InstructionField.LITERAL)
        if literal is None:
            yield each.name, "it has no literal"
        elif checked.module.shape(literal.message(1)).dimensions != each.shape.dimensions:
            yield each.name, "its literal has another shape"
        elif each.shape.element_type in _LITERALS and _values(literal, each.shape) != each.shape.elements:
            yield (
                each.name,
                f"its literal has {_values(literal, each.shape)} values, and {each.shape} has another number",
            )


def _values(literal: Message, shape: HloShape) -> int:
    number, bits = _LITERALS[shape.element_type]
    data = literal.data(number)
    if bits > 0:
        return len(data) * 8 // bits
    return len(bytes(data).translate(None, _CONTINUED))  # a varint ends with its only byte below 128


def _module_size(checked: CheckedModule) -> Breaches:
    if checked.module.nbytes > checked.limits.nbytes:
        yield "the module", f"it has {checked.module.nbytes:,} bytes, and the limit is {checked.limits.nbytes:,}"


def _instruction_count(checked: CheckedModule) -> Breaches:
    count = sum(len(each.instructions) for each in checked.module.computations)
    if count > checked.limits.instructions:
        yield "the module", f"it has {count:,} instructions, and the limit is {checked.limits.instructions:,}"


# Inputs, outputs and aliases ------------------------------------------------------------------------------------------


def _input_names(checked: CheckedModule) -> list[tuple[str, str]]:
    named = [(each.name, each.attribute(INPUT_NAMES)) for each in checked.parameters()]
    return [(instruction, name) for instruction, name in named if name is not None]


def _output_names(checked: CheckedModule) -> tuple[str, list[str]]:
    entry = checked.module.entry
    root = entry.root if entry else None
    text = root.attribute(OUTPUT_NAMES) if root else None
    return (root.name if root else "the module"), text.split(",") if text is not None else []


def _name_length(checked: CheckedModule) -> Breaches:
    root, outputs = _output_names(checked)
    for subject, name in (*_input_names(checked), *((root, name) for name in outputs)):
        if not 1 <= len(name.encode()) <= NAME_BYTES:
            yield subject, f"the name {name[:40]!r} has {len(name.encode())} bytes"


def _name_separator(checked: CheckedModule) -> Breaches:
    for subject, name in _input_names(checked):
        if "," in name:
            yield subject, f"the name {name!r} has a comma, which separates names"


def _name_uniqueness(checked: CheckedModule) -> Breaches:
    """Inputs and outputs are in one table of the NEFF: nkipy gives an aliased input a suffix for that reason."""
    _, outputs = _output_names(checked)
    for name, count in Counter([*(name for _, name in _input_names(checked)), *outputs]).items():
        if count > 1:
            yield "the module", f"{count} tensors have the name {name!r}"


def _input_naming(checked: CheckedModule) -> Breaches:
    named = _input_names(checked)
    if 0 < len(named) < len(checked.parameters()):
        yield "the module", f"{len(named)} of its {len(checked.parameters())} inputs have a name"


def _output_naming(checked: CheckedModule) -> Breaches:
    root, names = _output_names(checked)
    if names and len(names) != len(checked.outputs()):
        yield root, f"it names {len(names)} outputs, and has {len(checked.outputs())}"


def _alias_kind(checked: CheckedModule) -> Breaches:
    for alias in checked.module.aliases:
        if alias.kind != MUST_ALIAS:
            yield "the module", f"its alias of parameter {alias.parameter} is of kind {alias.kind}, not demanded"


def _alias_whole(checked: CheckedModule) -> Breaches:
    for alias in checked.module.aliases:
        if alias.parameter_index or len(alias.output_index) > 1:
            yield "the module", f"its alias of parameter {alias.parameter} is a part of a buffer"


def _alias_target(checked: CheckedModule) -> Breaches:
    """An alias names a parameter and an output, and both have one type."""
    inputs = {each.proto.number(InstructionField.PARAMETER_NUMBER): each.shape for each in checked.parameters()}
    outputs = [shape for _, shape in checked.outputs()]
    for alias in checked.module.aliases:
        index = alias.output_index[0] if alias.output_index else 0
        source = inputs.get(alias.parameter)
        target = outputs[index] if 0 <= index < len(outputs) else None
        if source is None or target is None or _type(source) != _type(target):
            yield "the module", f"its alias joins parameter {alias.parameter} ({source}) and output {index} ({target})"


def _type(shape: HloShape) -> tuple[str, tuple[int, ...]]:
    return shape.element_type, shape.dimensions


def _alias_uniqueness(checked: CheckedModule) -> Breaches:
    aliases = checked.module.aliases
    for what, ids in (
        ("parameter", [(each.parameter, each.parameter_index) for each in aliases]),
        ("output", [(each.output_index, ()) for each in aliases]),
    ):
        for place, count in Counter(ids).items():
            if count > 1:
                yield "the module", f"{count} aliases name the same {what} {place[0]}"


def _raw_output(checked: CheckedModule) -> Breaches:
    aliased = {(alias.output_index or (0,), alias.parameter) for alias in checked.module.aliases}
    for index, (instruction, _) in enumerate(checked.outputs()):
        if instruction is None or instruction.opcode != "parameter":
            continue
        if ((index,), instruction.proto.number(InstructionField.PARAMETER_NUMBER)) not in aliased:
            yield instruction.name, f"it is an input, and output {index} as it is"


def _empty_output(checked: CheckedModule) -> Breaches:
    for index, (_, shape) in enumerate(checked.outputs()):
        if shape.is_array and shape.elements == 0:
            yield "the module", f"its output {index} ({shape}) has no element, and the compiler drops it"


def _empty_input(checked: CheckedModule) -> Breaches:
    for each in checked.parameters():
        if each.shape.is_array and each.shape.elements == 0:
            yield each.name, f"it is {each.shape}, and a tensor of 0 bytes cannot be allocated"


def _tuple_input(checked: CheckedModule) -> Breaches:
    for each in checked.parameters():
        if not each.shape.is_array:
            yield each.name, f"it is {each.shape}, and has to be an array"


_CANONICAL: Final = "write the module with canonical()"
_OPERATORS_PAGE: Final = "XLA operators of neuronx-cc"
_NKIPY: Final = "nkipy, execute.py"
_FUSED: Final = "compose it of supported operators"

# The id of a rule is the name of its function. Sources without an NCC code are what is known to compile.
_TABLE: Final[Sequence[tuple[Check, str, str]]] = (
    (_id_range, "pytorch/xla #9685: ids above INT_MAX are refused", _CANONICAL),
    (_id_density, "form of nkipy's modules", _CANONICAL),
    (_computation_ids, "form of nkipy's modules", _CANONICAL),
    (_operand_order, "hlo.proto: operands precede users", _CANONICAL),
    (_callee_order, "hlo.proto: callees precede callers", _CANONICAL),
    (_root, "NCC_EVRF064", _CANONICAL),
    (_entry, "NCC_EVRF064", _CANONICAL),
    (_parameter_numbers, "NCC_EVRF064", "number the parameters in their order"),
    (_program_shape, "NCC_EVRF064", "declare each parameter of the entry"),
    (_opcode, "NCC_EVRF001", _FUSED),
    (_control_flow, "NCC_EUOC002", "unroll loops, inline calls, select between values"),
    (_rank_opcode, "NCC_EUOC002", "pass the rank as an input"),
    (_dynamic_shape, "NCC_EMOD025", "use padding or buckets"),
    (_topk_opcode, "NCC_EVRF001", "use the custom call AwsNeuronTopK"),
    (_sort_target, "NCC_EVRF029", "use the custom call AwsNeuronTopK"),
    (_sort_comparator, "transformers-neuronx", "compare by <, <=, > or >="),
    (_custom_call, "NCC_EVRF015", _FUSED),
    (_topk_limit, "NCC_EVRF014", "take fewer values, or top-k of parts and then of their results"),
    (_topk_type, "NCC_EVRF013", "convert the operand to f32"),
    (_topk_row, "transformers-neuronx", "pad the rows with the least value"),
    (_rng_algorithm, "NCC_EVRF006", "use the default algorithm, or noise as an input"),
    (_rng_distribution, _OPERATORS_PAGE, "compute it from a uniform one"),
    (_reduce_operands, _OPERATORS_PAGE, "reduce each operand by itself"),
    (_reduce_init, _OPERATORS_PAGE, "use a constant as the initial value"),
    (_reduce_combiner, _OPERATORS_PAGE, "reduce by add, maximum, minimum or multiply"),
    (_integer_dot, "NCC_EVRF035", "convert the operands to f32"),
    (_integer_scatter, "NCC_EVRF016", "convert the operands to f32"),
    (_shift_type, "NCC_EVRF022", "convert the operand to s32"),
    (_index_type, "transformers-neuronx", "convert the index to s32"),
    (_index_range, "NCC_EVRF031", "use at most as many positions as the table has rows"),
    (_convolution_dilation, "NCC_EVRF010", "dilate the kernel by a pad of its own"),
    (_convolution_stride, "NCC_EVRF011", "dilate the input by a pad of its own"),
    (_pool_base_dilation, "NCC_EVRF017", "pool without dilation"),
    (_pool_window_dilation, "NCC_EVRF018", "pool without dilation"),
    (_pool_operands, "NCC_EVRF019", "pool each operand by itself"),
    (_elementwise_shape, "NCC_EVRF064", "broadcast the operand"),
    (_group_form, "form of nkipy's modules", _CANONICAL),
    (_group_size, "runtime collectives", "use groups of equal size"),
    (_group_members, "runtime collectives", "list each rank in one group"),
    (_group_count, "runtime 2.34: 16 replica groups", "use fewer different groups"),
    (_channel_id, "form of nkipy's modules", _CANONICAL),
    (_global_device_ids, "form of nkipy's modules", _CANONICAL),
    (_collective_combiner, "nkipy, collectives.py", "combine by add, or reduce all by an extremum"),
    (_collective_type, "NCC_EVRF061", "convert the operand to f32"),
    (_all_to_all_dimension, "transformers-neuronx", "transpose before and after"),
    (_permute_pairs, "NCC_EVRF064", "send from and to each rank once"),
    (_sharding, "form of nkipy's modules", "write one program for all ranks"),
    (_f64, "nkipy, hlo.py", "convert to f32"),
    (_int64, "NCC_ESFH002", "use s32 or u32"),
    (_complex, "NCC_EVRF004", "compute with the real and the imaginary part"),
    (_fp8_fnuz, "NCC_EVRF005", "use f8e4m3 or f8e5m2"),
    (_fp8_e4m3fn, "NCC_EVRF051", "use f8e4m3, or bf16"),
    (_element_type, "NCC_ESPP004", "convert to a supported type"),
    (_layout, "form of nkipy's modules", "use default layouts, and transpose where needed"),
    (_program_layout, "inputs and outputs are passed row-major", _CANONICAL),
    (_literal_size, "NCC_EVRF064", "write as many values as the shape has"),
    (_module_size, "SDK issue #987", "make parameters of large constants"),
    (_instruction_count, "NCC_EXTP004", "compile fewer layers, or a smaller bucket"),
    (_name_length, "nrt.h: names of 256 bytes", f"use names of 1 to {NAME_BYTES} bytes"),
    (_name_separator, "nkipy, trace.py", "use names without a comma"),
    (_name_uniqueness, "nrt.h: tensors are found by name", "give each tensor a name of its own"),
    (_input_naming, "nkipy, trace.py", "name all inputs or none"),
    (_output_naming, "nkipy, trace.py", "name all outputs or none"),
    (_alias_kind, "neuronx-distributed: MUST_ALIAS", _CANONICAL),
    (_alias_whole, "aliasing_output_rewrite_pass.md", "alias whole buffers"),
    (_alias_target, "NCC_EVRF064", "alias an input and an output of one type"),
    (_alias_uniqueness, "NCC_EVRF064", "alias each input and each output once"),
    (_raw_output, "inputs and outputs have memory of their own", "copy it, or alias it"),
    (_empty_output, _NKIPY, "drop the output, and make it on the host"),
    (_empty_input, _NKIPY, "drop the input"),
    (_tuple_input, "nrt.h: a tensor is one array", "pass each array by itself"),
)
RULES: Final = tuple(
    HloRule(check.__name__.strip("_").replace("_", "-"), source, remedy, check) for check, source, remedy in _TABLE
)
