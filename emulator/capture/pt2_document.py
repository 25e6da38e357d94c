"""Validator of `models/model.json`, the document of a `.pt2` file: every field is checked before torch reads it.

torch's deserializer trusts the file: it imports the types that a tree spec names, resolves dotted targets as
attributes, evaluates size expressions, and writes value names into Python source that it executes. This validator is an
allowlist: only fields with a rule in this module are read; others are dropped (guards, ranges, custom metadata,
devices) or refused. The result has numbers, identifiers, strings that are only printed, and operators of a closed list.
"""

import dataclasses
import enum
import keyword
import math
import re
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, Final

from torch._export.serde import schema
from torch._export.serde.union import _Union

from nxpipe.emulator.capture.pt2_grammar import is_operator, plain_spec
from nxpipe.emulator.errors import CaptureError

NODES: Final = 2**15  # four times those of the largest published models; their capture takes up to a minute
_LONGEST_NAME: Final = 1024
_INT64: Final = 2**63
_RANK: Final = 64
_SUBGRAPHS: Final = 16  # nesting depth
_TRACE: Final = re.compile(r'File "([^"\n]{1,1024})", line (\d{1,9})')
_INFINITE: Final = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_VERIFIERS: Final = frozenset({"ATEN", "TRAINING"})

_Reader = Callable[[Any], Any]


class _Violation(Exception):
    """A violation in a document; the message follows the file's name."""


class _DynamicSize(_Violation):
    """A size that is an expression: of an input, or of data."""


def program_of(content: Any, file: str) -> Any:
    """The validated program of a JSON document, as a record of torch's schema."""
    return _read(schema.ExportedProgram, content, file, "a program")


def payload_of(content: Any, file: str) -> Any:
    """The validated list of tensors: archive entry, type and layout of each, as a record of torch's schema."""
    payloads = _read(schema.PayloadConfig, content, file, "its tensors")
    for name, payload in payloads.config.items():
        if payload.use_pickle or payload.tensor_meta is None:
            raise CaptureError(
                f"{file} has {name!r} as pickled Python, which could run any code; "
                "save it again with torch.export.save from torch 2.9 or newer"
            )
    return payloads


def _read(kind: type, content: Any, file: str, what: str) -> Any:
    try:
        return _reader(kind)(content)
    except _DynamicSize as fault:
        raise CaptureError(f"{file} {_data_dependent(content) or fault}") from None
    except _Violation as fault:
        raise CaptureError(f"{file} {fault}") from None
    except RecursionError:
        raise CaptureError(f"{file} does not describe {what}: it is nested too deep") from None


@cache
def _reader(kind: Any) -> _Reader:
    """The validator of JSON values for a type of the schema."""
    if isinstance(kind, typing.ForwardRef):
        kind = getattr(schema, kind.__forward_arg__)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _reader(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _optional(_reader(arguments[0]))
    if origin is list:
        return _list(_reader(arguments[0]))
    if origin is dict:
        return _dict(_reader(arguments[1]), _free_name)
    if kind in _SCALARS:
        return _SCALARS[kind]
    if issubclass(kind, enum.IntEnum):
        return _member(kind)
    fields = {field.name: _field(kind, field.name) for field in dataclasses.fields(kind) if field.init}
    make = _union(kind, fields) if issubclass(kind, _Union) else _record(kind, fields)
    check = _CHECKS.get(kind)
    return make if check is None else _checked(make, check)


def _field(kind: type, name: str) -> Callable[[], _Reader]:
    """The validator of a field, created on first use, because types of the schema are recursive."""

    def find() -> _Reader:
        if (kind, name) in _FIELDS:
            return _FIELDS[kind, name]
        return _reader(typing.get_type_hints(kind, globalns=vars(schema), include_extras=True)[name])

    return cache(find)


def _record(kind: type, fields: dict[str, Callable[[], _Reader]]) -> _Reader:
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Violation(f"does not describe a program: {kind.__name__} must be an object")
        missing = required.difference(value)
        if missing:
            raise _Violation(f"does not describe a program: {kind.__name__} has no {min(missing)}")
        return kind(**{name: find()(value[name]) for name, find in fields.items() if name in value})

    return read


def _union(kind: Any, fields: dict[str, Callable[[], _Reader]]) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, dict) or len(value) != 1:
            raise _Violation(f"does not describe a program: {kind.__name__} must be an object of one field")
        ((name, content),) = value.items()
        if name not in fields:
            raise _Violation(f"does not describe a program: {kind.__name__} has no kind {name[:40]!r}")
        return kind.create(**{name: fields[name]()(content)})

    return read


def _checked(make: _Reader, check: Callable[[Any], None]) -> _Reader:
    def read(value: Any) -> Any:
        record = make(value)
        check(record)
        return record

    return read


def _optional(reader: _Reader) -> _Reader:
    return lambda value: None if value is None else reader(value)


def _list(reader: _Reader) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _Violation("does not describe a program: a list is expected in place of another value")
        return [reader(part) for part in value]

    return read


def _dict(reader: _Reader, key: _Reader) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Violation("does not describe a program: an object is expected in place of another value")
        return {key(name): reader(part) for name, part in value.items()}

    return read


def _member(kind: type[enum.IntEnum]) -> _Reader:
    known = {int(member): member for member in kind if member}  # 0 is UNKNOWN in all of them

    def read(value: Any) -> Any:
        if type(value) is not int or value not in known:
            raise _Violation(f"does not describe a program: {kind.__name__} has no member {str(value)[:40]!r}")
        return known[value]

    return read


def _integer(value: Any) -> int:
    if type(value) is not int or not -_INT64 <= value < _INT64:
        raise _Violation("does not describe a program: an integer of 64 bits is expected in place of another value")
    return value


def _float(value: Any) -> float:
    if isinstance(value, str) and value in _INFINITE:
        return _INFINITE[value]
    if type(value) not in (int, float) or abs(value) > 1e309:
        raise _Violation("does not describe a program: a number is expected in place of another value")
    return float(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Violation("does not describe a program: true or false is expected in place of another value")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise _Violation(f"does not describe a program: a string of at most {_LONGEST_NAME} characters is expected")
    return value


def _free_name(value: Any) -> str:
    """The name of a parameter, a module or an output: any printable string."""
    if not _string(value).isprintable():
        raise _Violation(f"names a part of its model {value[:40]!r}, which is not printable")
    return str(value)


def _value_name(value: Any) -> str:
    """An identifier other than `self` and `__debug__`, with which the Python source that torch generates is invalid."""
    if _identifier(value) in ("self", "__debug__"):
        raise _Violation(f"names a value {value!r}, which Python reserves")
    return str(value)


def _identifier(value: Any) -> str:
    """A Python identifier; torch writes it into Python source."""
    if not (_string(value).isascii() and value.isidentifier()) or keyword.iskeyword(value):
        raise _Violation(f"names a value {value[:40]!r}, which is not an identifier")
    return str(value)


def _argument(value: Any) -> str:
    """The name of an operator's argument; empty for subgraphs. torch passes reserved words by position."""
    return str(value) if value in ("", "from", "lambda") else _identifier(value)


def _entry(value: Any) -> str:
    if not re.fullmatch(r"\w[\w.-]*", _string(value)):
        raise _Violation(f"names an entry {value[:40]!r}, where a file name without a folder is expected")
    return str(value)


def _target(value: Any) -> str:
    if not is_operator(_string(value)):
        raise _Violation(f"calls {value[:200]!r}, which is not an operator of PyTorch that a program may call")
    return str(value)


def _refused(what: str) -> _Reader:
    def read(_: Any) -> Any:
        raise _Violation(what)

    return read


def _dropped(default: Callable[[], Any]) -> _Reader:
    return lambda _: default()


def _metadata(value: Any) -> dict[str, str]:
    """The provenance of a node for messages: its module, and the source lines of the model's code."""
    if not isinstance(value, dict):
        raise _Violation("does not describe a program: the metadata of a node must be an object")
    trace, stack = value.get("stack_trace"), value.get("nn_module_stack")
    kept = {}
    if isinstance(trace, str):
        kept["stack_trace"] = "\n".join(f'File "{path}", line {line}' for path, line in _TRACE.findall(trace))
    if isinstance(stack, str):
        kept["nn_module_stack"] = f"module,{_innermost_module(stack)},module"
    return kept


def _innermost_module(stack: str) -> str:
    """The path in the last `key,path,type` of a module stack; empty if it has other characters than dotted names."""
    parts = stack.rpartition(";")[2].split(",")
    plain = len(parts) == 3 and re.fullmatch(r"[\w.-]{0,512}", parts[1])
    return parts[1] if plain else ""


def _spec(value: Any) -> str:
    if not isinstance(value, str):
        raise _Violation("does not describe a program: a tree of arguments or results must be a string")
    try:
        return plain_spec(value)
    except ValueError as fault:
        raise _Violation(f"has an invalid tree of arguments or results: {fault}") from None


def _calls(value: Any) -> Any:
    """The call signature of the program; those of its submodules are only needed to unflatten it."""
    entries = _list(_reader(schema.ModuleCallEntry))(value)
    return [entry for entry in entries if entry.fqn == ""]


def _verifiers(value: Any) -> Any:
    names = _list(_string)(value)
    if not _VERIFIERS.issuperset(names):
        raise _Violation(f"is written in a dialect other than {' and '.join(sorted(_VERIFIERS))}")
    return names


def _check_layout(meta: Any) -> None:
    sizes, strides = ([number.as_int for number in numbers] for numbers in (meta.sizes, meta.strides))
    if len(sizes) != len(strides) or len(sizes) > _RANK:
        raise _Violation(f"has a tensor of {len(sizes)} sizes and {len(strides)} strides; the limit is {_RANK}")
    if min((*sizes, *strides, meta.storage_offset.as_int), default=0) < 0:
        raise _Violation("has a tensor with a negative size, stride or offset")
    if extent(meta) >= _INT64 or math.prod(sizes) >= _INT64:
        raise _Violation("has a tensor of more than 2^63 elements")
    if meta.layout != schema.Layout.Strided:
        raise _Violation(f"has a tensor of the layout {meta.layout.name}; only dense tensors are compiled")


def extent(meta: Any) -> int:
    """The elements that the storage of a tensor needs for its sizes, strides and offset."""
    sizes, strides = ([number.as_int for number in numbers] for numbers in (meta.sizes, meta.strides))
    if 0 in sizes:
        return 0
    last: int = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return int(meta.storage_offset.as_int) + last + 1


def _nodes(value: Any) -> Any:
    """The nodes of a graph, whose number is checked before the first is validated."""
    if isinstance(value, list):
        _require_node_limit(len(value))
    return _list(_reader(schema.Node))(value)


def _require_node_limit(operations: int) -> None:
    if operations > NODES:
        raise _Violation(f"has {operations:,} operations, and the limit is {NODES:,}; export a part of the model")


def _check_program(program: Any) -> None:
    """Check the limits of the whole program, and the fields that torch reads without a check."""
    graph = program.graph_module.graph
    _require_node_limit(sum(len(body.nodes) for body in _graphs(graph)))
    if len(program.graph_module.module_call_graph) != 1 or program.graph_module.module_call_graph[0].signature is None:
        raise _Violation("has no call signature")
    if len(graph.inputs) != len(program.graph_module.signature.input_specs):
        raise _Violation("has inputs that differ from its signature")


def _graphs(graph: Any, depth: int = 0) -> Iterator[Any]:
    """A graph and its subgraphs, which are arguments of its operators."""
    if depth > _SUBGRAPHS:
        raise _Violation(f"nests subgraphs more than {_SUBGRAPHS} deep")
    yield graph
    for node in graph.nodes:
        for argument in node.inputs:
            if argument.arg.type == "as_graph":
                yield from _graphs(argument.arg.value.graph, depth + 1)


_CHECKS: Final[dict[type, Callable[[Any], None]]] = {
    schema.TensorMeta: _check_layout,
    schema.ExportedProgram: _check_program,
}
_SCALARS: Final[dict[Any, _Reader]] = {int: _integer, float: _float, bool: _boolean, str: _string}


def _dynamic(_: Any) -> Any:
    raise _DynamicSize("has dynamic sizes; export it again without dynamic_shapes")


def _data_dependent(content: Any) -> str | None:
    """The first operator whose result has a size that depends on data, in a document that is not validated: any part of
    it may be missing. torch.export names such sizes u0, u1, ..., and those of dynamic inputs s0, s1, ..."""
    try:
        graph = content["graph_module"]["graph"]
        sizes = {name: str(meta["sizes"]) for name, meta in graph["tensor_values"].items()}
        for node in graph["nodes"]:
            results = [output["as_tensor"]["name"] for output in node["outputs"] if "as_tensor" in output]
            if any(_UNBACKED.search(sizes[name]) for name in results):
                line = _TRACE.findall(_metadata(node["metadata"]).get("stack_trace", ""))
                where = f" at {line[-1][0].rpartition('/')[2]}:{line[-1][1]}" if line else ""
                operator = _free_name(node["target"]).removeprefix("torch.ops.").removesuffix(".default")
                return (
                    f"has a data-dependent size: the result of {operator}{where}; use a mask of fixed size, as with "
                    "torch.where"
                )
    except (KeyError, TypeError, AttributeError, _Violation):
        return None
    return None


_UNBACKED: Final = re.compile(r"\bu[0-9]")
_DYNAMIC: Final = _dynamic
_OBJECT: Final = _refused("has objects of Python classes, which could run any code; pass tensors instead")


def _cpu(_: Any) -> Any:
    return schema.Device(type="cpu")


def _values(kind: type) -> _Reader:
    return lambda value: _dict(_reader(kind), _value_name)(value)


def _no_objects(value: Any) -> Any:
    return _OBJECT(value) if value else {}


# Rules beyond the types of fields. Value names must be identifiers, because torch writes them into Python source.
_FIELDS: Final[dict[tuple[type, str], _Reader]] = {
    (schema.SymInt, "as_expr"): _DYNAMIC,
    (schema.SymFloat, "as_expr"): _DYNAMIC,
    (schema.SymBool, "as_expr"): _DYNAMIC,
    (schema.Argument, "as_custom_obj"): _OBJECT,
    (schema.Argument, "as_operator"): _refused("passes an operator to an operator, which is not compiled"),
    (schema.Argument, "as_device"): _cpu,
    (schema.Argument, "as_string_to_argument"): _refused("passes a dictionary to an operator, which is not compiled"),
    (schema.InputSpec, "custom_obj"): _OBJECT,
    (schema.InputSpec, "token"): _OBJECT,
    (schema.OutputSpec, "token"): _OBJECT,
    (schema.Graph, "custom_obj_values"): _no_objects,
    (schema.Graph, "tensor_values"): _values(schema.TensorMeta),
    (schema.Graph, "sym_int_values"): _values(schema.SymInt),
    (schema.Graph, "sym_float_values"): _values(schema.SymFloat),
    (schema.Graph, "sym_bool_values"): _values(schema.SymBool),
    (schema.Graph, "nodes"): _nodes,
    (schema.Node, "target"): _target,
    (schema.Node, "metadata"): _metadata,
    (schema.Node, "name"): _optional(_value_name),
    (schema.NamedArgument, "name"): _argument,
    (schema.GraphArgument, "name"): _value_name,
    (schema.TensorArgument, "name"): _value_name,
    (schema.SymIntArgument, "as_name"): _value_name,
    (schema.SymFloatArgument, "as_name"): _value_name,
    (schema.SymBoolArgument, "as_name"): _value_name,
    (schema.InputToConstantInputSpec, "name"): _value_name,
    (schema.TensorMeta, "device"): _cpu,
    (schema.ModuleCallSignature, "in_spec"): _spec,
    (schema.ModuleCallSignature, "out_spec"): _spec,
    (schema.ModuleCallSignature, "inputs"): _dropped(list),
    (schema.ModuleCallSignature, "outputs"): _dropped(list),
    (schema.ModuleCallSignature, "forward_arg_names"): _dropped(lambda: None),
    (schema.ModuleCallEntry, "fqn"): _free_name,
    (schema.GraphModule, "module_call_graph"): _calls,
    (schema.GraphModule, "metadata"): _dropped(dict),
    (schema.GraphModule, "treespec_namedtuple_fields"): _dropped(dict),
    (schema.ExportedProgram, "range_constraints"): _dropped(dict),
    (schema.ExportedProgram, "opset_version"): _dropped(dict),
    (schema.ExportedProgram, "guards_code"): _dropped(list),
    (schema.ExportedProgram, "torch_version"): _dropped(str),
    (schema.ExportedProgram, "verifiers"): _verifiers,
    (schema.PayloadMeta, "path_name"): _entry,
}
