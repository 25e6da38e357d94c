"""How a saved program groups its arguments and results: a tree, as JSON in a string of the document.

torch's own reader of these strings imports the modules that containers and enumeration keys name. Here each container
becomes a tuple, a list or a dictionary, by its shape alone, and a string of those is written anew.
"""

import json
from typing import Any, Final

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
