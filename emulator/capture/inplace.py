"""In-place operators as what they compute, where nobody could tell the difference.

An in-place write is seen by everything that shares the written memory. Fake tensors know their storages, so that can
be read off a trace: where nothing else of one storage is read after the write, the operator without the underscore
gives the same program. What remains, such as a write to a part of a tensor, is left to PyTorch's own functionalisation.
"""

from typing import Any

import torch

from nxpipe.emulator.capture.aten import is_known

# In evaluation these return their very argument, but a trace shows a tensor with memory of its own.
_PASSING = (torch.ops.aten.dropout.default, torch.ops.aten.feature_dropout.default)


def without_safe_writes(graph: Any) -> None:
    """Rewrite those in-place calls of a traced graph that are safe to rewrite, in place."""
    for node in list(graph.nodes):
        if node.target in _PASSING and not node.args[2]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        functional = _functional(node.target)
        if functional is not None and _unseen(node, order):
            written = node.args[0]
            node.target = functional
            written.replace_all_uses_with(node, delete_user_cb=lambda user, write=node: order[user] > order[write])


def _functional(target: Any) -> Any:
    """The operator that returns what an in-place one writes, if there is one that the importer knows."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    namespace, _, name = target._schema.name.partition("::")
    mutated = [argument.is_write for argument in target._schema.arguments]
    if not name.endswith("_") or mutated != [True, *[False] * (len(mutated) - 1)]:
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    found = getattr(packet, target._overloadname, None)
    return found if found is not None and is_known(found) else None


def _unseen(write: Any, order: dict[Any, int]) -> bool:
    """Whether only the written tensor itself, and nothing else of its storage, is read after the write."""
    written = write.args[0]
    if written.op != "call_function":  # an argument of the program outlives it
        return False
    memory = _storages(written)
    sharing = [node for node in order if order[node] < order[write] and _storages(node) & memory]
    return len(memory) == 1 and all(
        node is written or (node.op == "call_function" and all(order[user] <= order[write] for user in node.users))
        for node in sharing
    )


def _storages(node: Any) -> set[int]:
    """The memory that a call's results lie in."""
    results = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return {tensor.untyped_storage()._cdata for tensor in results if isinstance(tensor, torch.Tensor)}
