"""A graph of one rank as a StableHLO module, which all ranks run; specified in docs/reference/hlo.md.

The module is that of the graph's normal form with its layers unrolled: it depends neither on provenance, numbering nor
dead code, so that equal graphs have equal modules.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from nxpipe.emulator import ops
from nxpipe.emulator.errors import HloUnsupported
from nxpipe.emulator.executable.interface import RANK, Argument, Interface, Result
from nxpipe.emulator.hlo import arithmetic, movement, reductions
from nxpipe.emulator.hlo.movement import reads_rank
from nxpipe.emulator.hlo.writer import ELEMENTS, HloWriter, Tensor
from nxpipe.emulator.ir.graph import Graph, normal_form
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.lower.hbm_buffers import narrowed
from nxpipe.emulator.lower.parameters import host_work

Emission = Callable[[HloWriter, Node, Sequence[Tensor]], Tensor]

EMISSIONS: Final[Mapping[type[ops.Operator], Emission]] = MappingProxyType(
    {
        ops.AllGather: movement.all_gather,
        ops.AllReduce: movement.all_reduce,
        ops.ArgReduce: reductions.arg_reduce,
        ops.ArgSort: reductions.arg_sort,
        ops.Attention: reductions.attention,
        ops.Binary: arithmetic.binary,
        ops.Bitcast: movement.bitcast,
        ops.Broadcast: movement.broadcast,
        ops.Cast: arithmetic.cast,
        ops.Concat: movement.concat,
        ops.Convolution: reductions.convolution,
        ops.Cumulate: reductions.cumulate,
        ops.Flip: movement.flip,
        ops.Gather: movement.gather,
        ops.GroupedMatMul: reductions.grouped_matmul,
        ops.Index: movement.index,
        ops.IndexUpdate: movement.index_update,
        ops.Iota: movement.iota,
        ops.LayerNorm: reductions.layer_norm,
        ops.Linear: reductions.linear,
        ops.MatMul: reductions.matmul,
        ops.Pad: movement.pad,
        ops.Pool: reductions.pool,
        ops.RankSlice: movement.rank_slice,
        ops.Reduce: reductions.reduce,
        ops.ReduceScatter: movement.reduce_scatter,
        ops.Resample: movement.resample,
        ops.Reshape: movement.reshape,
        ops.RmsNorm: reductions.rms_norm,
        ops.ScatterAlong: movement.scatter_along,
        ops.Slice: movement.slice_,
        ops.SliceUpdate: movement.slice_update,
        ops.Softmax: reductions.softmax,
        ops.TakeAlong: movement.take_along,
        ops.Transpose: movement.transpose,
        ops.Unary: arithmetic.unary,
        ops.Where: arithmetic.where,
    }
)

_RANK_TYPE: Final = TensorType((1,), DType.INT32)
_LONGEST_NAME: Final = 255  # bytes: a field of the runtime's records


@dataclass(frozen=True)
class Module:
    """A StableHLO module: its interface, and its text."""

    interface: Interface
    text: str


def module_of(graph: Graph, degree: int = 1) -> Module:
    """The module of a graph that is sharded for `degree` ranks."""
    plain = normal_form(unroll(graph))
    work = host_work(plain)
    arguments = tuple(_arguments(plain, work))
    results = tuple(Result(name, value.type) for name, value in plain.outputs.items())
    for name in (*(argument.name for argument in arguments), *plain.outputs):
        _require_name(name)
    body = _Body(plain, work, arguments)
    return Module(Interface(degree, arguments, results), text_of(arguments, body.writer, body.results))


def _arguments(graph: Graph, work: Mapping[Value, tuple[Node, ...]]) -> Iterator[Argument]:
    """Inputs and states, then weights, then the rank's number if it is read."""
    numbers = {name: number for number, name in enumerate(graph.outputs)}
    for name, value in graph.inputs.items():
        is_state = name in numbers and graph.outputs[name].type == value.type
        role, alias = (Role.STATE, numbers[name]) if is_state else (Role.INPUT, None)
        yield Argument(name, role, value.type, value.type, alias=alias)
    for name, value in graph.parameters.items():
        nodes = work[value]
        last = nodes[-1].result if nodes else value
        preparation = tuple(node.op for node in nodes if isinstance(node.op, ops.Cast | ops.RankSlice))
        yield Argument(name, Role.PARAMETER, value.type, last.type, preparation)
    if _reads_rank(graph, work):
        yield Argument(RANK, Role.INPUT, _RANK_TYPE, _RANK_TYPE)


def _reads_rank(graph: Graph, work: Mapping[Value, tuple[Node, ...]]) -> bool:
    prepared = {node.result for nodes in work.values() for node in nodes}
    return any(reads_rank(node.op) and node.result not in prepared for node in graph.nodes)


def _require_name(name: str) -> None:
    if not name.isprintable() or not name.isascii() or "," in name or len(name) > _LONGEST_NAME:
        shown = name[:_LONGEST_NAME]
        reason = f"a name has at most {_LONGEST_NAME} printable ASCII characters, and no comma; rename the tensor"
        raise HloUnsupported(f"the name {shown!r}", reason)


class _Body:
    """The body of the entry function, and the tensors that it returns."""

    def __init__(self, graph: Graph, work: Mapping[Value, tuple[Node, ...]], arguments: Sequence[Argument]) -> None:
        self.writer = HloWriter()
        self._known: dict[Value, Tensor] = {}
        given = [argument_tensor(number, argument.type) for number, argument in enumerate(arguments)]
        values = [*graph.inputs.values(), *graph.parameters.values()]
        for value, tensor in zip(values, given, strict=False):
            nodes = work.get(value, ())
            self._known[nodes[-1].result if nodes else value] = self._inside(tensor, arguments)
        self._rank = given[-1] if given else None
        for value, table in graph.constants.items():
            dtype = value.type.dtype
            self._known[value] = self.writer.table(narrowed(table, dtype), ELEMENTS[dtype])
        prepared = {node.result for nodes in work.values() for node in nodes}
        for node in graph.nodes:
            if node.result not in prepared:
                self._emit(node)
        self.results = list(self._results(graph, arguments, given))

    def _inside(self, tensor: Tensor, arguments: Sequence[Argument]) -> Tensor:
        """An argument as the graph's nodes read it: truth values arrive as bytes."""
        argument = arguments[int(tensor.name.removeprefix("%arg"))]
        return self.writer.compare("NE", tensor, 0) if argument.type.dtype is DType.BOOL else tensor

    def _emit(self, node: Node) -> None:
        operands = [self._known[operand] for operand in node.operands]
        if reads_rank(node.op) and self._rank is not None:
            operands.append(self._rank)
        result = EMISSIONS[type(node.op)](self.writer, node, operands)
        expected = (node.result.type.shape, ELEMENTS[node.result.type.dtype])
        assert (result.shape, result.element) == expected, f"{node.op.label} gives {result.type}, not {expected}"
        self._known[node.result] = result

    def _results(self, graph: Graph, arguments: Sequence[Argument], given: Sequence[Tensor]) -> Iterator[Tensor]:
        """The results as they are stored. Each has memory of its own: a second name of a value, or an argument that the
        result does not replace, is copied."""
        owners = {given[number].name: argument.alias for number, argument in enumerate(arguments)}
        for number, value in enumerate(graph.outputs.values()):
            result = self._known[value]
            stored = self.writer.convert(result, "ui8") if result.element == "i1" else result
            if owners.setdefault(stored.name, number) != number:
                stored = self.writer.copy(stored)
            yield stored


def argument_tensor(number: int, type_: TensorType) -> Tensor:
    """An argument as the function declares it: truth values are bytes."""
    element = "ui8" if type_.dtype is DType.BOOL else ELEMENTS[type_.dtype]
    return Tensor(f"%arg{number}", type_.shape, element)


def text_of(arguments: Sequence[Argument], writer: HloWriter, results: Sequence[Tensor]) -> str:
    """The text of a module whose entry function has the writer's body and returns these tensors."""
    declared = []
    for number, argument in enumerate(arguments):
        tensor = argument_tensor(number, argument.type)
        name = argument.name.replace("\\", "\\5C").replace('"', "\\22")
        attributes = f'mhlo.frontend_attributes = {{neff_input_names = "{name}"}}'
        if argument.alias is not None:
            attributes += f", tf.aliasing_output = {argument.alias} : i32"
        declared.append(f"    {tensor.name}: {tensor.type} {{{attributes}}}")
    types = ", ".join(result.type for result in results)
    names = ", ".join(result.name for result in results)
    head = "module @nxpipe {\n  func.func public @main(\n" + ",\n".join(declared) + f"\n  ) -> ({types}) {{\n"
    return "".join([head, *writer.lines(), f"    return {names} : {types}\n  }}\n}}\n"])
