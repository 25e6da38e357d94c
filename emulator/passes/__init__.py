"""The passes of the front end: a list of graph rewrites, each followed by the checker."""

from collections.abc import Callable, Sequence

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.passes.check import check, check_interface
from nxpipe.emulator.passes.fuse import fuse, recognise_causal
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.precision import autocast, legalise
from nxpipe.emulator.passes.roll import roll
from nxpipe.emulator.passes.shard import shard
from nxpipe.emulator.passes.simplify import (
    canonicalise,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    fold_constants,
)

Pass = Callable[[Graph, PassOptions], Graph]

# Constants are folded before autocast, so that the positions in rotary tables are exact, and after it, for its casts.
# Fusion precedes autocast, because its patterns are in float32. Sharding follows all simplifications.
PASSES: tuple[Pass, ...] = (
    fold_constants,
    canonicalise,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    fuse,
    recognise_causal,
    autocast,
    legalise,
    fold_constants,
    canonicalise,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    shard,
    roll,
)

__all__ = ["PASSES", "Pass", "PassOptions", "check", "run_passes"]


def run_passes(graph: Graph, options: PassOptions, passes: Sequence[Pass] | None = None) -> Graph:
    """The graph after all passes, or after `passes`. GraphInvalid names the pass after which the graph is invalid."""
    check(graph, after="capture")
    for rewrite in PASSES if passes is None else passes:
        before, graph = graph, rewrite(graph, options)
        check(graph, after=rewrite.__name__)
        check_interface(before, graph, after=rewrite.__name__)
    return graph
