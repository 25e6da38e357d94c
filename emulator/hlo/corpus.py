"""Corpus of probes for the first hour on hardware: all assumptions, and questions about forms that are not in use.

An answer to a question permits a simpler emission, or confirms the reason for the present one. docs/hardware.md
describes the run.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, Final

import numpy as np

from nxpipe.emulator import ops
from nxpipe.emulator.hlo.assumptions import assumptions, combined, scattered, unary
from nxpipe.emulator.hlo.interface_assumptions import all_ranks, replaced
from nxpipe.emulator.hlo.probe import (
    BF16,
    F8E4M3FN,
    FUNCTION,
    NARROW,
    ROUNDED,
    WIDE,
    Emit,
    Expect,
    N,
    Probe,
    X,
    Y,
    called,
    changed,
    emitted,
    written,
)
from nxpipe.emulator.hlo.schema import (
    ELEMENTS,
    AliasField,
    ComputationField,
    DeviceListField,
    InstructionField,
    LayoutField,
    ModuleField,
    ShapeField,
)
from nxpipe.emulator.hlo.wire import Message
from nxpipe.emulator.hlo.writer import HloWriter, Tensor
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array


@cache
def corpus() -> tuple[Probe, ...]:
    """All probes, in the order of their run."""
    return (*assumptions(), *_questions())


def corpus_digest() -> str:
    """The SHA-256 of all names and modules: two reports with one digest are about the same probes."""
    return hashlib.sha256(b"".join(probe.name.encode() + probe.module for probe in corpus())).hexdigest()


def matching(pattern: str) -> list[Probe]:
    """The probes with a name like `opcode/*`, or of a group such as `opcode`."""
    return [probe for probe in corpus() if fnmatchcase(probe.name, pattern) or probe.name.split("/")[0] == pattern]


def _named(name: str) -> Probe:
    return next(probe for probe in assumptions() if probe.name == name)


def _questions() -> Iterator[Probe]:
    yield from _proto_forms()
    yield from _opcodes_not_in_use()
    yield from _arithmetic_not_in_use()
    yield from _custom_calls()
    yield replace(
        _named("core/two"),
        name="core/other-setting",
        assumption="a program for two physical cores runs where the runtime's logical cores have one",
        fallback="give the runtime the number that the NEFF has, as nxpipe does",
        runtime_cores=1,
        is_question=True,
        proves=(),
    )
    state = _named("alias/in-place")
    for name, kind in (("may", 1), ("undefined", 0)):
        yield changed(
            *(state, f"form/alias-{name}", f"an alias of kind {name} is kept, as it is by kind must"),
            *("demand aliases (kind must), as canonical() does", partial(_alias_kind, kind)),
            breaks="alias-kind",
        )
    default = partial(_without_attributes, "parameter", "tuple")
    yield changed(
        *(_default_names(), "name/default", "without names, a NEFF has input0, input1 and output0"),
        *("name all inputs and outputs", default),
    )
    yield changed(
        *(_named("output/copy"), "output/raw", "an input may be an output without a copy and without an alias"),
        *("copy it, as nxpipe does", _without_copy),
        breaks="raw-output",
    )


def _default_names() -> Probe:
    inputs = {"input0": X, "input1": Y}

    def emit(w: HloWriter, t: Sequence[Tensor]) -> Tensor:
        return w.binary("add", *t)

    return written("name/default", "", "", inputs, emit, np.add, outputs=("output0",), tolerance=ROUNDED)


def _proto_forms() -> Iterator[Probe]:
    base, transpose = _named("form/canonical"), _named("opcode/transpose")
    alone, collective = _named("rank/all-reduce-alone"), _named("rank/all-reduce")
    renumber = "renumber ids, as canonical() does"
    yield changed(
        base, "form/composite-ids", "jaxlib's ids above 2^32 are read", renumber, _composite_ids, breaks="id-range"
    )
    yield changed(base, "form/sparse-ids", "ids with gaps are read", renumber, _sparse_ids, breaks="id-density")
    for name, probe in (("alone", alone), ("pair", collective)):
        yield changed(
            *(probe, f"form/groups-87-{name}", "replica groups are read from field 87"),
            *("move them to field 49, as canonical() does", _groups_in_87),
            breaks="group-form",
        )
    yield changed(
        *(collective, "form/channel", "a collective may have a channel id", "omit it, as nxpipe does"),
        *(_with_channel,),
        breaks="channel-id",
    )
    yield changed(
        *(transpose, "form/free-transpose", "a layout in place of a transposition is read"),
        *("write row-major layouts, as canonical() does", _free_transpose),
        breaks="layout",
    )
    yield changed(
        *(base, "form/locations", "metadata with a source line is read", "drop it, as canonical() does", _with_location)
    )


def _opcodes_not_in_use() -> Iterator[Probe]:
    """Those that would replace a composition."""
    yield _question("logistic", X, unary("logistic"), lambda x: 1 / (1 + np.exp(-x)), breaks="opcode")
    yield _question("rsqrt", Y, unary("rsqrt"), lambda x: 1 / np.sqrt(x))
    yield _question("sign", X, unary("sign"), np.sign)
    yield _question("log-plus-one", Y, unary("log_plus_one"), np.log1p, breaks="opcode")
    yield _ask(
        *("opcode/dynamic-update-slice-variable", "`dynamic-update-slice` takes a computed start"),
        "write by scatter, as nxpipe does",
        {"x": X, "u": Y[:1], "start": np.array([2], np.int32)},
        *(_update_at, lambda x, u, start: replaced(x, slice(int(start[0]), int(start[0]) + 1), u)),
    )


_ask: Final = partial(written, is_question=True)


def _arithmetic_not_in_use() -> Iterator[Probe]:
    """Integers and narrow floats in places where nxpipe writes f32."""
    yield _ask(
        *("value/integer-dot", "a product of matrices of s32 is exact", "compute it in f32"),
        *({"x": N, "z": N.reshape(8, 4)}, _integer_dot, np.matmul),
        breaks="integer-dot",
    )
    yield _ask(
        *("value/integer-scatter", "a `scatter` of s32 combines its updates by `add`, exactly"),
        "add digits as floats, as nxpipe does",
        {"x": WIDE, "i": np.array([[3], [0], [3]], np.int32), "u": WIDE[:3]},
        *(partial(scattered, "add"), partial(combined, np.add)),
        breaks="integer-scatter",
    )
    pair, narrow = np.stack([N, WIDE]), np.stack([X, Y * 4]).astype(BF16)
    yield _ask(
        *("rank/all-reduce-integers", "an `all-reduce` of s32 is exact beyond 2^24", "sum in f32", {"x": pair}),
        *(lambda w, t: w.all_reduce(t[0], 2), partial(all_ranks, np.add)),
        world=2,
        breaks="collective-type",
    )
    yield _ask(
        *("rank/all-reduce-bf16", "an `all-reduce` of bf16 rounds once", "sum in f32", {"x": narrow}),
        *(lambda w, t: w.all_reduce(t[0], 2), partial(all_ranks, lambda a, b: (a.astype(np.float32) + b).astype(BF16))),
        world=2,
        tolerance=NARROW,
    )
    yield _ask(
        *("type/f8e4m3fn", "E4M3FN, the type of checkpoints, is an input"),
        "convert weights to E4M3 or bf16 on the host",
        {"x": X.astype(F8E4M3FN)},
        *(lambda w, t: w.convert(t[0], "f32"), lambda x: x.astype(np.float32)),
        breaks="fp8-e4m3fn",
    )
    denormal = np.array([1e-40, -1e-40, 1e-39, 1.0], np.float32)
    yield _ask(
        *("value/subnormal", "subnormal numbers survive an addition"),
        "none is needed: nxpipe relies on zero or the number",
        {"x": denormal},
        *(lambda w, t: w.binary("maximum", t[0], t[0]), lambda x: x),
    )


def _question(opcode: str, x: Array, emit: Emit, expect: Expect, breaks: str = "") -> Probe:
    return written(
        *(f"opcode/{opcode}", f"the compiler supports `{opcode}`", "none is needed: nxpipe composes it", {"x": x}),
        *(emit, lambda x: np.asarray(expect(x), np.float32)),
        tolerance=FUNCTION,
        is_question=True,
        breaks=breaks,
    )


def _update_at(w: HloWriter, t: Sequence[Tensor]) -> Tensor:
    return w.update_at(t[0], t[1], [w.reshape(t[2], ()), w.scalar(0, "i32")])


def _integer_dot(w: HloWriter, t: Sequence[Tensor]) -> Tensor:
    return w.dot(t[0], t[1], ((), ()), (1, 0), "i32")


# Custom calls ---------------------------------------------------------------------------------------------------------


def _custom_calls() -> Iterator[Probe]:
    """Those that would replace a composition, each with the composition as its twin."""
    elementwise = (("erf", "Erf"), ("gelu", "Gelu"), ("gelu_tanh", "GeluApprxTanh"), ("silu", "Silu"))
    for function, name in elementwise:
        yield _call(function.replace("_", "-"), f"AwsNeuron{name}", "", {"x": X}, ops.Unary(function))
    yield _call("softmax", "AwsNeuronSoftmax", "1", {"x": X}, ops.Softmax(1, False))
    yield _call("rms-norm", "AwsNeuronRmsNorm", "1", {"x": X, "w": Y[0]}, ops.RmsNorm(1, 1e-6), scalars=(1e-6,))
    yield _call_of(
        *("arg-max", "AwsNeuronArgMax", "1", {"x": Y}),
        lambda b, x: b.add(ops.Cast(DType.UINT32), b.add(ops.ArgReduce("argmax", 1, False), x)),
    )
    yield _top_k("top-k", 3, Y, "the largest of each row come in their order, with positions of u32")
    wide = (np.arange(256) * 7 % 256).astype(np.float32)[np.newaxis]
    yield _top_k("top-k-wide", 64, wide, "64 of 256 numbers are found")
    odd = "pad the rows with the least value to a multiple of 8"
    yield _top_k("top-k-odd-row", 3, Y[:, :7].copy(), "rows of 7 numbers are taken", fallback=odd, breaks="topk-row")
    yield _call("unlisted", "NxpipeUnlisted", "", {"x": X}, ops.Unary("abs"), breaks="custom-call")


def _top_k(name: str, count: int, x: Array, what: str, **others: Any) -> Probe:
    def build(b: GraphBuilder, x: Value) -> list[Value]:
        order = b.add(ops.ArgSort(1, True), x)
        first = b.add(ops.Slice((0, 0), (x.type.shape[0], count), (1, 1)), order)
        return [b.add(ops.TakeAlong(1), x, first), b.add(ops.Cast(DType.UINT32), first)]

    outputs = {"outputs": ("values", "positions")}
    return _call_of(name, "AwsNeuronTopK", str(count), {"x": x}, build, twin=outputs, what=f": {what}", **others)


def _call(name: str, target: str, config: str, inputs: dict[str, Array], op: ops.Operator, **others: Any) -> Probe:
    return _call_of(name, target, config, inputs, lambda b, *values: b.add(op, *values), **others)


def _call_of(
    name: str,
    target: str,
    config: str,
    inputs: dict[str, Array],
    build: Callable[..., Value | Sequence[Value]],
    *,
    twin: Mapping[str, Any] | None = None,
    what: str = "",
    fallback: str = "none is needed: nxpipe composes it",
    **others: Any,
) -> Probe:
    composed = emitted(name, "", "", inputs, build, tolerance=FUNCTION, **(twin or {}))
    assumption = f"the compiler has the custom call `{target}`{what}"
    return called(composed, f"call/{name}", assumption, fallback, target, config, **others)


# Changes of a proto ---------------------------------------------------------------------------------------------------


def _instructions(module: Message) -> Iterator[tuple[Message, Message]]:
    """Each computation with each of its instructions."""
    for computation in module.messages(ModuleField.COMPUTATIONS):
        for instruction in computation.messages(ComputationField.INSTRUCTIONS):
            yield computation, instruction


def _map_ids(module: Message, change: Any) -> None:
    for _, instruction in _instructions(module):
        instruction.set(InstructionField.ID, change(instruction.number(InstructionField.ID)))
        operands = instruction.numbers(InstructionField.OPERAND_IDS)
        instruction.set_numbers(InstructionField.OPERAND_IDS, map(change, operands))
    for computation in module.messages(ModuleField.COMPUTATIONS):
        computation.set(ComputationField.ROOT_ID, change(computation.number(ComputationField.ROOT_ID)))


def _composite_ids(module: Message) -> None:
    """The number of the computation in the upper 32 bits, as jaxlib writes it; the base has one computation."""
    _map_ids(module, lambda number: (1 << 32) + number)


def _sparse_ids(module: Message) -> None:
    _map_ids(module, lambda number: number * 10)


def _groups_in_87(module: Message) -> None:
    for _, instruction in _instructions(module):
        if groups := instruction.messages(InstructionField.REPLICA_GROUPS):
            listing = Message()
            for group in groups:
                listing.add(DeviceListField.REPLICA_GROUPS, group)
            instruction.remove(InstructionField.REPLICA_GROUPS)
            instruction.add(InstructionField.COLLECTIVE_DEVICE_LIST, listing)


def _with_channel(module: Message) -> None:
    for _, instruction in _instructions(module):
        if instruction.messages(InstructionField.REPLICA_GROUPS):
            instruction.set(InstructionField.CHANNEL_ID, 1)


def _free_transpose(module: Message) -> None:
    """The layout of the transposed value that has the operand's order in memory; a copy restores rows."""
    (entry,) = module.messages(ModuleField.COMPUTATIONS)
    *_, transpose, root = entry.messages(ComputationField.INSTRUCTIONS)
    count = root.number(InstructionField.ID)
    copy = Message.parse(transpose.encode())
    copy.set(InstructionField.NAME, "copy.1")
    copy.set(InstructionField.OPCODE, "copy")
    copy.set(InstructionField.ID, count)
    copy.remove(InstructionField.DIMENSIONS)
    copy.set_numbers(InstructionField.OPERAND_IDS, [transpose.number(InstructionField.ID)])
    shape = transpose.message(InstructionField.SHAPE)
    layout = shape.message(ShapeField.LAYOUT) if shape else None
    assert layout is not None
    layout.set_numbers(LayoutField.MINOR_TO_MAJOR, [0, 1])
    root.set(InstructionField.ID, count + 1)
    root.set_numbers(InstructionField.OPERAND_IDS, [count])
    entry.set(ComputationField.ROOT_ID, count + 1)
    entry.fields.insert(-1, (ComputationField.INSTRUCTIONS, copy))
    _restore_order(entry)


def _restore_order(entry: Message) -> None:
    """Instructions in the order of their ids; other fields keep theirs."""
    found = sorted(entry.messages(ComputationField.INSTRUCTIONS), key=lambda each: each.number(InstructionField.ID))
    entry.remove(ComputationField.INSTRUCTIONS)
    for each in found:
        entry.add(ComputationField.INSTRUCTIONS, each)


def _alias_kind(kind: int, module: Message) -> None:
    listing = module.message(ModuleField.INPUT_OUTPUT_ALIAS)
    for entry in listing.messages(ELEMENTS) if listing else ():
        entry.set(AliasField.KIND, kind)


def _without_attributes(first: str, second: str, module: Message) -> None:
    for _, instruction in _instructions(module):
        if instruction.text(InstructionField.OPCODE) in (first, second):
            instruction.remove(InstructionField.FRONTEND_ATTRIBUTES)


def _without_copy(module: Message) -> None:
    """The root refers to the copies' operands; the copies are dead."""
    sources = {
        each.number(InstructionField.ID): each.numbers(InstructionField.OPERAND_IDS)[0]
        for _, each in _instructions(module)
        if each.text(InstructionField.OPCODE) == "copy"
    }
    for _, each in _instructions(module):
        if each.text(InstructionField.OPCODE) == "tuple":
            operands = each.numbers(InstructionField.OPERAND_IDS)
            each.set_numbers(InstructionField.OPERAND_IDS, [sources.get(number, number) for number in operands])


def _with_location(module: Message) -> None:
    for _, instruction in _instructions(module):
        if instruction.text(InstructionField.OPCODE) == "add":
            location = Message()
            location.add(1, "add")  # op_type
            location.add(2, "model/layer/add")  # op_name
            location.add(3, "model.py")  # source_file
            location.add(4, 12)  # source_line
            instruction.set(InstructionField.METADATA, location)
