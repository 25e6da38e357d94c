"""The module of a graph keeps the contract of docs/reference/hlo.md: names, types, aliases, opcodes, no dependence on
anything but the computation."""

import os
import re
import subprocess
import sys
from random import Random

import numpy as np
import pytest

from nxpipe.emulator.compile import shard_graph
from nxpipe.emulator.errors import HloUnsupported
from nxpipe.emulator.executable.interface import RANK
from nxpipe.emulator.hlo.module import Module, module_of
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import NOWHERE, Origin
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.ops import Binary, Cast, Linear, RankSlice, Reshape, Unary
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.passes.roll import roll
from tests.conftest import ROOT
from tests.emulator.models import captured
from tests.emulator.test_decode import request as step
from tests.hlo.blocks import attention_block, digest
from tests.hlo.harness import drawn_case
from tests.lower.test_every_operator import ROWS

F32, BF16, I64 = DType.FLOAT32, DType.BFLOAT16, DType.INT64
_OPCODE = re.compile(r'= "?(?:stablehlo|mhlo)\.(\w+)')
_APPLIED = re.compile(r"(?:applies|%c =) stablehlo\.(\w+)")


def llama(phase: str, degree: int = 1) -> Graph:
    whole = run_passes(captured(step("llama", phase)), PassOptions())
    return shard_graph(whole, PassOptions(tensor_parallel=degree)).graph


def opcodes(text: str) -> set[str]:
    return set(_OPCODE.findall(text)) | set(_APPLIED.findall(text))


def documented_opcodes() -> set[str]:
    page = (ROOT / "docs" / "reference" / "hlo.md").read_text()
    return set(re.findall(r"\w+", re.findall(r"## Opcodes.*?```text\n(.*?)```", page, re.DOTALL)[0]))


def header(module: Module) -> list[str]:
    return re.findall(r"%arg\d+: (tensor<\S+>) \{", module.text.partition("->")[0])


def test_the_opcodes_of_all_operators_are_those_of_the_page_and_no_type_has_64_bits() -> None:
    written = set[str]()
    for row in ROWS:
        for number in range(12):
            module = module_of(drawn_case(row, Random(number)).graph, 4)
            written |= opcodes(module.text)
            values = re.sub(r"<\{.*?\}>", "", module.text)  # attributes are not values
            assert not re.search(r"tensor<(?:\d+x)*(?:u?i64|f64)>", values)
    assert written <= documented_opcodes()
    assert documented_opcodes() - written <= {"copy"}


def test_weights_are_arguments_in_order_of_use_after_inputs_and_states() -> None:
    graph = llama("decode")
    module = module_of(graph)
    names = [argument.name for argument in module.interface.arguments]
    assert names[: len(graph.inputs)] == list(graph.inputs)
    assert set(names[len(graph.inputs) :]) == set(graph.parameters)
    assert names[len(graph.inputs)] == "model.embed_tokens.weight"
    assert re.findall(r'neff_input_names = "(.*?)"', module.text) == names
    assert [result.name for result in module.interface.results] == list(graph.outputs)


def test_a_cache_is_an_alias_of_the_result_of_its_name() -> None:
    module = module_of(llama("decode"))
    numbers = {result.name: number for number, result in enumerate(module.interface.results)}
    states = [argument for argument in module.interface.arguments if argument.role is Role.STATE]
    assert [state.name for state in states] == [
        f"cache.{layer}.{role}" for layer in range(2) for role in ("key", "value")
    ]
    assert all(state.alias == numbers[state.name] for state in states)
    declared = re.findall(r'neff_input_names = "([^"]*)"}, tf.aliasing_output = (\d+) : i32', module.text)
    assert [(state.name, str(state.alias)) for state in states] == declared


def test_layers_are_unrolled_and_a_rolled_graph_has_the_module_of_the_unrolled_one() -> None:
    builder = GraphBuilder()
    value = builder.input("x", TensorType((2, 8), F32))
    for layer in range(5):
        weight = builder.parameter(f"layers.{layer}.weight", TensorType((8, 8), F32))
        value = builder.add(Unary("gelu"), builder.add(Linear(F32), value, weight))
    builder.output("y", value)
    graph = builder.build()
    rolled = roll(graph, PassOptions())
    assert rolled.repeats
    assert module_of(rolled).text == module_of(graph).text
    assert module_of(rolled).text.count("dot_general") == 5


def test_a_module_depends_on_the_computation_alone() -> None:
    """Neither on provenance, the order of nodes, numbering nor on nodes that no output needs."""

    def built(*, reverse: bool) -> Graph:
        builder = GraphBuilder()
        x = builder.input("x", TensorType((3,), F32))
        if reverse:
            builder.add(Unary("exp"), x)
        names = ["sin", "cos"]
        results = {name: builder.add(Unary(name), x) for name in (reversed(names) if reverse else names)}
        origin = Origin("layers.0", "model.py:7") if reverse else NOWHERE
        builder.output("y", builder.add(Binary("add"), *(results[name] for name in names), origin=origin))
        return builder.build()

    assert module_of(built(reverse=True)).text == module_of(built(reverse=False)).text


def test_no_seed_of_hashes_changes_a_module() -> None:
    program = "from tests.hlo.blocks import attention_block, digest; print(digest(attention_block()))"
    found = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "4711")
    ]
    assert found == [digest(attention_block())] * 2


def test_the_host_slices_and_casts_a_weight_that_nothing_else_reads() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((3, 8), BF16))
    weight = builder.parameter("w", TensorType((8, 8), F32))
    share = builder.add(Cast(BF16), builder.add(RankSlice(0, 1, (8,), (2,), 2), weight))
    builder.output("y", builder.add(Linear(BF16), x, share))
    module = module_of(builder.build(), 2)
    argument = module.interface.arguments[1]
    assert header(module) == ["tensor<3x8xbf16>", "tensor<4x8xbf16>"]
    assert (argument.whole, argument.type) == (TensorType((8, 8), F32), TensorType((4, 8), BF16))
    table = np.arange(64, dtype=np.float32).reshape(8, 8) / 3
    for rank in range(2):
        found = argument.on_rank({"w": table}, rank)
        assert found.dtype == DType.BFLOAT16.stored
        np.testing.assert_array_equal(found, table[4 * rank : 4 * rank + 4].astype(DType.BFLOAT16.stored))


def test_a_rank_reads_its_number_only_to_slice_what_all_ranks_have() -> None:
    assert RANK not in [argument.name for argument in module_of(attention_block(), 2).interface.arguments]
    builder = GraphBuilder()
    x = builder.input("x", TensorType((8,), F32))
    builder.output("y", builder.add(RankSlice(0, 1, (8,), (2,), 2), x))
    module = module_of(builder.build(), 2)
    assert [argument.name for argument in module.interface.arguments] == ["x", RANK]
    assert header(module) == ["tensor<8xf32>", "tensor<1xi32>"]


def test_truth_values_are_bytes_outside_and_64_bit_integers_have_32() -> None:
    builder = GraphBuilder()
    flags = builder.input("flags", TensorType((4,), DType.BOOL))
    ids = builder.input("ids", TensorType((4,), I64))
    limit = builder.constant(np.asarray([np.iinfo(np.int64).max, -5, 0, 1]), I64)
    builder.output("not", builder.add(Unary("logical_not"), flags))
    builder.output("least", builder.add(Binary("minimum"), ids, limit))
    module = module_of(builder.build())
    assert header(module) == ["tensor<4xui8>", "tensor<4xi32>"]
    assert "-> (tensor<4xui8>, tensor<4xi32>) {" in module.text
    assert "FFFFFF7FFBFFFFFF" in module.text  # the limit is that of 32 bits


def test_each_result_has_memory_of_its_own() -> None:
    """A second name of a value, and an input that is returned under another name, are copied; a state is not."""
    builder = GraphBuilder()
    x, state = (builder.input(name, TensorType((3,), F32)) for name in ("x", "state"))
    doubled = builder.add(Binary("add"), x, x)
    builder.output("one", doubled)
    builder.output("two", doubled)
    builder.output("same", builder.add(Reshape((3,)), x))
    builder.output("state", state)
    text = module_of(builder.build()).text
    assert text.count("mhlo.copy") == 2
    assert re.search(r"return %0, %\d+, %\d+, %arg1 :", text)


@pytest.mark.parametrize("name", ["a,b", "x" * 256, "naïve", "line\nbreak"])
def test_a_name_that_the_compiler_would_misread_is_refused(name: str) -> None:
    builder = GraphBuilder()
    builder.output("y", builder.add(Unary("abs"), builder.input(name, TensorType((2,), F32))))
    with pytest.raises(HloUnsupported, match="rename the tensor"):
        module_of(builder.build())


def test_quotes_in_a_name_are_escaped() -> None:
    builder = GraphBuilder()
    builder.output("y", builder.add(Unary("abs"), builder.input('a"b\\', TensorType((2,), F32))))
    assert 'neff_input_names = "a\\22b\\5C"' in module_of(builder.build()).text
