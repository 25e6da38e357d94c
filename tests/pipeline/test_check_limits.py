"""Documented limits of compiler and runtime, on graphs that exceed each of them."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from nxpipe.emulator.hlo.canonical import canonical
from nxpipe.emulator.hlo.constraints import TARGETS, violations
from nxpipe.emulator.hlo.module import module_of
from nxpipe.emulator.hlo.xla import proto_of
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import (
    ArgSort,
    Binary,
    Cumulate,
    Flip,
    Gather,
    Index,
    IndexUpdate,
    Operator,
    Pool,
    ScatterAlong,
)
from nxpipe.pipeline.check.graph_rules import limits, lookups_outside
from nxpipe.pipeline.compile.findings import Finding


def found(operator: Operator, *types: TensorType, target: str = "inf2") -> list[Finding]:
    builder = GraphBuilder()
    inputs = [builder.input(f"x{number}", kind) for number, kind in enumerate(types)]
    builder.output("y", builder.add(operator, *inputs))
    return list(limits(builder.build(), target))


def kind(dtype: DType, *shape: int) -> TensorType:
    return TensorType(shape, dtype)


INTEGERS, FLOATS, PLACES = kind(DType.INT32, 4), kind(DType.FLOAT32, 4), kind(DType.INT32, 4)


@pytest.mark.parametrize("of", [partial(ScatterAlong, 0), partial(IndexUpdate, (0,))], ids=["along", "at places"])
def test_multiplying_integers_at_computed_places_is_refused_as_the_documentation_does(
    of: Callable[[str], Operator],
) -> None:
    (finding,) = found(of("multiply"), INTEGERS, INTEGERS, PLACES)
    assert (finding.rule.id, str(finding.severity)) == ("NXC-304", "error")
    assert "NCC_EVRF016" in finding.message
    assert not found(of("multiply"), FLOATS, FLOATS, PLACES)
    for combine in ("add", "maximum", "minimum"):  # composed of floats
        assert not found(of(combine), INTEGERS, INTEGERS, PLACES)


def test_replacing_integers_is_no_combination() -> None:
    assert not found(ScatterAlong(0, ""), INTEGERS, INTEGERS, PLACES)


COMPOSED = {
    "an order of integers": (ArgSort(0, True), INTEGERS),
    "a window with holes": (Pool("max_pool", (2,), (1,), (0,), (0,), (2,)), kind(DType.FLOAT32, 1, 1, 8)),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_what_is_composed_of_other_opcodes_is_no_finding_though_the_compiler_refuses_the_opcode(name: str) -> None:
    operator, given = COMPOSED[name]
    assert not found(operator, given)
    builder = GraphBuilder()
    builder.output("y", builder.add(operator, builder.input("x", given)))
    module = canonical(proto_of(module_of(builder.build()).text))
    assert all(violations(module, target) == [] for target in TARGETS)


@pytest.mark.parametrize(("target", "rules"), [("inf2", ["NXC-307"]), ("trn2", ["NXC-307"]), ("trn3", [])])
def test_the_standards_fp8_belongs_to_trn3(target: str, rules: list[str]) -> None:
    eights = kind(DType.FLOAT8_E4M3FN, 4)
    assert [finding.rule.id for finding in found(Flip((0,)), eights, target=target)] == rules


def looked_up(make: Callable[[GraphBuilder, Value], Value], *, rows: int = 10) -> list[Finding]:
    """A lookup in a table of rows, at places made from a mask of eight tokens."""
    builder = GraphBuilder()
    mask = builder.input("attention_mask", kind(DType.INT64, 8))
    table = builder.parameter("table", kind(DType.FLOAT32, rows, 2))
    builder.output("y", builder.add(Gather(0), table, make(builder, mask)))
    return list(lookups_outside(builder.build()))


def counted(builder: GraphBuilder, mask: Value) -> Value:
    return builder.add(Cumulate("cumsum", 0), mask)


@pytest.mark.parametrize(("rows", "worst"), [(8, 8), (7, 8), (9, None), (100, None)])
def test_counted_positions_are_followed_to_their_table(rows: int, worst: int | None) -> None:
    said = [finding.message for finding in looked_up(counted, rows=rows)]
    assert said == ([] if worst is None else [f"a lookup reads row {worst} of a table with {rows} rows"])


def test_a_constant_place_behind_the_table_is_found() -> None:
    def fixed(builder: GraphBuilder, _: Value) -> Value:
        return builder.constant(np.array([0, 10]), DType.INT64)

    assert [finding.rule.id for finding in looked_up(fixed)] == ["NXC-204"]


def test_of_what_is_not_known_nothing_is_claimed() -> None:
    def unknown(builder: GraphBuilder, mask: Value) -> Value:
        return builder.add(Binary("add"), builder.input("input_ids", kind(DType.INT64, 8)), counted(builder, mask))

    assert not looked_up(unknown, rows=1)


def test_a_negative_place_counts_from_the_end_where_the_operator_lets_it() -> None:
    def last(dtype: DType, operator: Operator) -> list[Finding]:
        builder = GraphBuilder()
        place = builder.constant(np.array([-1]), dtype)
        table = builder.parameter("table", kind(DType.FLOAT32, 4, 2))
        builder.output("y", builder.add(operator, table, place))
        return list(lookups_outside(builder.build()))

    assert not last(DType.INT64, Index((0,)))
    assert [finding.rule.id for finding in last(DType.INT64, Gather(0))] == ["NXC-204"]
