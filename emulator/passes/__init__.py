"""The passes of the front end: a visible list of rewrites, with the checker after each one."""

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
# Fusion comes before autocast, because it names computations in float32; ranks are parted when all else has settled.
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
    """The graph after all passes, or after these; GraphInvalid names the pass that broke it, should one ever."""
    check(graph, after="capture")
    for rewrite in PASSES if passes is None else passes:
        before, graph = graph, rewrite(graph, options)
        check(graph, after=rewrite.__name__)
        check_interface(before, graph, after=rewrite.__name__)
    return graph
