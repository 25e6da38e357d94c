"""Assumptions about neuronx-cc and the runtime: a probe for each opcode, type, interface and collective of emissions.

A name is GROUP/SUBJECT. `opcode`, `type`, `value` and `operator` are about what modules compute; `output`, `alias`,
`name`, `size` and `core` about their interface, and `rank` about collectives: those are `interface_assumptions`. `form`
is about the proto. A fallback says what nxpipe can write instead.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, Final

import numpy as np

from nxpipe.emulator import ops
from nxpipe.emulator.hlo.interface_assumptions import interfaces, ranks, replaced
from nxpipe.emulator.hlo.probe import (
    BASE,
    BF16,
    EXACT,
    F8E4M3,
    F8E5M2,
    FUNCTION,
    NARROW,
    NO_OTHER,
    ROUNDED,
    WIDE,
    Emit,
    Expect,
    N,
    Probe,
    X,
    Y,
    emitted,
    written,
)
from nxpipe.emulator.hlo.reductions import LONGEST_COUNTED
from nxpipe.emulator.hlo.writer import HloWriter, Tensor
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array

_COMPOSED: Final = "compose it of opcodes that compile"
_HOST: Final = "compute it on the host and pass it as an input"
_ONE_HOT: Final = "multiply with a one-hot matrix and select"
_MASKED: Final = "select with arithmetic on masks of 0 and 1"

BITS: Final = (np.arange(32) * 134_217_689).astype(np.uint32).reshape(4, 8)


@cache
def assumptions() -> tuple[Probe, ...]:
    """The probes of what nxpipe writes, in the order of their run: causes before consequences."""
    parts = (
        _base,
        _elementwise,
        _movement,
        _computed_movement,
        _contractions,
        _types,
        _values,
        interfaces,
        ranks,
        _operators,
    )
    return tuple(probe for part in parts for probe in part())


def _base() -> Iterator[Probe]:
    yield written(
        *("form/canonical", "a module in canonical form compiles and runs, with f32 by rows, not cast", NO_OTHER),
        *({"x": X / np.float32(3), "z": Y / np.float32(7)}, lambda w, t: w.binary("add", *t), np.add),
        tolerance=ROUNDED,
        proves=BASE,
    )


# Opcodes --------------------------------------------------------------------------------------------------------------


def _opcode(
    opcode: str,
    fallback: str,
    inputs: Sequence[Array],
    emit: Emit,
    expect: Expect,
    tolerance: float = EXACT,
    also: tuple[str, ...] = (),
) -> Probe:
    """The probe of an opcode by its name in HLO."""
    named = dict(zip("xzuv", inputs, strict=False))
    assumption = f"the compiler supports `{opcode}` as XLA defines it"
    proves = (f"opcode {opcode}", *also)
    return written(f"opcode/{opcode}", assumption, fallback, named, emit, expect, tolerance=tolerance, proves=proves)


def _elementwise() -> Iterator[Probe]:
    yield from _opcodes_of_the_interface()
    of_one: list[tuple[str, Array, Any, float, str]] = [
        ("abs", X, np.abs, EXACT, "emit maximum(x, -x)"),
        ("ceil", X, np.ceil, EXACT, "emit -floor(-x)"),
        ("cosine", X, np.cos, FUNCTION, _COMPOSED),
        ("exponential", X, np.exp, FUNCTION, NO_OTHER),
        ("floor", X, np.floor, EXACT, "truncate by a conversion to s32 and correct negative numbers"),
        ("log", Y, np.log, FUNCTION, NO_OTHER),
        ("negate", X, np.negative, EXACT, "emit 0 - x"),
        ("not", N, np.invert, EXACT, "emit xor with all ones"),
        ("sine", X, np.sin, FUNCTION, _COMPOSED),
        ("sqrt", Y, np.sqrt, FUNCTION, "emit power(x, 0.5)"),
        ("tanh", X, np.tanh, FUNCTION, "compose it of exponential and divide"),
    ]
    for opcode, x, function, tolerance, fallback in of_one:
        yield _opcode(opcode, fallback, [x], unary(opcode), function, tolerance)
    of_two: list[tuple[str, Array, Array, Any, float, str]] = [
        ("and", N, N[::-1], np.bitwise_and, EXACT, _COMPOSED),
        ("atan2", X, Y, np.arctan2, FUNCTION, "compose it of a polynomial and select"),
        ("divide", X, Y, np.divide, FUNCTION, "multiply by power(x, -1)"),
        ("maximum", X, X[::-1], np.maximum, EXACT, "emit compare and select"),
        ("minimum", X, X[::-1], np.minimum, EXACT, "emit compare and select"),
        ("multiply", X, Y, np.multiply, ROUNDED, NO_OTHER),
        ("or", N, N[::-1], np.bitwise_or, EXACT, _COMPOSED),
        ("power", Y, X, np.power, FUNCTION, "compose it of log and exponential"),
        ("remainder", X, Y, np.fmod, FUNCTION, "compose it of divide, floor and multiply"),
        ("subtract", X, Y, np.subtract, ROUNDED, "add the negated operand"),
        ("xor", N, N[::-1], np.bitwise_xor, EXACT, _COMPOSED),
    ]
    for opcode, x, z, function, tolerance, fallback in of_two:
        yield _opcode(opcode, fallback, [x, z], _binary(opcode), function, tolerance)
    yield _opcode(
        *("shift-right-logical", "divide by powers of two", [BITS]),
        *(
            lambda w, t: w.binary("shift_right_logical", t[0], w.filled(13, (4, 8), "ui32")),
            lambda x: x >> np.uint32(13),
        ),
    )
    yield _opcode(
        *("select", _MASKED, [X, Y]),
        *(lambda w, t: w.select(w.compare("GT", *t), *t), lambda x, z: np.where(x > z, x, z)),
    )
    yield _opcode(
        *("bitcast-convert", _HOST, [X]),
        *(lambda w, t: w.bitcast(t[0], (4, 8), "ui32"), lambda x: x.view(np.uint32)),
    )


def unary(opcode: str) -> Emit:
    return lambda w, t: w.unary(opcode, t[0])


def _binary(opcode: str) -> Emit:
    return lambda w, t: w.binary(opcode, *t)


def _opcodes_of_the_interface() -> Iterator[Probe]:
    """Those that the probes of others need."""
    yield _opcode("convert", NO_OTHER, [N], lambda w, t: w.convert(t[0], "f32"), lambda x: x.astype(np.float32))
    table = X[::-1] * 3
    yield _opcode(
        *("constant", "pass tables as inputs", [X]),
        *(lambda w, t: w.binary("add", t[0], w.table(table, "f32")), lambda x: x + table, ROUNDED),
    )
    yield _opcode(
        *("broadcast", NO_OTHER, [X[0]]),
        *(lambda w, t: w.broadcast(t[0], (4, 8), (1,)), lambda x: np.broadcast_to(x, (4, 8)).copy()),
    )
    yield _opcode(
        *("compare", _MASKED, [X, Y]),
        *(lambda w, t: w.convert(w.compare("LT", *t), "f32"), lambda x, z: (x < z).astype(np.float32)),
        also=("type pred",),
    )


def _movement() -> Iterator[Probe]:
    yield _opcode("copy", "add zero", [X], lambda w, t: w.copy(t[0]), lambda x: x)
    yield _opcode("reshape", NO_OTHER, [X], lambda w, t: w.reshape(t[0], (2, 16)), lambda x: x.reshape(2, 16))
    yield _opcode(
        "transpose",
        "multiply with an identity matrix",
        [X],
        lambda w, t: w.transpose(t[0], (1, 0)),
        lambda x: x.T.copy(),
    )
    yield _opcode(
        "slice",
        "gather with constant indices",
        [X],
        lambda w, t: w.slice(t[0], (1, 0), (4, 7), (1, 3)),
        lambda x: x[1:4, 0:7:3].copy(),
    )
    yield _opcode(
        "concatenate",
        "add padded operands",
        [X, Y],
        lambda w, t: w.concatenate(t, 1),
        lambda x, z: np.concatenate([x, z], 1),
    )
    yield _opcode(
        "reverse", "gather with constant indices", [X], lambda w, t: w.reverse(t[0], (1,)), lambda x: x[:, ::-1].copy()
    )
    yield _opcode(
        "pad",
        "concatenate with constants",
        [X],
        lambda w, t: w.pad(t[0], 7.0, (1, 0), (0, 2)),
        lambda x: np.pad(x, ((1, 0), (0, 2)), constant_values=7),
    )
    yield _opcode(
        *("iota", "write the numbers as a constant", [N]),
        *(lambda w, t: w.binary("add", t[0], w.iota((4, 8), 1, "i32")), lambda x: x + np.arange(8, dtype=np.int32)),
    )


def _computed_movement() -> Iterator[Probe]:
    """To and from places that are computed, or updated."""
    one_dimensional = np.array([[3], [0], [2]], np.int32)
    yield _opcode(
        *("dynamic-slice", "gather with computed indices", [X, np.array([2], np.int32)]),
        *(lambda w, t: w.dynamic_slice(t[0], 0, w.reshape(t[1], ()), 2), lambda x, z: x[z[0] : z[0] + 2].copy()),
    )
    yield _opcode(
        *("dynamic-update-slice", "concatenate the parts around the update", [X, Y[:2, :3]]),
        *(lambda w, t: w.update_slice(t[0], t[1], (1, 4)), lambda x, z: replaced(x, (slice(1, 3), slice(4, 7)), z)),
    )
    yield _opcode(
        *("gather", "multiply with a one-hot matrix", [X, one_dimensional]),
        *(lambda w, t: w.gather(*t, (0,), 0), lambda x, z: x[z[:, 0]]),
    )
    yield _opcode(
        *("scatter", _ONE_HOT, [X, one_dimensional, Y[:3]]),
        *(lambda w, t: w.scatter(*t, (0,), 0), lambda x, z, u: replaced(x, z[:, 0], u)),
    )
    for function in (np.add, np.maximum, np.minimum, np.multiply):
        opcode = function.__name__
        yield written(
            *(f"opcode/scatter-{opcode}", f"`scatter` of floats combines updates by `{opcode}`", _ONE_HOT),
            *({"x": X, "z": np.array([[3], [0], [3]], np.int32), "u": Y[:3]}, partial(scattered, opcode)),
            partial(combined, function),
            tolerance=ROUNDED,
            proves=(f"scatter {opcode}",),
        )


def scattered(opcode: str, w: HloWriter, t: Sequence[Tensor]) -> Tensor:
    x, places, updates = t
    return w.scatter(x, places, updates, (0,), 0, opcode)


def combined(function: Any, x: Array, places: Array, updates: Array) -> Array:
    result = x.copy()
    function.at(result, places[:, 0], updates)
    return result


def _contractions() -> Iterator[Probe]:
    lhs, rhs = X.reshape(1, 4, 8), Y.reshape(1, 8, 4)
    yield _opcode(
        *("dot", NO_OTHER, [lhs, rhs]),
        *(lambda w, t: w.dot(*t, ((0,), (0,)), (2, 1)), np.matmul, FUNCTION),
    )
    yield written(
        *("operator/dot-bf16", "a product of bf16 has an f32 result, summed in f32", "convert the operands to f32"),
        *({"x": lhs.astype(BF16), "z": rhs.astype(BF16)}, lambda w, t: w.dot(*t, ((0,), (0,)), (2, 1))),
        *(lambda x, z: np.matmul(x.astype(np.float32), z.astype(np.float32)),),
        tolerance=FUNCTION,
    )
    image, kernel = (
        (np.arange(50) % 7 - 3).astype(np.float32).reshape(1, 2, 5, 5),
        Y.reshape(-1)[:24].reshape(3, 2, 2, 2),
    )
    yield _opcode(
        *("convolution", "gather the windows and multiply matrices", [image, kernel]),
        *(lambda w, t: w.convolution(*t, (4, 4), (1, 1), (1, 1), 1), _convolution, FUNCTION),
    )
    folds = [
        ("add", np.sum, 0.0),
        ("maximum", np.max, -np.inf),
        ("minimum", np.min, np.inf),
        ("multiply", np.prod, 1.0),
    ]
    for opcode, function, initial in folds:
        emit = partial(_reduction, opcode, initial)
        expect = partial(_folded, function)
        assumption = f"`reduce` folds one axis by `{opcode}`"
        proves = ("opcode reduce",) if opcode == "add" else ()
        name = "opcode/reduce" if opcode == "add" else f"opcode/reduce-{opcode}"
        yield written(
            *(name, assumption, "fold halves of the axis by elementwise opcodes", {"x": X}, emit, expect),
            tolerance=FUNCTION,
            proves=proves,
        )


def _reduction(opcode: str, initial: float, w: HloWriter, t: Sequence[Tensor]) -> Tensor:
    return w.reduce(opcode, t[0], (1,), initial)


def _folded(function: Any, x: Array) -> Array:
    return np.asarray(function(x, axis=1), np.float32)


def _convolution(x: Array, kernel: Array) -> Array:
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 2), (2, 3))
    return np.asarray(np.einsum("bchwij,ocij->bohw", windows, kernel), np.float32)


# Types and values -----------------------------------------------------------------------------------------------------


def _types() -> Iterator[Probe]:
    narrow: list[tuple[str, str, np.dtype[Any], Array, str]] = [
        ("bf16", "bf16", BF16, X, "compute in f32"),
        ("f16", "f16", np.dtype(np.float16), X, "use bf16 or f32"),
        ("f8e5m2", "f8E5M2", F8E5M2, X, "store these weights as bf16"),
        ("f8e4m3", "f8E4M3", F8E4M3, X, "store these weights as bf16"),
        ("u8", "ui8", np.dtype(np.uint8), N + 9, "pass truth values as s32"),
        ("s8", "i8", np.dtype(np.int8), N, "use s32"),
        ("u16", "ui16", np.dtype(np.uint16), N + 9, "use u32"),
        ("s16", "i16", np.dtype(np.int16), N, "use s32"),
    ]
    for name, _, dtype, values, fallback in narrow:
        assumption = f"an input of {name} is converted to f32"
        yield _convert(
            f"type/{name}", assumption, fallback, values.astype(dtype), "f32", np.dtype(np.float32), (f"type {name}",)
        )
    for name, element, dtype, values, fallback in narrow:
        assumption = f"f32 is converted to an output of {name}, to the nearest and ties to even"
        given = values.astype(np.float32) * (1.0009765625 if dtype.kind == "f" and dtype.itemsize > 1 else 1)
        yield _convert(f"type/{name}-result", assumption, fallback, given.astype(np.float32), element, dtype)
    integers = [("s32", WIDE, "i32"), ("u32", BITS, "ui32")]
    for name, values, _ in integers:
        assumption = f"{name} has all 32 bits, in the interface and in sums, which wrap"
        yield written(
            *(f"type/{name}", assumption, "split large integers into two of 16 bits", {"x": values}),
            *(lambda w, t: w.binary("add", t[0], t[0]), lambda x: x + x),
            proves=(f"type {name}",),
        )
    yield emitted(
        *("type/bool", "truth values are bytes in the interface, 0 and 1", "pass truth values as s32"),
        *({"x": N % 2 == 0, "z": N > 0}, lambda b, x, z: b.add(ops.Binary("and"), x, z)),
    )
    yield emitted(
        *("type/s64", "64-bit integers of a model fit into s32", "split large integers into two of 16 bits"),
        *({"x": N.astype(np.int64), "z": WIDE.astype(np.int64)}, lambda b, x, z: b.add(ops.Binary("subtract"), z, x)),
    )


def _convert(
    name: str, assumption: str, fallback: str, x: Array, element: str, dtype: np.dtype[Any], proves: Sequence[str] = ()
) -> Probe:
    return written(
        *(name, assumption, fallback, {"x": x}, lambda w, t: w.convert(t[0], element), lambda x: x.astype(dtype)),
        proves=tuple(proves),
    )


def _values() -> Iterator[Probe]:
    special = np.array([np.nan, np.inf, -np.inf, 1.0, -0.0, np.nan, 2.0, 3.0], np.float32)
    other = np.array([1.0, 1.0, 1.0, np.nan, 0.0, np.nan, 2.0, 4.0], np.float32)
    yield written(
        *("value/nan-comparison", "comparisons with NaN are false, and 0 equals -0", "test for NaN by bits"),
        *({"x": special, "z": other}, lambda w, t: w.convert(w.compare("LE", *t), "f32")),
        *(lambda x, z: (x <= z).astype(np.float32),),
    )
    yield written(
        *(
            "value/infinity",
            "infinities and NaN pass through an input, a select and an output",
            "use the largest number",
        ),
        *({"x": special, "z": other}, lambda w, t: w.select(w.compare("EQ", t[1], t[1]), *t)),
        *(lambda x, z: np.where(z == z, x, z),),
    )
    yield written(
        *("value/integer-division", "`divide` of s32 truncates, exactly", "divide in f32 and correct by one"),
        *({"x": WIDE, "z": np.where(N == 0, 5, N).astype(np.int32)}, lambda w, t: w.binary("divide", *t), _truncated),
    )
    yield written(
        *("value/integer-product", "`multiply` of s32 wraps, exactly", "multiply parts of 16 bits"),
        *({"x": WIDE, "z": N}, lambda w, t: w.binary("multiply", *t), np.multiply),
    )
    yield written(
        *("value/integer-comparison", "`compare` of s32 is exact beyond 2^24", "compare parts of 16 bits"),
        *({"x": WIDE, "z": WIDE + (N > 0)}, lambda w, t: w.convert(w.compare("LT", *t), "f32")),
        *(lambda x, z: (x < z).astype(np.float32),),
    )
    yield emitted(
        *("value/saturation", "a cast of floats to integers truncates, saturates, and makes NaN zero", _HOST),
        *(
            {"x": np.array([np.nan, 1e20, -1e20, 1.9, -1.9, 7.0], np.float32)},
            lambda b, x: b.add(ops.Cast(DType.INT32), x),
        ),
    )


def _truncated(x: Array, z: Array) -> Array:
    return np.trunc(x.astype(np.float64) / z).astype(np.int32)


# Operators of graphs, which are composed of several opcodes -----------------------------------------------------------


def _operators() -> Iterator[Probe]:
    for function in ("erf", "gelu", "gelu_tanh", "sigmoid", "silu", "softplus", "expm1", "tan", "asin"):
        inside = X / 2 if function == "asin" else X
        yield _operator(function, {"x": inside}, ops.Unary(function), FUNCTION)
    for function in ("round", "rsqrt", "logical_not"):
        x = {"round": X * 4, "rsqrt": Y, "logical_not": N > 0}[function]
        yield _operator(function, {"x": x}, ops.Unary(function), FUNCTION)
    bf16 = DType.BFLOAT16
    yield _operator("linear-bf16", {"x": X.astype(BF16), "w": Y.astype(BF16)}, ops.Linear(bf16), NARROW)
    heads = {name: (array / 4).astype(BF16).reshape(2, 2, 8) for name, array in (("q", X), ("k", X[::-1]), ("v", Y))}
    yield _operator("attention", heads, ops.Attention(0.25, True, bf16, bf16), NARROW)
    yield _operator("softmax", {"x": X}, ops.Softmax(1, False), FUNCTION)
    yield _operator("layer-norm", {"x": X, "w": Y[0], "b": X[0]}, ops.LayerNorm(1, 1e-5), FUNCTION)
    yield _operator("rms-norm", {"x": X, "w": Y[0]}, ops.RmsNorm(1, 1e-6), FUNCTION)
    yield _operator("mean", {"x": X}, ops.Reduce("mean", (1,), True), FUNCTION)
    yield _operator("argmax", {"x": Y}, ops.ArgReduce("argmax", 1, False), EXACT)
    yield _operator("cumsum", {"x": X}, ops.Cumulate("cumsum", 1), FUNCTION)
    yield _operator("sort-by-counting", {"x": Y}, ops.ArgSort(1, True), EXACT)
    long = (np.arange(LONGEST_COUNTED + 44)[::-1] * 7 % 300).astype(np.float32)[np.newaxis]
    yield _operator("sort-by-network", {"x": long}, ops.ArgSort(1, False), EXACT)
    yield _operator("where", {"c": N > 0, "x": X, "z": Y}, ops.Where(), EXACT)
    image = (np.arange(50) % 7 - 3).astype(np.float32).reshape(1, 2, 5, 5)
    yield _operator("max-pool", {"x": image}, ops.Pool("max_pool", (2, 2), (1, 1), (0, 0), (0, 0), (1, 1)), EXACT)
    places = (N % 4 + 4) % 4
    yield _operator("take-along", {"x": X, "i": places}, ops.TakeAlong(0), EXACT)
    rows = np.array([3, 0, 2], np.int32)
    yield _operator("index-add", {"x": X, "u": Y[:3], "i": rows}, ops.IndexUpdate((0,), "add"), ROUNDED)
    twice = {"x": WIDE, "u": WIDE[::-1][:3], "i": np.array([3, 0, 3], np.int32)}
    yield _operator("index-add-integers", twice, ops.IndexUpdate((0,), "add"), EXACT)
    yield _operator("index-maximum-integers", twice, ops.IndexUpdate((0,), "maximum"), EXACT)


def _operator(name: str, inputs: dict[str, Array], op: ops.Operator, tolerance: float) -> Probe:
    return emitted(
        *(f"operator/{name}", f"the opcodes that {op.label} is composed of compute it together", _HOST, inputs),
        *(lambda b, *values: b.add(op, *values),),
        tolerance=tolerance,
    )
