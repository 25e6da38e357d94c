"""Probe of an assumption: one small module, its inputs and expected outputs on each rank, and the features it uses.

Modules are written by the emission of graphs (`module_of`) or by its writer, and are in canonical form; a variant
changes one thing in the proto. Arrays are in the types of the device. Equal probes have equal bytes everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np

from nxpipe.emulator.executable.interface import RANK, Argument, Interface, Result, stored
from nxpipe.emulator.hlo.canonical import canonical
from nxpipe.emulator.hlo.constraints import TARGETS, CheckedModule, HloLimits
from nxpipe.emulator.hlo.module import argument_tensor, module_of, text_of
from nxpipe.emulator.hlo.schema import HloModule
from nxpipe.emulator.hlo.wire import Message
from nxpipe.emulator.hlo.writer import ELEMENTS, HloWriter, Tensor
from nxpipe.emulator.hlo.xla import proto_of
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.fast import execute

Arrays: TypeAlias = Mapping[str, Array]  # by the name of the input or output
Emit: TypeAlias = Callable[[HloWriter, Sequence[Tensor]], Tensor | Sequence[Tensor]]
Expect: TypeAlias = Callable[..., Any]  # the outputs, from the inputs

# Every probe needs these: the simplest module, its f32 tensors, its opcode. They have one probe.
BASE: Final = ("base", "opcode add", "type f32")
NAMES: Final = ("names of inputs", "names of outputs")
LOGICAL_CORE: Final = "logical core of two"
_IN_EVERY_MODULE: Final = frozenset(["parameter", "tuple", "get-tuple-element"])
_DTYPES: Final = {dtype.stored: dtype for dtype in reversed(DType) if dtype is not DType.TFLOAT32}


@dataclass(frozen=True)
class Probe:
    """A module that compiles, runs and agrees if its one assumption holds.

    A *question* is about a form that nxpipe does not write: its failure breaks no assumption, its success permits the
    form. `breaks` is the rule of `constraints` that a question's module breaks on purpose.

    `physical_cores` are those of the logical core that it is compiled for (LNC); the runtime's logical cores have
    `runtime_cores`, the same number unless it is set.
    """

    name: str
    assumption: str
    fallback: str
    module: bytes
    interface: Interface
    inputs: tuple[Arrays, ...]  # of each rank
    outputs: tuple[Arrays, ...]  # of each rank, after the last run
    tolerance: float = 0.0  # of a difference, as a part of the output's largest number
    runs: int = 1
    proves: tuple[str, ...] = ()  # the features whose probe it is
    keeps_names: bool = False  # whether it agrees only if the NEFF has the module's names
    is_question: bool = False
    breaks: str = ""
    physical_cores: int = 1
    runtime_cores: int | None = None
    twin: bytes = b""  # a module of plain opcodes that computes the same, for a machine without the custom call

    @property
    def world(self) -> int:
        return self.interface.degree

    @property
    def aliases(self) -> dict[str, str]:
        """The input of each output that replaces it."""
        results = self.interface.results
        return {results[a.alias].name: a.name for a in self.interface.arguments if a.alias is not None}

    @cached_property
    def features(self) -> frozenset[str]:
        """What the module uses, each a possible cause of a failure: opcodes, types, and forms of the interface."""
        checked = CheckedModule(HloModule.read(self.module), TARGETS[0], HloLimits())
        instructions = [each for _, each in checked.each()]
        found = {f"opcode {each.opcode}" for each in instructions if each.opcode not in _IN_EVERY_MODULE}
        found |= {f"type {shape.element_type}" for each in instructions for shape in each.shape.arrays()}
        found |= {f"scatter {checked.combiner(each)}" for _, each in checked.each("scatter")} - {"scatter parameter"}
        forms = {
            "aliases": bool(self.aliases),
            "ranks": self.world > 1,
            "own rank": any(each.name == RANK for each in self.interface.arguments),
            "outputs": len(self.interface.results) > 1,
            LOGICAL_CORE: self.physical_cores > 1,
            **dict.fromkeys(NAMES, self.keeps_names),
        }
        return frozenset({*BASE, *found, *self.proves, *(name for name, used in forms.items() if used)})

    def distance(self, rank: int, found: Arrays) -> float:
        """The largest difference of a rank's outputs, as a part of the output's largest number; inf for another NaN."""
        return max(_distance(found[name], array) for name, array in self.outputs[rank].items())


def _distance(found: Array, expected: Array) -> float:
    if found.tobytes() == expected.tobytes():
        return 0.0
    with np.errstate(all="ignore"):
        a, b = (array.astype(np.float64) for array in (found, expected))
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
        scale = float(np.max(np.abs(b), where=np.isfinite(b), initial=0)) or 1.0
    return float(np.max(np.where(np.isnan(apart), np.inf, apart))) / scale


def written(
    name: str,
    assumption: str,
    fallback: str,
    inputs: Mapping[str, Any],
    emit: Emit,
    expect: Expect,
    *,
    world: int = 1,
    outputs: Sequence[str] = ("y",),
    aliases: Mapping[str, int] | None = None,
    runs: int = 1,
    **others: Any,
) -> Probe:
    """A probe by the writer. `emit` takes the arguments, `expect` their arrays. With several ranks, an input has an
    array for each rank, and `expect` takes the arrays of all ranks and returns the outputs of each."""
    by_rank = [
        {key: np.asarray(value[rank] if world > 1 else value) for key, value in inputs.items()} for rank in range(world)
    ]
    numbers = aliases or {}
    arguments = tuple(_argument(key, array, numbers.get(key)) for key, array in by_rank[0].items())
    writer = HloWriter()
    tensors = _list(emit(writer, [argument_tensor(number, each.type) for number, each in enumerate(arguments)]))
    expected = _expected(expect, by_rank, outputs, numbers, runs)
    results = tuple(Result(key, _type(array)) for key, array in expected[0].items())
    assert [(each.shape, each.numpy) for each in tensors] == [
        (each.shape, each.dtype) for each in expected[0].values()
    ], name
    module = canonical(proto_of(text_of(arguments, writer, tensors)), output_names=outputs)
    interface = Interface(world, arguments, results)
    return Probe(name, assumption, fallback, module, interface, tuple(by_rank), expected, runs=runs, **others)


def _expected(
    expect: Expect, by_rank: Sequence[Arrays], names: Sequence[str], aliases: Mapping[str, int], runs: int
) -> tuple[Arrays, ...]:
    """The outputs of each rank after the last run; a state's input is its output of the run before."""
    world, current = len(by_rank), [dict(arrays) for arrays in by_rank]
    for _ in range(runs):
        rows = expect(current) if world > 1 else [_list(expect(*current[0].values()))]
        outputs = [dict(zip(names, map(np.asarray, _list(row)), strict=True)) for row in rows]
        for arrays, own in zip(current, outputs, strict=True):
            arrays |= {key: own[names[number]] for key, number in aliases.items()}
    return tuple(outputs)


def emitted(
    name: str,
    assumption: str,
    fallback: str,
    inputs: Mapping[str, Any],
    build: Callable[..., Value | Sequence[Value]],
    *,
    outputs: Sequence[str] = ("y",),
    **others: Any,
) -> Probe:
    """A probe of operators as graphs emit them; `fast` computes the expected outputs."""
    builder, arrays = GraphBuilder(), {key: np.asarray(value) for key, value in inputs.items()}
    values = [builder.input(key, _type(array)) for key, array in arrays.items()]
    for output, value in zip(outputs, _list(build(builder, *values)), strict=True):
        builder.output(output, value)
    graph = builder.build()
    held = {key: array.astype(_type(array).dtype.held) for key, array in arrays.items()}
    computed = execute(graph, {}, held)
    expected = {key: stored(computed[key], value.type.dtype) for key, value in graph.outputs.items()}
    module = module_of(graph)
    proto = canonical(proto_of(module.text), output_names=outputs)
    given = {each.name: stored(held[each.name], each.type.dtype) for each in module.interface.arguments}
    return Probe(name, assumption, fallback, proto, module.interface, (given,), (expected,), **others)


def called(
    probe: Probe,
    name: str,
    assumption: str,
    fallback: str,
    target: str,
    config: str = "",
    *,
    scalars: Sequence[float] = (),
    **others: Any,
) -> Probe:
    """A question about a custom call, which computes what the probe's module does: that is its twin. `scalars` are
    further operands of the call, in float32."""
    writer, arguments, results = HloWriter(), probe.interface.arguments, probe.interface.results
    operands = [argument_tensor(number, each.type) for number, each in enumerate(arguments)]
    operands += [writer.scalar(number, "f32") for number in scalars]
    types = [(each.type.shape, ELEMENTS[each.type.dtype]) for each in results]
    tensors = writer.custom_call(target, operands, types, config)
    module = canonical(proto_of(text_of(arguments, writer, tensors)), output_names=[each.name for each in results])
    fields = {"is_question": True, "proves": (), "module": module, "twin": probe.module, **others}
    return replace(probe, name=name, assumption=assumption, fallback=fallback, **fields)


def changed(
    probe: Probe, name: str, assumption: str, fallback: str, change: Callable[[Message], None], **others: Any
) -> Probe:
    """A question about a variant: the probe's module with one change of its proto."""
    proto = Message.parse(probe.module)
    change(proto)
    fields = {"is_question": True, "proves": (), **others}
    return replace(probe, name=name, assumption=assumption, fallback=fallback, module=proto.encode(), **fields)


def _list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def _argument(name: str, array: Array, alias: int | None) -> Argument:
    role = Role.INPUT if alias is None else Role.STATE
    return Argument(name, role, _type(array), _type(array), alias=alias)


def _type(array: Array) -> TensorType:
    return TensorType(array.shape, _DTYPES[array.dtype])


BF16: Final = np.dtype(ml_dtypes.bfloat16)
F8E5M2: Final = np.dtype(ml_dtypes.float8_e5m2)
F8E4M3: Final = np.dtype(ml_dtypes.float8_e4m3)
F8E4M3FN: Final = np.dtype(ml_dtypes.float8_e4m3fn)

EXACT, ROUNDED, FUNCTION, NARROW = 0.0, 1e-6, 2e-3, 1e-2  # tolerances: of bits, of a sum, of a table, of bfloat16
NO_OTHER: Final = "none; models that need it stay on the emulator's back end"

X: Final = ((np.arange(32) - 15.5) / 8).astype(np.float32).reshape(4, 8)  # both signs, no zero
Y: Final = ((np.arange(32) * 7 % 32 + 1) / 16).astype(np.float32).reshape(4, 8)  # positive
N: Final = (np.arange(32) * 5 % 23 - 9).astype(np.int32).reshape(4, 8)
WIDE: Final = (np.arange(32) * 66_000_001 + 16_777_217).astype(np.int32).reshape(4, 8)  # odd, above 2^24
