"""Closed lists of the `.pt2` format: permitted operators, arithmetic on sizes, and the tree specs of arguments.

torch's reader of tree specs imports the modules that containers and enumeration keys name. Here each container
becomes a tuple, list or dictionary by its shape alone, and the spec is written anew.
"""

import json
import re
from functools import cache
from typing import Any, Final

import torch

_NAMESPACES: Final = ("aten", "prims", "transformers")
_OPERATOR: Final = re.compile(rf"torch\.ops\.({'|'.join(_NAMESPACES)})\.(\w+)\.(\w+)", re.ASCII)
# Of all in these namespaces, those that do anything but compute tensors from tensors: they map a file, or print.
_EFFECTS: Final = frozenset({"from_file", "_print"})
# Blocks of operations. The importer takes some of them in place, and says of the others what stands in their way.
_BLOCKS: Final = frozenset(
    f"torch.ops.higher_order.{name}"
    for name in (
        *("associative_scan", "cond", "map_impl", "scan", "while_loop", "wrap_with_autocast"),
        *("tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap_with_set_grad_enabled"),
    )
)
_OF_SIZES: Final = frozenset(
    f"_operator.{name}"
    for name in (
        *("add", "floordiv", "mod", "mul", "neg", "pos", "sub", "truediv"),
        *("eq", "ge", "getitem", "gt", "le", "lt", "ne"),
    )
)


def is_operator(target: str) -> bool:
    """Whether a program may call it; only names that PyTorch itself has registered are looked up."""
    if target in _OF_SIZES or target in _BLOCKS:
        return True
    match = _OPERATOR.fullmatch(target)
    if match is None:
        return False
    space, name, overload = match.groups()
    full = f"{space}::{name}" if overload == "default" else f"{space}::{name}.{overload}"
    if name in _EFFECTS or full not in _registered():
        return False
    found = getattr(getattr(getattr(torch.ops, space), name), overload, None)
    return isinstance(found, torch._ops.OpOverload) and found.name() == full


@cache
def _registered() -> frozenset[str]:
    """By the dispatcher: TorchScript has more, such as one that writes a file."""
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(name for name in names if name.partition("::")[0] in _NAMESPACES)


_PROTOCOL: Final = 1
_DEPTH: Final = 64
_LONGEST: Final = 2**20  # characters
_SEQUENCES: Final = {"builtins.tuple": "builtins.tuple", "builtins.list": "builtins.list"}
_LEAF: Final[dict[str, Any]] = {"type": None, "context": None, "children_spec": []}


def plain_spec(text: str) -> str:
    """The same tree of tuples, lists and dictionaries; a ValueError says what is anything else."""
    if len(text) > _LONGEST:
        raise ValueError(f"a tree of {len(text):,} characters, where {_LONGEST:,} are the most")
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
        raise ValueError("a tree with a node that is no container and no leaf")
    if node == _LEAF:
        return node
    kind, context, parts = node["type"], _context(node["context"]), node["children_spec"]
    if not isinstance(kind, str):
        raise ValueError("a container without a type")
    children = [_plain(part, depth - 1) for part in parts]
    keys = _keys(context, len(children))
    if kind in _SEQUENCES or kind == "collections.deque":
        if context is not None and type(context) is not int:  # a deque's longest length
            raise ValueError(f"a {kind} with a context")
        return {"type": _SEQUENCES.get(kind, "builtins.list"), "context": "null", "children_spec": children}
    if context is None or (kind == "collections.namedtuple" and isinstance(context, str)):
        return {"type": "builtins.tuple", "context": "null", "children_spec": children}
    if keys is None:
        raise ValueError(f"{kind[:80]!r} is no tuple, list or dictionary; return one of these")
    return {"type": "builtins.dict", "context": json.dumps(keys), "children_spec": children}


def _context(text: Any) -> Any:
    if text is None or not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text  # a namedtuple's is a bare name
    except RecursionError:
        raise ValueError(f"a context deeper than {_DEPTH}") from None


def _keys(context: Any, count: int) -> list[str | int] | None:
    """The keys of a dictionary, or the names of a data class's fields, which come first in a list of two lists."""
    if isinstance(context, list) and len(context) == 2 and isinstance(context[0], list):
        context = context[0]
    if not isinstance(context, list) or len(context) != count:
        return None
    if not all(type(key) is int or (isinstance(key, str) and key.isprintable()) for key in context):
        return None
    return context if len(set(context)) == count else None
