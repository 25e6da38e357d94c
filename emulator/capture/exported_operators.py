"""What a saved program may call: the tensor operators that PyTorch's dispatcher knows, and arithmetic on sizes."""

import re
from functools import cache
from typing import Final

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
