"""Canonical modules: the form that neuronx-cc is known to accept, and the same numbers on XLA's CPU client."""

import hashlib
import math
import os
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.errors import HloInvalid
from nxpipe.emulator.hlo.canonical import canonical
from nxpipe.emulator.hlo.constraints import violations
from nxpipe.emulator.hlo.schema import (
    ComputationField,
    HloModule,
    InstructionField,
    ModuleField,
    replica_groups,
)
from nxpipe.emulator.hlo.wire import Message, Value
from tests.conftest import ROOT
from tests.hlo.modules import SAMPLES, Sample, convert, good, written

_LAYOUT = re.compile(r"(?<=\])\{[0-9,]+\}")
TYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "i32": np.int32, "ui32": np.uint32, "i1": np.bool_}


def values(sample: Sample, seed: int) -> list[list[np.ndarray]]:
    """Inputs for each rank; integers are valid indices of every sample."""
    random = np.random.default_rng(seed)

    def array(tensor: str) -> np.ndarray:
        *shape, element = tensor.split("x")
        drawn = (
            random.integers(0, 4, [int(size) for size in shape])
            if "i" in element
            else random.standard_normal([int(size) for size in shape])
        )
        return np.asarray(drawn).astype(TYPES[element])

    return [[array(tensor) for _, tensor in sample.inputs] for _ in range(sample.ranks)]


def instructions(data: bytes) -> list[Message]:
    module = Message.parse(data)
    return [
        each
        for computation in module.messages(ModuleField.COMPUTATIONS)
        for each in computation.messages(ComputationField.INSTRUCTIONS)
    ]


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if sample.executable])
def test_xla_computes_the_same_numbers_from_both_forms(name: str) -> None:
    from tests.hlo.xla_cpu import execute

    inputs = values(SAMPLES[name], seed=1)
    before, after = execute(written(name), inputs), execute(good(name), inputs)
    assert [len(outputs) for outputs in after] == [len(SAMPLES[name].outputs)] * SAMPLES[name].ranks
    for expected, found in zip(before, after, strict=True):
        for left, right in zip(expected, found, strict=True):
            assert left.dtype == right.dtype
            assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize("name", SAMPLES)
def test_xla_prints_the_same_module_of_both_forms_but_for_what_is_added(name: str) -> None:
    from jaxlib import _hlo

    before, after = (_hlo.XlaComputation(data).as_hlo_text() for data in (written(name), canonical(written(name))))
    assert _LAYOUT.sub("", after) == _LAYOUT.sub("", before.replace("may-alias", "must-alias"))


OPERATIONS = ("add", "multiply", "maximum", "dot", "transpose", "reduce", "tanh")


@st.composite
def programs(draw: st.DrawFn) -> str:
    """A chain of operators, each on earlier results."""
    lines, count = ["%zero = stablehlo.constant dense<0.0> : tensor<f32>"], 2
    for _ in range(draw(st.integers(1, 8))):
        left, right = (f"%v{draw(st.integers(0, count - 1))}" for _ in range(2))
        operation, result = draw(st.sampled_from(OPERATIONS)), f"%v{count}"
        match operation:
            case "dot":
                lines.append(
                    f"{result} = stablehlo.dot_general {left}, {right}, contracting_dims = [1] x [0] "
                    ": (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>"
                )
            case "transpose":
                lines.append(
                    f"{result} = stablehlo.transpose {left}, dims = [1, 0] : (tensor<4x4xf32>) -> tensor<4x4xf32>"
                )
            case "reduce":
                lines.append(
                    f"%r{count} = stablehlo.reduce({left} init: %zero) applies stablehlo.add across dimensions = [1] "
                    ": (tensor<4x4xf32>, tensor<f32>) -> tensor<4xf32>\n"
                    f"{result} = stablehlo.broadcast_in_dim %r{count}, dims = [0] : (tensor<4xf32>) -> tensor<4x4xf32>"
                )
            case "tanh":
                lines.append(f"{result} = stablehlo.tanh {left} : tensor<4x4xf32>")
            case _:
                lines.append(f"{result} = stablehlo.{operation} {left}, {right} : tensor<4x4xf32>")
        count += 1
    body = "\n".join(lines)
    square = "tensor<4x4xf32>"
    return f"func.func @main(%v0: {square}, %v1: {square}) -> {square} {{\n{body}\nreturn %v{count - 1} : {square}\n}}"


@given(programs(), st.integers(0, 100))
@settings(deadline=None)
def test_xla_computes_the_same_numbers_from_both_forms_of_any_program(text: str, seed: int) -> None:
    from tests.hlo.xla_cpu import execute

    inputs = [list(np.random.default_rng(seed).standard_normal((2, 4, 4)).astype(np.float32))]
    before = convert(text)
    assert execute(canonical(before), inputs)[0][0].tobytes() == execute(before, inputs)[0][0].tobytes()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_canonical_module_is_its_own_canonical_form(name: str) -> None:
    assert canonical(good(name)) == good(name)


@pytest.mark.parametrize("name", SAMPLES)
def test_two_conversions_in_one_process_have_the_same_canonical_bytes(name: str) -> None:
    """The second proto has another module id: jaxlib counts them over the process."""
    again = convert(SAMPLES[name].text())
    assert canonical(again) == canonical(written(name))
    assert again != convert(SAMPLES[name].text())


def test_another_process_writes_the_same_canonical_bytes() -> None:
    code = (
        "import hashlib; from tests.hlo.modules import SAMPLES, good\n"
        "print(hashlib.sha256(b''.join(map(good, SAMPLES))).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True)
    assert found.stdout.decode().strip() == hashlib.sha256(b"".join(map(good, SAMPLES))).hexdigest()


@pytest.mark.parametrize("name", SAMPLES)
def test_ids_are_dense_over_the_module_and_in_its_order(name: str) -> None:
    module = HloModule.read(good(name))
    ids = [each.id for computation in module.computations for each in computation.instructions]
    assert ids == list(range(1, len(ids) + 1))
    assert [each.id for each in module.computations] == list(range(1, len(module.computations) + 1))
    assert (
        max(each.id for computation in HloModule.read(written(name)).computations for each in computation.instructions)
        > 2**32
    )


def test_groups_are_lists_in_field_49_and_aliases_are_demanded() -> None:
    reduced = next(each for each in instructions(good("row-parallel layer")) if each.text(2) == "all-reduce")
    assert replica_groups(reduced) == [[0, 1]]
    assert not reduced.has(InstructionField.COLLECTIVE_DEVICE_LIST)
    assert {alias.kind for alias in HloModule.read(written("two caches")).aliases} == {1}
    assert {alias.kind for alias in HloModule.read(good("two caches")).aliases} == {2}


def test_layouts_are_row_major() -> None:
    """jaxlib gives a transposition the layout that makes it free."""
    assert {each.rule for each in violations(written("transposed"), "trn2")} == {"id-range", "layout", "program-layout"}
    assert violations(good("transposed"), "trn2") == []


def test_names_of_inputs_stay_and_those_of_outputs_are_added() -> None:
    entry = HloModule.read(good("two caches")).entry
    assert entry is not None
    assert entry.root is not None
    names = [each.attribute("neff_input_names") for each in entry.instructions if each.opcode == "parameter"]
    assert names == ["a", "b"]
    assert entry.root.attribute("neff_output_names") == "sum,double"


def test_an_input_that_an_output_of_its_name_replaces_has_a_suffix() -> None:
    data = canonical(written("two caches"), output_names=["a", "double"])
    assert canonical(data, output_names=["a", "double"]) == data
    entry = HloModule.read(data).entry
    assert entry is not None
    names = {each.attribute("neff_input_names") for each in entry.instructions if each.opcode == "parameter"}
    assert names == {"a.must_alias_input", "b"}
    assert violations(data, "trn2") == []


def test_names_that_do_not_fit_the_outputs_are_refused() -> None:
    with pytest.raises(HloInvalid, match="the root has 2 outputs, and 1 names are given"):
        canonical(written("two caches"), output_names=["sum"])
    with pytest.raises(HloInvalid, match="comma"):
        canonical(written("two caches"), output_names=["sum", "a,b"])


def _located(path: str) -> str:
    return (
        "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n%y = stablehlo.tanh %x : tensor<4xf32> "
        f'loc("{path}":3:4)\nreturn %y : tensor<4xf32>\n}}'
    )


def test_no_location_of_the_machine_is_left_unless_it_is_wanted() -> None:
    here, there = convert(_located("/home/me/model.py")), convert(_located("/srv/other.py"))
    assert b"/home/me" in here
    assert canonical(here) == canonical(there)
    assert b".py" not in canonical(here)
    assert b"/home/me/model.py" in canonical(here, keep_locations=True)
    assert canonical(canonical(here, keep_locations=True)) == canonical(here)


def test_empty_messages_and_the_notes_of_a_process_are_dropped() -> None:
    for name in SAMPLES:
        for each in instructions(good(name)):
            numbers = {number for number, _ in each.fields}
            assert not numbers & {7, 26, 45, 71, 82, 87, 88, 92, 98}
            assert 68 not in numbers or each.data(68)
        assert not {number for number, _ in Message.parse(good(name)).fields} & {5, 7, 13, 15, 17, 18, 19}


def test_channels_are_dropped() -> None:
    text = (
        SAMPLES["row-parallel layer"]
        .text()
        .replace(
            "replica_groups",
            "channel_handle = #stablehlo.channel_handle<handle = 7, type = 1>, use_global_device_ids, replica_groups",
        )
    )
    data = convert(text)
    assert any(each.number(InstructionField.CHANNEL_ID) == 7 for each in instructions(data))
    assert canonical(data) == canonical(written("row-parallel layer"))


@st.composite
def iota_groups(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """A shape of ranks, the order of its axes, and the number of groups."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    world = math.prod(shape)
    return (
        shape,
        draw(st.permutations(range(len(shape)))),
        draw(st.sampled_from([count for count in range(1, world + 1) if world % count == 0])),
    )


@given(iota_groups())
@settings(deadline=None)
def test_groups_of_an_iota_are_expanded(groups: tuple[list[int], list[int], int]) -> None:
    from jaxlib import _hlo

    shape, order, count = groups
    world = math.prod(shape)
    permutation = f"T({','.join(map(str, order))})" if len(shape) > 1 else ""
    form = f"[{count},{world // count}]<=[{','.join(map(str, shape))}]{permutation}"
    text = (
        "HloModule m\nadd { l = f32[] parameter(0)\n r = f32[] parameter(1)\n ROOT s = f32[] add(l, r) }\n"
        f"ENTRY e {{ x = f32[4] parameter(0)\n ROOT y = f32[4] all-reduce(x), replica_groups={form}, to_apply=add }}"
    )
    data = canonical(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    reduced = next(each for each in instructions(data) if each.text(2) == "all-reduce")
    expected = np.arange(world).reshape(shape).transpose(order).reshape(count, -1).tolist()
    assert replica_groups(reduced) == expected


def _with_groups(fields: list[tuple[int, list[int]]]) -> bytes:
    """The layer with a list of groups of an iota's form, by field."""
    module = Message.parse(written("row-parallel layer"))
    for computation in module.messages(ModuleField.COMPUTATIONS):
        for each in computation.messages(ComputationField.INSTRUCTIONS):
            if each.text(2) == "all-reduce":
                iota = Message()
                for number, numbers in fields:
                    iota.set_numbers(number, numbers)
                each.set(InstructionField.COLLECTIVE_DEVICE_LIST, Message([(2, iota)]))
    return module.encode()


@pytest.mark.parametrize(
    "fields",
    [
        [(1, [2]), (2, [2]), (3, [5])],
        [(1, [1]), (2, [1 << 40]), (3, [1 << 40])],
        [(1, [0]), (2, [0]), (3, [])],
        [(1, [1]), (2, [4]), (3, [2, 2]), (4, [0, 0])],
        [(1, [1]), (2, [1]), (3, [1] * 100)],
    ],
)
def test_impossible_groups_of_an_iota_are_refused(fields: list[tuple[int, list[int]]]) -> None:
    with pytest.raises(HloInvalid, match=r"in field 3\.2\.87"):
        canonical(_with_groups(fields))


@pytest.mark.parametrize(
    ("number", "value", "reason"),
    [
        (InstructionField.COLLECTIVE_DEVICE_LIST, Message([(3, b"mesh")]), "unknown form; list their ranks"),
        (InstructionField.COLLECTIVE_DEVICE_LIST, Message([(1, Message([(1, b"\0")]))]), "different lists of groups"),
        (93, b"mesh", "does not know; write the operator without it"),
    ],
)
def test_an_unknown_or_a_contradictory_form_of_groups_is_refused(number: int, value: Value, reason: str) -> None:
    """A form that a reader does not know would be dropped, and the ranks of all groups be added up."""
    module = Message.parse(good("row-parallel layer"))
    for computation in module.messages(ModuleField.COMPUTATIONS):
        for each in computation.messages(ComputationField.INSTRUCTIONS):
            if each.text(2) == "all-reduce":
                each.set(number, value)
    with pytest.raises(HloInvalid, match=reason):
        canonical(module.encode())


@pytest.mark.parametrize(
    ("number", "value", "reason"),
    [
        (InstructionField.OPERAND_IDS, b"\x7f", "refers to the id 127"),
        (InstructionField.CALLED_COMPUTATION_IDS, b"\x7f", "refers to the id 127"),
        (InstructionField.CONTROL_PREDECESSOR_IDS, b"\x7f", "refers to the id 127"),
        (InstructionField.ID, 1, "occurs twice"),
    ],
)
def test_a_reference_to_nothing_is_refused(number: int, value: int | bytes, reason: str) -> None:
    module = Message.parse(good("two caches"))
    module.messages(ModuleField.COMPUTATIONS)[0].messages(ComputationField.INSTRUCTIONS)[-1].set(number, value)
    with pytest.raises(HloInvalid, match=reason):
        canonical(module.encode())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda module: module.set(6, 99), "no computation has the id 99"),
        (lambda module: module.messages(3)[0].set(6, 99), "no instruction has the id 99 of the root"),
    ],
)
def test_a_module_without_its_entry_or_a_root_is_refused(change: object, reason: str) -> None:
    module = Message.parse(good("two caches"))
    assert callable(change)
    change(module)
    with pytest.raises(HloInvalid, match=reason):
        canonical(module.encode())


def test_two_computations_of_one_id_are_refused() -> None:
    module = Message.parse(written("attention"))
    first, second = module.messages(ModuleField.COMPUTATIONS)[:2]
    second.set(ComputationField.ID, first.number(ComputationField.ID))
    with pytest.raises(HloInvalid, match=r"the id \d+ of a computation occurs twice"):
        canonical(module.encode())
