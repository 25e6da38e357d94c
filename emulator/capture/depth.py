"""The graph of a deep model at the price of a shallow one, or a plain no.

A model is built at its full depth, without weights, and captured twice with only the first few of its layers left in
it. Three things together prove that the graph at full depth is the same with a larger count. The layers recur: same
classes, settings, parameters, buffers, and the same entries in every list with one entry a layer. The two captures
differ in the count of a repeat and in nothing else. And the model's run asks for no other setting that counts layers.
"""

from collections.abc import Callable

from nxpipe.emulator.capture.export import capture_built
from nxpipe.emulator.capture.layers import Cut, Shortened, cuts_of
from nxpipe.emulator.capture.model import build_model, tensor_type
from nxpipe.emulator.capture.request import CaptureRequest
from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.repeat import NotResizable, resize

Finish = Callable[[Graph], Graph]


def compile_by_depth(request: CaptureRequest, finish: Finish) -> Graph | None:
    """The graph of the model at its full depth, made of two shallow captures; nothing if that cannot be proven.

    `finish` is what is done to a captured graph: the compiler's passes.
    """
    model = build_model(request)
    cuts = cuts_of(model)
    if not cuts:
        return None
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    weights = {name: tensor_type(tensor) for name, tensor in tensors}
    try:
        longer = Shortened(model, cuts)
        shorter = longer.shorter_still()
        long, short = (finish(capture_built(each.model, request)) for each in (longer, shorter))
        graph = _lengthened(long, short, cuts)
    except (CompileError, NotResizable):
        return None  # the capture at full depth says what is wrong, with the right counts
    named = graph is not None and all(weights.get(name) == value.type for name, value in graph.parameters.items())
    return graph if named else None


def _lengthened(longer: Graph, shorter: Graph, cuts: list[Cut]) -> Graph | None:
    """The graph at full depth, if the two at hand differ in the count of their repeats alone."""
    if resize(longer, {cut.scope: cut.short - cut.long for cut in cuts}).key != shorter.key:
        return None
    return resize(longer, {cut.scope: cut.depth - cut.long for cut in cuts})
