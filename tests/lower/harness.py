"""One graph two ways: `emulator.fast`, and the program that `lower` writes on the emulated core; and how far apart the
two may be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.legality import check
from nxpipe.emulator.isa.program import RANK, Program, Role
from nxpipe.emulator.lower import lower
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import Operator
from nxpipe.emulator.run.fast import degree_of, execute
from tests.emulator.divided_models import execute_ranks

CORES = ("v2", "v3")
ORDERS = ("hostile", "random:7")

# Mantissa bits of each type, without the leading one.
_MANTISSA = {
    DType.FLOAT32: 23,
    DType.TFLOAT32: 10,
    DType.BFLOAT16: 7,
    DType.FLOAT16: 10,
    DType.FLOAT8_E5M2: 2,
    DType.FLOAT8_E4M3: 3,
    DType.FLOAT8_E4M3FN: 3,
}
_LOWEST = {DType.FLOAT16: -14, DType.FLOAT8_E5M2: -14, DType.FLOAT8_E4M3: -6, DType.FLOAT8_E4M3FN: -6}


@dataclass(frozen=True)
class Given:
    """An input tensor of a graph: numbers, the graph's type, and the role."""

    data: Array
    dtype: DType
    role: Role = Role.INPUT

    @property
    def type(self) -> TensorType:
        return TensorType(self.data.shape, self.dtype)


@dataclass(frozen=True)
class Case:
    """A graph with its inputs and parameters."""

    graph: Graph
    parameters: Mapping[str, Array] = field(default_factory=dict)
    inputs: Mapping[str, Array] = field(default_factory=dict)


Build = Callable[..., Value | Mapping[str, Value]]


def case(build: Build, *given: Given) -> Case:
    """A graph of `build(builder, *values)`, whose result is the output, or several by name."""
    builder = GraphBuilder()
    values: list[Value] = []
    tensors: dict[Role, dict[str, Array]] = {Role.INPUT: {}, Role.PARAMETER: {}}
    for number, item in enumerate(given):
        name = f"{item.role}{number}"
        if item.role is Role.CONSTANT:
            values.append(builder.constant(item.data, item.dtype))
            continue
        declare = builder.input if item.role is Role.INPUT else builder.parameter
        values.append(declare(name, item.type))
        tensors[item.role][name] = item.data
    made = build(builder, *values)
    for name, value in (made if isinstance(made, Mapping) else {"result": made}).items():
        builder.output(name, value)
    return Case(builder.build(), tensors[Role.PARAMETER], tensors[Role.INPUT])


def of(op: Operator, *given: Given) -> Case:
    """A graph of one node."""
    return case(lambda builder, *values: builder.add(op, *values), *given)


def floats(*shape: int, dtype: DType = DType.FLOAT32, seed: int = 0, role: Role = Role.INPUT) -> Given:
    return Given(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), dtype, role)


def wholes(*shape: int, dtype: DType = DType.FLOAT32, seed: int = 0, most: int = 3, role: Role = Role.INPUT) -> Given:
    """Small whole numbers, whose products and sums are exact in any order."""
    numbers = np.random.default_rng(seed).integers(-most, most + 1, shape)
    return Given(numbers.astype(np.float32 if dtype.is_float else dtype.held), dtype, role)


def truths(*shape: int, seed: int = 0, role: Role = Role.INPUT) -> Given:
    return Given(np.random.default_rng(seed).random(shape) < 0.6, DType.BOOL, role)


def run(program: Program, of: Case, order: str = "hostile") -> dict[str, Array]:
    """The outputs of the core by name, or of all cores, which must agree."""
    machine = Machine(program, order=order)
    for name, array in {**of.parameters, **of.inputs}.items():
        machine.write(name, array)
    if any(RANK in buffer.names for buffer in program.buffers):
        for rank in range(program.ranks):
            machine.write(RANK, np.array([rank]), rank)
    machine.execute()
    first, *others = ({name: machine.read(name, rank) for name in of.graph.outputs} for rank in range(program.ranks))
    for other in others:
        assert all(np.array_equal(first[name], other[name], equal_nan=True) for name in first)
    return first


def require_equal(
    of: Case, *, units: float = 0, noise: float = 0, cores: Sequence[str] = CORES, orders: Sequence[str] = ORDERS
) -> None:
    """The core's answers are those of `fast` to the bit; or at most `units` of the last place of their type away from
    them, and `noise`, which is what sums of float32 in another order differ by. A graph for several ranks is run on so
    many cores."""
    degree = degree_of(of.graph)
    expected = (execute if degree == 1 else execute_ranks)(of.graph, of.parameters, of.inputs)
    for core in cores:
        program = lower(of.graph, core, degree)
        check(program)
        answers = [run(program, of, order) for order in orders]
        for name, value in of.graph.outputs.items():
            first = answers[0][name]
            for other, order in zip(answers[1:], orders[1:], strict=True):
                assert np.array_equal(first, other[name], equal_nan=True), f"{name} on {core}: order {order} shows"
            require_close(f"{name} on {core}", value.type.dtype, first, expected[name], units, noise)


def require_close(where: str, dtype: DType, found: Array, expected: Array, units: float, noise: float) -> None:
    assert found.shape == expected.shape, f"{where} is {found.shape}, not {expected.shape}"
    if not dtype.is_float:
        assert np.array_equal(found.astype(expected.dtype), expected), where
        return
    with np.errstate(all="ignore"):
        same = (found == expected) | (np.isnan(found) & np.isnan(expected))
        apart = np.where(same, 0, np.abs(found.astype(np.float64) - expected))
    allowed = units * unit(expected, dtype) + noise
    worst = np.argmax(np.where(np.isnan(apart), np.inf, apart - allowed)) if apart.size else 0
    assert bool((apart <= allowed).all()), (
        f"{where}: {np.count_nonzero(~(apart <= allowed))} of {found.size} elements differ by more than they may; "
        f"the worst is {found.flat[worst]!r} for {expected.flat[worst]!r}"
    )


def unit(numbers: Array, dtype: DType) -> Array:
    """The unit in the last place of each number of a type."""
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(np.abs(numbers).astype(np.float64))
    lowest = _LOWEST.get(dtype, -126)
    return np.asarray(np.ldexp(1.0, np.maximum(exponent - 1, lowest) - _MANTISSA[dtype]))
