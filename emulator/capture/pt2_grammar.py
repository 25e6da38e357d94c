"""Closed lists of the `.pt2` format: permitted operators, arithmetic on sizes, and the tree specs of arguments.

torch's reader of tree specs imports the modules that containers and enumeration keys name. This module replaces each
container by a tuple, list or dictionary of the same shape, and writes a new spec.
"""

import json
import re
from functools import cache
from typing import Any, Final

import torch

_NAMESPACES: Final = ("aten", "prims", "transformers")
_OPERATOR: Final = re.compile(rf"torch\.ops\.({'|'.join(_NAMESPACES)})\.(\w+)\.(\w+)", re.ASCII)
# Operators of these namespaces with side effects: they map a file, or print.
_SIDE_EFFECTS: Final = frozenset({"from_file", "_print"})
# Higher-order operators, which have subgraphs. The importer inlines some of them and reports the others.
_HIGHER_ORDER: Final = frozenset(
    f"torch.ops.higher_order.{name}"
    for name in (
        *("associative_scan", "cond", "map_impl", "scan", "while_loop", "wrap_with_autocast"),
        *("tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap_with_set_grad_enabled"),
    )
)
_SIZE_ARITHMETIC: Final = frozenset(
    f"_operator.{name}"
    for name in (
        *("add", "floordiv", "mod", "mul", "neg", "pos", "sub", "truediv"),
        *("eq", "ge", "getitem", "gt", "le", "lt", "ne"),
    )
)


def is_operator(target: str) -> bool:
    """True if a program may call this target; only operators registered by PyTorch are resolved."""
    if target in _SIZE_ARITHMETIC or target in _HIGHER_ORDER:
        return True
    match = _OPERATOR.fullmatch(target)
    if match is None:
        return False
    space, name, overload = match.groups()
    full = f"{space}::{name}" if overload == "default" else f"{space}::{name}.{overload}"
    if name in _SIDE_EFFECTS or full not in _registered():
        return False
    operator = getattr(getattr(getattr(torch.ops, space), name), overload, None)
    return isinstance(operator, torch._ops.OpOverload) and operator.name() == full


@cache
def _registered() -> frozenset[str]:
    """Operators of the dispatcher. TorchScript has more, one of which writes a file."""
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(name for name in names if name.partition("::")[0] in _NAMESPACES)


_PROTOCOL: Final = 1
_DEPTH: Final = 64
_LONGEST: Final = 2**20  # characters
_SEQUENCES: Final = {"builtins.tuple": "builtins.tuple", "builtins.list": "builtins.list"}
_LEAF: Final[dict[str, Any]] = {"type": None, "context": None, "children_spec": []}


def plain_spec(text: str) -> str:
    """The tree spec with only tuples, lists and dictionaries; ValueError for other containers."""
    if len(text) > _LONGEST:
        raise ValueError(f"a tree of {len(text):,} characters, and the limit is {_LONGEST:,}")
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError(f"a tree deeper than {_DEPTH}") from None
    if not isinstance(document, list) or len(document) != 2 or document[0] != _PROTOCOL:
        raise ValueError(f"a tree that is not of version {_PROTOCOL}")
    return json.dumps([_PROTOCOL, _plain(document[1], _DEPTH)])


def _plain(node: Any, depth: int) -> dict[str, Any]:
    if depth == 0:
        raise ValueError(f"a tree deeper than {_DEPTH}")
    if not isinstance(node, dict) or node.keys() != _LEAF.keys() or not isinstance(node["children_spec"], list):
        raise ValueError("a tree with a node that is neither a container nor a leaf")
    if node == _LEAF:
        return node
    kind, context, parts = node["type"], _context(node["context"]), node["children_spec"]
    if not isinstance(kind, str):
        raise ValueError("a container without a type")
    children = [_plain(part, depth - 1) for part in parts]
    keys = _keys(context, len(children))
    if kind in _SEQUENCES or kind == "collections.deque":
        if context is not None and type(context) is not int:  # the maximum length of a deque
            raise ValueError(f"a {kind} with a context")
        return {"type": _SEQUENCES.get(kind, "builtins.list"), "context": "null", "children_spec": children}
    if context is None or (kind == "collections.namedtuple" and isinstance(context, str)):
        return {"type": "builtins.tuple", "context": "null", "children_spec": children}
    if keys is None:
        raise ValueError(f"{kind[:80]!r} is not a tuple, list or dictionary; return one of these")
    return {"type": "builtins.dict", "context": json.dumps(keys), "children_spec": children}


def _context(text: Any) -> Any:
    if text is None or not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text  # the context of a namedtuple is a bare name
    except RecursionError:
        raise ValueError(f"a context deeper than {_DEPTH}") from None


def _keys(context: Any, count: int) -> list[str | int] | None:
    """The keys of a dictionary, or the field names of a dataclass: the first of two lists."""
    if isinstance(context, list) and len(context) == 2 and isinstance(context[0], list):
        context = context[0]
    if not isinstance(context, list) or len(context) != count:
        return None
    if not all(type(key) is int or (isinstance(key, str) and key.isprintable()) for key in context):
        return None
    return context if len(set(context)) == count else None
