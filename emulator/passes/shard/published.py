"""The plan that a model's authors published: what it lets be divided, and what of it could not be followed.

transformers names modules and how each is divided, `("layers.*.mlp.up_proj", "colwise")`. Where weights are divided
by outputs is a choice, so the plan decides it. The rest follows: what meets divided rows is divided by inputs.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.passes.shard.walk import Walk, can_be_divided

_BY_OUTPUTS = ("colwise", "packed_colwise", "colwise_gather_output", "embedding_colwise")
_BY_INPUTS = ("rowwise", "packed_rowwise", "rowwise_split_input", "embedding_rowwise")
_CHOSEN = (*_BY_OUTPUTS, "embedding_rowwise")


def may_split(graph: Graph, published: Mapping[str, str]) -> Callable[[str], bool]:
    """Which weights a plan divides by choice; any, if it names none of this graph's."""
    patterns = [_pattern(name) for name, style in published.items() if style in _CHOSEN]
    named = {name for name in graph.parameters if any(pattern.search(name) for pattern in patterns)}
    tables = {name for name in graph.parameters if "embed" in name}
    return (lambda name: name in named | tables) if named else (lambda name: True)


def unmet(walk: Walk, kept_whole: Mapping[str, str], published: Mapping[str, str]) -> Iterator[str]:
    """One sentence for each entry of a plan that a division does not follow, with the reason.

    `kept_whole` says of weights that should have been divided why they are not.
    """
    for entry, style in published.items():
        pattern, wanted = _pattern(entry), style in _BY_INPUTS
        if style not in _BY_OUTPUTS + _BY_INPUTS:
            continue
        for name, value in walk.graph.parameters.items():
            uses = walk.uses(value) if value.type.rank > 1 and pattern.search(name) else []
            if not uses:
                continue
            found = any(use.reduced for use in uses)
            if not can_be_divided(walk.layout(value)):
                why = kept_whole.get(name, "nothing that reads it can be divided")
                yield f"{entry} is published as {style}, but {name} stays whole: {why}"
                break
            if found is not wanted:
                way = "inputs: what it meets is divided" if found else "outputs: what it meets is whole"
                yield f"{entry} is published as {style}, but {name} is divided by its {way}"
                break


def _pattern(published: str) -> re.Pattern[str]:
    """`layers.*.mlp.up_proj` names a module or a parameter, below whatever the whole model calls its base."""
    parts = [r"\d+" if part == "*" else re.escape(part) for part in published.split(".")]
    return re.compile(r"(^|\.)" + r"\.".join(parts) + r"(\.weight|\.bias|\.\w+)?$")
