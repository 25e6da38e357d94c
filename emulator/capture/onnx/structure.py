"""What the names of a model must keep before a node is read: each is made once, before it is used, and found.

An operand that is left out is an empty name. A name that nothing makes is a fault of the file and never an operand that
is left out: with it a bias, or a bound, would drop out of the program without a word.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from nxpipe.emulator.capture.onnx.file import is_weight
from nxpipe.emulator.capture.onnx.limits import NAME_CHARACTERS, BeyondLimit
from nxpipe.emulator.errors import CaptureError

_Key = tuple[str, str, str]


class Malformed(CaptureError):
    """A rule of the format is broken that makes the model mean nothing, or two things."""


def function_key(node_or_function: Any, name: str) -> _Key:
    """What calls and functions are matched by; the standard's own domain has two spellings."""
    domain = "" if node_or_function.domain == "ai.onnx" else node_or_function.domain
    return domain, name, node_or_function.overload


def require_sound(model: Any, name: str) -> None:
    _Names(name).walk(model.graph, (), name)
    functions: dict[_Key, Any] = {}
    for function in model.functions:
        key = function_key(function, function.name)
        if key in functions:
            raise Malformed(f"{name} has two functions {_title(key)}; give each a name of its own")
        functions[key] = function
        _Names(name).walk(function, (), f"function {_title(key)} of {name}")
    _require_no_recursion(functions, name)


def _title(key: _Key) -> str:
    return ".".join(part for part in key if part)


class _Names:
    """The walk over one graph, or one function, and the bodies in it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._parameters: set[str] = set()

    def walk(self, body: Any, around: Sequence[set[str]], place: str) -> None:
        own = self._given(body, around, place)
        scopes = (own, *around)
        for number, node in enumerate(body.node):
            for word in (node.op_type, node.domain, node.name):
                if len(word) > NAME_CHARACTERS:
                    raise BeyondLimit(
                        self._name, "has a name of {} characters", len(word), NAME_CHARACTERS, "rename it"
                    )
            where = f"{place}:{node.op_type} {number}"
            for operand in node.input:
                if operand and not any(operand in scope for scope in scopes):
                    raise Malformed(f"{where} reads {operand!r}, {_why_unknown(body, number, operand)}")
            for inner in _bodies(node):
                self.walk(inner, scopes, where)
            for result in filter(None, node.output):
                self._define(result, own, around, where)
        for output in body.output:
            result = output if isinstance(output, str) else output.name
            if not any(result in scope for scope in scopes):
                raise Malformed(f"output {result!r} of {place} is made by no node; remove it, or export it again")

    def _given(self, body: Any, around: Sequence[set[str]], place: str) -> set[str]:
        """Inputs and initialisers; an input may have an initialiser of its name, as older files have them."""
        own: set[str] = set()
        for declared in body.input:
            self._define(declared if isinstance(declared, str) else declared.name, own, around, place)
        inputs = set(own)
        for tensor in getattr(body, "initializer", ()):
            if tensor.name in inputs:
                inputs.remove(tensor.name)
            else:
                self._define(tensor.name, own, around, place)
            self._require_one_of_its_name(tensor)
        if getattr(body, "sparse_initializer", ()):
            raise Malformed(f"{place} holds sparse initialisers; save them as dense ones")
        return own

    def _define(self, word: str, own: set[str], around: Sequence[set[str]], where: str) -> None:
        if not word:
            raise Malformed(f"{where} has an input or initialiser without a name; export it again")
        if word in own or any(word in scope for scope in around):
            raise Malformed(f"{where} makes {word!r}, which was made before; each value needs a name of its own")
        own.add(word)

    def _require_one_of_its_name(self, tensor: Any) -> None:
        """Weights are found by name alone, wherever in the file they stand."""
        if not is_weight(tensor):
            return
        if tensor.name in self._parameters:
            raise Malformed(f"{self._name} has two initialisers {tensor.name!r}; give each a name of its own")
        self._parameters.add(tensor.name)


def _why_unknown(body: Any, number: int, operand: str) -> str:
    for later, node in enumerate(body.node[number:], number):
        if operand in node.output:
            itself = "this node itself makes" if later == number else f"node {later} makes, which comes after it"
            return f"which {itself}; sort the nodes, or break the cycle"
    return "which nothing makes; export the model again"


def _bodies(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _calls(function: Any, functions: dict[_Key, Any]) -> set[_Key]:
    """The functions that a function calls, from bodies inside it too."""
    found, waiting = set(), [function]
    while waiting:
        for node in waiting.pop().node:
            key = function_key(node, node.op_type)
            if key in functions:
                found.add(key)
            waiting.extend(_bodies(node))
    return found


def _require_no_recursion(functions: dict[_Key, Any], name: str) -> None:
    """Functions are taken away whose calls all are of such as were taken away; what is left calls itself."""
    left = {key: _calls(function, functions) for key, function in functions.items()}
    callers: dict[_Key, list[_Key]] = {key: [] for key in left}
    for key, calls in left.items():
        for called in calls:
            callers[called].append(key)
    open_calls = {key: len(calls) for key, calls in left.items()}
    free = [key for key, count in open_calls.items() if not count]
    for key in free:  # grows while it is read
        for caller in callers[key]:
            open_calls[caller] -= 1
            if not open_calls[caller]:
                free.append(caller)
    circle = sorted(_title(key) for key, count in open_calls.items() if count)
    if circle:
        raise Malformed(
            f"{name}: function {circle[0]} calls itself, by {len(circle)} functions that call each other; "
            "write it as a Loop"
        )
