"""The middle of the compiler: a visible list of rewrites, with the checker after each one."""

from collections.abc import Callable

from emulator.graph import Graph
from emulator.passes.autocast import autocast
from emulator.passes.canonicalise import canonicalise
from emulator.passes.check import check, check_interface
from emulator.passes.clean import eliminate_common_subexpressions, eliminate_dead_code, fold_constants
from emulator.passes.options import PassOptions

Pass = Callable[[Graph, PassOptions], Graph]

# Constants are folded before autocast, so that the positions in rotary tables are exact, and after it, for its casts.
PASSES: tuple[Pass, ...] = (
    fold_constants,
    canonicalise,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    autocast,
    fold_constants,
    canonicalise,
    eliminate_common_subexpressions,
    eliminate_dead_code,
)

__all__ = ["PASSES", "Pass", "PassOptions", "check", "run_passes"]


def run_passes(graph: Graph, options: PassOptions) -> Graph:
    """The graph after all passes; GraphInvalid names the pass that broke it, should one ever."""
    check(graph, after="capture")
    for rewrite in PASSES:
        before, graph = graph, rewrite(graph, options)
        check(graph, after=rewrite.__name__)
        check_interface(before, graph, after=rewrite.__name__)
    return graph
