"""A matmul whose results only other matmuls read keeps them in SBUF, with the columns on the partitions: the numbers
are those of `fast`, and nothing of them is in HBM."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.program import Role, instructions
from nxpipe.emulator.lower import lower
from nxpipe.emulator.ops import Binary, Cast, LayerNorm, Linear, Unary
from tests.lower.harness import Case, Given, case, floats, require_equal, wholes

F32, BF16 = DType.FLOAT32, DType.BFLOAT16


def _mlp(
    rows: int, sizes: tuple[int, int, int], types: tuple[DType, DType], function: str, *, gated: bool, bias: bool
) -> Case:
    """Numbers are whole, so that sums are exact in any order; no function but relu and abs keeps them whole."""
    (inputs, hidden, outputs), (dtype, out) = sizes, types

    def build(builder: GraphBuilder, x: Value, up: Value, gate: Value, down: Value, shift: Value, more: Value) -> Value:
        own = [shift] if bias else []
        value = builder.add(Unary(function), builder.add(Linear(out), x, up, *own))
        if gated:
            value = builder.add(Binary("multiply"), value, builder.add(Linear(out), x, gate, *own))
        if out is not dtype:
            value = builder.add(Cast(dtype), value)
        return builder.add(Binary("add"), builder.add(Linear(F32), value, down), more)

    return case(
        build,
        wholes(rows, inputs, dtype=dtype, most=1),
        wholes(hidden, inputs, dtype=dtype, most=1, seed=1, role=Role.PARAMETER),
        wholes(hidden, inputs, dtype=dtype, most=1, seed=2, role=Role.PARAMETER),
        wholes(outputs, hidden, dtype=dtype, most=1, seed=3, role=Role.PARAMETER),
        wholes(hidden, dtype=out, seed=4, role=Role.PARAMETER),
        wholes(rows, outputs, seed=5),
    )


@settings(max_examples=6)
@given(
    st.sampled_from([1, 7, 128, 300, 600, 1100]),
    st.tuples(st.integers(1, 400), st.integers(1, 700), st.integers(1, 200)),
    st.sampled_from([(BF16, F32), (BF16, BF16), (F32, F32), (DType.FLOAT16, F32), (BF16, DType.FLOAT16)]),
    st.sampled_from(["relu", "abs", "negate", "ceil"]),
    st.booleans(),
    st.booleans(),
)
def test_chained_matmuls_are_what_fast_makes_of_them(
    rows: int, sizes: tuple[int, int, int], types: tuple[DType, DType], function: str, gated: bool, bias: bool
) -> None:
    require_equal(_mlp(rows, sizes, types, function, gated=gated, bias=bias), cores=("v2",), orders=("hostile",))


@pytest.mark.parametrize("core", ["v2", "v3", "v4"])
@pytest.mark.parametrize("gated", [False, True])
def test_what_only_the_next_matmul_reads_is_not_stored_and_not_transposed(core: str, *, gated: bool) -> None:
    mlp = _mlp(40, (256, 384, 128), (BF16, F32), "relu", gated=gated, bias=not gated)
    require_equal(mlp, cores=(core,))
    program = lower(mlp.graph, core)
    assert not [buffer for buffer in program.buffers if buffer.role is Role.SCRATCH and buffer.elements >= 40 * 384]
    transposes = [step for step in instructions(program.body) if step.name == "nc_transpose" and step.dst.elements > 32]
    assert len(transposes) <= 2  # of the rows


@pytest.mark.parametrize("out", [F32, BF16])
def test_an_mlp_of_reals_after_a_norm_is_within_its_bound(out: DType) -> None:
    """The residual is the norm's own result, which the kernel stores before it adds it."""

    def build(builder: GraphBuilder, x: Value, scale: Value, up: Value, down: Value, shift: Value) -> Value:
        normal = builder.add(LayerNorm(1, 1e-5), x, scale, scale)
        rows = builder.add(Cast(BF16), normal)
        hidden = builder.add(Cast(BF16), builder.add(Unary("gelu"), builder.add(Linear(out), rows, up, shift)))
        return builder.add(Binary("add"), builder.add(Linear(F32), hidden, down), normal)

    weights = (floats(300, 192, seed=1).data / 16, floats(192, 300, seed=2).data / 16)
    up, down = (Given(array.astype(np.float32), BF16, Role.PARAMETER) for array in weights)
    shift = floats(300, seed=3, dtype=out, role=Role.PARAMETER)
    mlp = case(build, floats(150, 192), floats(192, seed=4, role=Role.PARAMETER), up, down, shift)
    require_equal(mlp, units=1, noise=2e-2)


def test_infinities_in_a_row_stay_in_that_row() -> None:
    mlp = _mlp(5, (256, 300, 64), (BF16, F32), "relu", gated=False, bias=True)
    x = np.array(mlp.inputs["input0"])
    x[3, 7] = np.inf
    bias = np.array(mlp.parameters["parameter4"])
    bias[130] = np.inf
    changed = Case(mlp.graph, {**mlp.parameters, "parameter4": bias}, {**mlp.inputs, "input0": x})
    require_equal(changed, cores=("v3",))
