"""Documented constraints of neuronx-cc: good modules have no violation, and each seeded one breaks its rule alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.errors import HloInvalid
from nxpipe.emulator.hlo.constraints import (
    CUSTOM_CALLS,
    OPCODES,
    RULES,
    TARGETS,
    HloLimits,
    violations,
)
from nxpipe.emulator.hlo.schema import ComputationField, ModuleField
from nxpipe.emulator.hlo.schema import InstructionField as Field
from nxpipe.emulator.hlo.wire import Message
from tests.conftest import ROOT
from tests.hlo.modules import SAMPLES, good, written

TYPES = {"s16": 3, "s32": 4, "s64": 5, "f64": 12, "c64": 15, "f8e4m3fn": 20, "s4": 21, "f8e5m2fnuz": 24}


def target_of(name: str) -> str:
    return "trn1" if name == "sort" else "trn2"


def find(module: Message, opcode: str, index: int = 0) -> Message:
    """The instruction of an opcode, those of the entry first."""
    computations = module.messages(ModuleField.COMPUTATIONS)[::-1]
    members = [each for part in computations for each in part.messages(ComputationField.INSTRUCTIONS)]
    return [each for each in members if each.text(Field.OPCODE) == opcode][index]


def parameter(module: Message, number: int) -> Message:
    """A parameter of the entry, by its number."""
    found = [each for each in entry(module).messages(ComputationField.INSTRUCTIONS) if each.text(2) == "parameter"]
    return next(each for each in found if each.number(Field.PARAMETER_NUMBER) == number)


def entry(module: Message) -> Message:
    return module.messages(ModuleField.COMPUTATIONS)[-1]


def child(message: Message, number: int) -> Message:
    found = message.message(number)
    assert found is not None
    return found


def set_type(instruction: Message, element_type: str) -> None:
    child(instruction, Field.SHAPE).set(2, TYPES[element_type])


def set_shape(instruction: Message, *dimensions: int) -> None:
    child(instruction, Field.SHAPE).set_numbers(3, dimensions)


def set_groups(instruction: Message, groups: Sequence[Sequence[int]]) -> None:
    instruction.remove(Field.REPLICA_GROUPS)
    for ranks in groups:
        group = Message()
        group.set_numbers(1, ranks)
        instruction.add(Field.REPLICA_GROUPS, group)


def set_attribute(instruction: Message, key: str, value: str) -> None:
    entry = Message()
    entry.add(1, key)
    entry.add(2, value)
    instruction.set(Field.FRONTEND_ATTRIBUTES, Message([(1, entry)]))


def set_root_id(module: Message, number: int) -> None:
    """Another id of the entry's root."""
    entry(module).messages(ComputationField.INSTRUCTIONS)[-1].set(Field.ID, number)
    entry(module).set(ComputationField.ROOT_ID, number)


def set_computation_id(module: Message, number: int) -> None:
    entry(module).set(ComputationField.ID, number)
    module.set(ModuleField.ENTRY_COMPUTATION_ID, number)


def set_window(instruction: Message, **numbers: int) -> None:
    fields = {"stride": 2, "window_dilation": 5, "base_dilation": 6}
    for dimension in child(instruction, Field.WINDOW).messages(1):
        for name, value in numbers.items():
            dimension.set(fields[name], value)


def set_combiner(module: Message, opcode: str) -> None:
    """Another operator in the first computation that is called."""
    module.messages(ModuleField.COMPUTATIONS)[0].messages(ComputationField.INSTRUCTIONS)[-1].set(Field.OPCODE, opcode)


def aliases(module: Message) -> list[Message]:
    return child(module, ModuleField.INPUT_OUTPUT_ALIAS).messages(1)


def copied(message: Message) -> Message:
    return Message.parse(message.encode())


def _own_operand(module: Message) -> None:
    add = find(module, "add")
    add.set_numbers(Field.OPERAND_IDS, [add.number(Field.ID)] * 2)


def _group_form(module: Message) -> None:
    reduced = find(module, "all-reduce")
    reduced.set(Field.COLLECTIVE_DEVICE_LIST, Message([(1, copied(reduced.messages(Field.REPLICA_GROUPS)[0]))]))


def _reduce_two(module: Message) -> None:
    reduced = find(module, "reduce")
    value, init = reduced.numbers(Field.OPERAND_IDS)
    reduced.set_numbers(Field.OPERAND_IDS, [value, value, init, init])


def _computed_init(module: Message) -> None:
    reduced = find(module, "reduce")
    value, _ = reduced.numbers(Field.OPERAND_IDS)
    reduced.set_numbers(Field.OPERAND_IDS, [value, value])


def _integer_scatter(module: Message) -> None:
    set_type(find(module, "scatter"), "s32")
    set_combiner(module, "add")


def _dilated(module: Message) -> None:
    set_window(find(module, "convolution"), stride=1, window_dilation=2, base_dilation=2)


def _third_operand(module: Message) -> None:
    pooled = find(module, "reduce-window")
    operands = pooled.numbers(Field.OPERAND_IDS)
    pooled.set_numbers(Field.OPERAND_IDS, [*operands, operands[0]])


def _rng(module: Message) -> None:
    drawn = find(module, "rng-bit-generator")
    drawn.set(Field.OPCODE, "rng")
    drawn.set(Field.DISTRIBUTION, 2)


def _pair_twice(module: Message) -> None:
    moved = find(module, "collective-permute")
    moved.add(Field.SOURCE_TARGET_PAIRS, copied(moved.messages(Field.SOURCE_TARGET_PAIRS)[0]))


def _raw_output(module: Message) -> None:
    root = entry(module).messages(ComputationField.INSTRUCTIONS)[-1]
    root.set_numbers(Field.OPERAND_IDS, [parameter(module, 0).number(Field.ID)])


def _tuple_input(module: Message) -> None:
    shape = child(parameter(module, 0), Field.SHAPE)
    inner = copied(shape)
    shape.fields = [(2, 13), (4, inner)]


def _shape_of_values(module: Message) -> None:
    child(find(module, "select"), Field.SHAPE).set_numbers(6, [1, 0])


def _further_parameter(module: Message) -> None:
    program = child(module, ModuleField.HOST_PROGRAM_SHAPE)
    program.add(1, copied(program.messages(1)[0]))


def _column_major_output(module: Message) -> None:
    result = child(child(module, ModuleField.HOST_PROGRAM_SHAPE), 2)
    child(result.messages(4)[0], 5).set_numbers(1, [0, 1])


def _literal_layout(module: Message) -> None:
    literal = child(find(module, "constant"), Field.LITERAL)
    child(child(literal, 1), 5).add(6, b"")


def _short_literal(module: Message, number: int) -> None:
    for index in range(9):
        literal = child(find(module, "constant", index), Field.LITERAL)
        if literal.has(number):
            literal.set(number, bytes(literal.data(number))[:-4])
            return


def _of(type_name: str) -> Callable[[Message], None]:
    return lambda module: set_type(find(module, "select"), type_name)


def _name_twice(module: Message) -> None:
    for index in (0, 1):
        set_attribute(parameter(module, index), "neff_input_names", "same")


@dataclass(frozen=True)
class Seed:
    """A change of a good module that breaks one rule; `target` overrides that of the sample."""

    rule: str
    sample: str
    change: Callable[[Message], object]
    target: str = ""

    def __str__(self) -> str:
        return f"{self.rule} in {self.sample}"


SEEDS = [
    Seed("id-range", "attention", lambda module: set_root_id(module, 2**32 + 1)),
    Seed("id-range", "attention", lambda module: set_root_id(module, 2**31)),
    Seed("id-density", "attention", lambda module: set_root_id(module, 1000)),
    Seed("computation-ids", "two caches", lambda module: set_computation_id(module, 9)),
    Seed("operand-order", "two caches", _own_operand),
    Seed(
        "operand-order",
        "two caches",
        lambda module: find(module, "add").set_numbers(Field.CONTROL_PREDECESSOR_IDS, [99]),
    ),
    Seed(
        "callee-order",
        "attention",
        lambda module: find(module, "reduce").set_numbers(Field.CALLED_COMPUTATION_IDS, [99]),
    ),
    Seed(
        "root",
        "attention",
        lambda module: module.messages(ModuleField.COMPUTATIONS)[0].set(ComputationField.ROOT_ID, 99),
    ),
    Seed("entry", "attention", lambda module: module.set(ModuleField.ENTRY_COMPUTATION_ID, 99)),
    Seed("parameter-numbers", "attention", lambda module: parameter(module, 2).set(Field.PARAMETER_NUMBER, 5)),
    Seed("program-shape", "attention", _further_parameter),
    Seed("opcode", "attention", lambda module: find(module, "exponential").set(Field.OPCODE, "logistic")),
    Seed("opcode", "attention", lambda module: find(module, "exponential").set(Field.OPCODE, "fft")),
    Seed("control-flow", "attention", lambda module: find(module, "exponential").set(Field.OPCODE, "call")),
    Seed("control-flow", "attention", lambda module: find(module, "exponential").set(Field.OPCODE, "while")),
    Seed("rank-opcode", "causal mask", lambda module: find(module, "iota").set(Field.OPCODE, "partition-id")),
    Seed("dynamic-shape", "causal mask", _shape_of_values),
    Seed("dynamic-shape", "causal mask", lambda module: find(module, "select").set(Field.OPCODE, "set-dimension-size")),
    Seed("topk-opcode", "greedy sampling", lambda module: find(module, "custom-call").set(Field.OPCODE, "topk")),
    Seed("sort-target", "sort", lambda module: None, target="trn2"),
    Seed("sort-target", "sort", lambda module: None, target="trn3"),
    Seed("sort-comparator", "sort", lambda module: find(module, "compare").set(Field.COMPARISON_DIRECTION, "NE")),
    Seed(
        "custom-call",
        "greedy sampling",
        lambda module: find(module, "custom-call").set(Field.CUSTOM_CALL_TARGET, "TopK"),
    ),
    Seed(
        "topk-limit", "greedy sampling", lambda module: find(module, "custom-call").set(Field.BACKEND_CONFIG, b"16385")
    ),
    Seed("topk-limit", "greedy sampling", lambda module: find(module, "custom-call").set(Field.BACKEND_CONFIG, b"k=8")),
    Seed("topk-type", "greedy sampling", lambda module: set_type(parameter(module, 0), "s32")),
    Seed("topk-row", "greedy sampling", lambda module: set_shape(parameter(module, 0), 2, 30)),
    Seed("rng-algorithm", "noise", lambda module: find(module, "rng-bit-generator").set(Field.RNG_ALGORITHM, 1)),
    Seed("rng-distribution", "noise", _rng),
    Seed("reduce-operands", "attention", _reduce_two),
    Seed("reduce-init", "attention", _computed_init),
    Seed("reduce-combiner", "attention", lambda module: set_combiner(module, "and")),
    Seed("integer-dot", "row-parallel layer", lambda module: set_type(parameter(module, 0), "s32")),
    Seed("integer-scatter", "scatter", _integer_scatter),
    Seed("shift-type", "constants", lambda module: set_type(find(module, "shift-right-arithmetic"), "s16")),
    Seed("index-type", "decode step", lambda module: set_type(parameter(module, 1), "s16")),
    Seed("index-range", "position embedding", lambda module: set_shape(parameter(module, 0), 4, 4)),
    Seed("convolution-dilation", "convolution", _dilated),
    Seed("convolution-stride", "convolution", lambda module: set_window(find(module, "convolution"), base_dilation=2)),
    Seed("pool-base-dilation", "pooling", lambda module: set_window(find(module, "reduce-window"), base_dilation=2)),
    Seed(
        "pool-window-dilation", "pooling", lambda module: set_window(find(module, "reduce-window"), window_dilation=2)
    ),
    Seed("pool-operands", "pooling", _third_operand),
    Seed("elementwise-shape", "attention", lambda module: set_shape(find(module, "subtract"), 8, 1)),
    Seed("group-form", "row-parallel layer", _group_form),
    Seed("group-size", "row-parallel layer", lambda module: set_groups(find(module, "all-reduce"), [[0], [1, 2]])),
    Seed("group-members", "row-parallel layer", lambda module: set_groups(find(module, "all-reduce"), [[0, 0]])),
    Seed("group-members", "row-parallel layer", lambda module: set_groups(find(module, "all-reduce"), [[0, 2]])),
    Seed(
        "group-count",
        "row-parallel layer",
        lambda module: set_groups(find(module, "all-reduce"), [[rank] for rank in range(17)]),
    ),
    Seed("channel-id", "row-parallel layer", lambda module: find(module, "all-reduce").set(Field.CHANNEL_ID, 1)),
    Seed(
        "global-device-ids",
        "row-parallel layer",
        lambda module: find(module, "all-reduce").set(Field.USE_GLOBAL_DEVICE_IDS, 1),
    ),
    Seed("collective-combiner", "row-parallel layer", lambda module: set_combiner(module, "multiply")),
    Seed("collective-type", "row-parallel layer", lambda module: set_type(find(module, "all-reduce"), "s32")),
    Seed(
        "all-to-all-dimension",
        "collectives",
        lambda module: find(module, "all-to-all").set_numbers(Field.DIMENSIONS, [1]),
    ),
    Seed("permute-pairs", "collectives", _pair_twice),
    Seed("sharding", "attention", lambda module: parameter(module, 0).set(Field.SHARDING, b"")),
    Seed("sharding", "attention", lambda module: module.set(ModuleField.SPMD_OUTPUT_SHARDING, b"")),
    Seed("f64", "causal mask", _of("f64")),
    Seed("int64", "causal mask", _of("s64")),
    Seed("complex", "causal mask", _of("c64")),
    Seed("fp8-fnuz", "causal mask", _of("f8e5m2fnuz")),
    Seed("fp8-e4m3fn", "causal mask", _of("f8e4m3fn")),
    Seed("element-type", "causal mask", _of("s4")),
    Seed(
        "layout",
        "causal mask",
        lambda module: child(child(find(module, "select"), Field.SHAPE), 5).set_numbers(1, [0, 1]),
    ),
    Seed("layout", "causal mask", lambda module: child(child(find(module, "select"), Field.SHAPE), 5).add(6, b"")),
    Seed("layout", "constants", _literal_layout),
    Seed("program-layout", "attention", _column_major_output),
    Seed("literal-size", "constants", lambda module: _short_literal(module, 8)),
    Seed("literal-size", "constants", lambda module: _short_literal(module, 4)),
    Seed("literal-size", "constants", lambda module: find(module, "constant").remove(Field.LITERAL)),
    Seed(
        "name-length",
        "attention",
        lambda module: set_attribute(parameter(module, 0), "neff_input_names", "n" * 256),
    ),
    Seed("name-length", "attention", lambda module: set_attribute(parameter(module, 0), "neff_input_names", "")),
    Seed(
        "name-length", "attention", lambda module: set_attribute(find(module, "tuple"), "neff_output_names", "é" * 128)
    ),
    Seed(
        "name-separator",
        "attention",
        lambda module: set_attribute(parameter(module, 0), "neff_input_names", "a,b"),
    ),
    Seed("name-uniqueness", "attention", _name_twice),
    Seed(
        "name-uniqueness",
        "attention",
        lambda module: set_attribute(find(module, "tuple"), "neff_output_names", "q"),
    ),
    Seed(
        "name-uniqueness", "two caches", lambda module: set_attribute(find(module, "tuple"), "neff_output_names", "a,a")
    ),
    Seed("input-naming", "attention", lambda module: parameter(module, 0).remove(Field.FRONTEND_ATTRIBUTES)),
    Seed("output-naming", "two caches", lambda module: set_attribute(find(module, "tuple"), "neff_output_names", "z")),
    Seed("alias-kind", "decode step", lambda module: aliases(module)[0].set(4, 1)),
    Seed("alias-whole", "decode step", lambda module: aliases(module)[0].set_numbers(3, [0])),
    Seed("alias-whole", "decode step", lambda module: aliases(module)[0].set_numbers(1, [1, 0])),
    Seed("alias-target", "decode step", lambda module: aliases(module)[0].set(2, 3)),
    Seed("alias-target", "decode step", lambda module: aliases(module)[0].set_numbers(1, [7])),
    Seed("alias-uniqueness", "decode step", lambda module: child(module, 8).add(1, copied(aliases(module)[0]))),
    Seed("raw-output", "attention", _raw_output),
    Seed("empty-output", "causal mask", lambda module: set_shape(find(module, "select"), 0, 8)),
    Seed("empty-input", "embedding", lambda module: set_shape(parameter(module, 0), 0, 1)),
    Seed("tuple-input", "embedding", _tuple_input),
]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_good_module_has_no_violation(name: str) -> None:
    assert violations(good(name), target_of(name)) == []


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_a_seeded_violation_breaks_its_rule_alone(seed: Seed) -> None:
    module = Message.parse(good(seed.sample))
    seed.change(module)
    found = violations(module.encode(), seed.target or target_of(seed.sample))
    assert {each.rule for each in found} == {seed.rule}


def test_every_rule_has_a_seed_or_is_a_limit_of_size() -> None:
    assert {rule.id for rule in RULES} - {seed.rule for seed in SEEDS} == {"module-size", "instruction-count"}
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    ("rule", "limits"), [("module-size", HloLimits(nbytes=100)), ("instruction-count", HloLimits(instructions=5))]
)
def test_a_module_beyond_a_limit_of_size_breaks_its_rule_alone(rule: str, limits: HloLimits) -> None:
    assert [each.rule for each in violations(good("attention"), "trn2", limits)] == [rule]


def test_a_violation_names_its_instruction_its_source_and_a_remedy() -> None:
    module = Message.parse(good("attention"))
    find(module, "exponential").set(Field.OPCODE, "fft")
    (found,) = violations(module.encode(), "trn2")
    assert str(found) == (
        "exponential.1: fft is in no list of operators that the compiler supports (NCC_EVRF001); "
        "compose it of supported operators"
    )


def test_what_jaxlib_writes_breaks_the_rules_of_ids_groups_and_aliases() -> None:
    assert {each.rule for each in violations(written("row-parallel layer"), "trn2")} == {"id-range", "group-form"}
    assert {each.rule for each in violations(written("two caches"), "trn2")} == {"id-range", "alias-kind"}


@pytest.mark.parametrize("target", TARGETS)
def test_fp8_and_sort_depend_on_the_target(target: str) -> None:
    module = Message.parse(good("causal mask"))
    set_type(find(module, "select"), "f8e4m3fn")
    assert bool(violations(module.encode(), target)) == (target != "trn3")
    assert bool(violations(good("sort"), target)) == (target in ("trn2", "trn3"))


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(HloInvalid, match="no target 'inf1'; its targets are inf2, trn1"):
        violations(good("attention"), "inf1")


def test_a_module_without_names_or_with_aliased_raw_outputs_is_good() -> None:
    module = Message.parse(good("two caches"))
    root = find(module, "tuple")
    for each in (parameter(module, 0), parameter(module, 1), root):
        each.remove(Field.FRONTEND_ATTRIBUTES)
    root.set_numbers(Field.OPERAND_IDS, [parameter(module, index).number(Field.ID) for index in (0, 1)])
    assert violations(module.encode(), "trn2") == []


@given(st.sampled_from(SEEDS), st.sampled_from(SEEDS))
def test_two_seeds_of_one_module_are_both_found(first: Seed, second: Seed) -> None:
    """Unless the second removes what the first has changed: then the module says so, or is refused."""
    module = Message.parse(good(first.sample))
    first.change(module)
    if second.sample == first.sample and second.rule != first.rule and not first.target and not second.target:
        try:
            second.change(module)
        except (IndexError, AssertionError):
            return
        assert violations(module.encode(), target_of(first.sample))


def test_the_page_lists_every_rule_with_its_source() -> None:
    page = (ROOT / "docs" / "reference" / "hlo-proto.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    listed = {cells[1].strip(" `"): cells[3].strip() for cells in rows if len(cells) == 6}
    assert listed == {rule.id: rule.source for rule in RULES}


def test_violations_have_one_order_in_every_process() -> None:
    module = Message.parse(good("encoder layer"))
    for opcode, other in (("exponential", "fft"), ("divide", "map"), ("subtract", "domain"), ("dot", "cholesky")):
        find(module, opcode).set(Field.OPCODE, other)
    first = violations(module.encode(), "trn2")
    assert [each.detail.partition(" ")[0] for each in first] == ["cholesky", "domain", "fft", "map"]


def test_the_tables_of_names_hold_no_stray_character() -> None:
    assert all(name.replace("-", "").isalnum() for name in OPCODES | CUSTOM_CALLS)
