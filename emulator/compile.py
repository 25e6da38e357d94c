"""From a request to the finished graph: the one door that builds and checks go through."""

from emulator.capture import CaptureRequest, capture
from emulator.graph import Graph
from emulator.passes import PassOptions, run_passes


def compile_graph(request: CaptureRequest, options: PassOptions) -> Graph:
    """The graph after all passes. Its cost does not grow with a model's depth where layers provably repeat."""
    from emulator.capture.depth import compile_by_depth

    def compile_whole(whole: CaptureRequest) -> Graph:
        return run_passes(capture(whole), options)

    return compile_by_depth(request, compile_whole) or compile_whole(request)
