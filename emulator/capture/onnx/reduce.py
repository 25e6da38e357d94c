"""Folds of whole axes."""

from collections.abc import Callable

from nxpipe.emulator.capture.onnx.base import OnnxSite, axis_in, imports
from nxpipe.emulator.capture.site import NotExpressible
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import Reduce


def _axes(site: OnnxSite, x: Value, axes: Value | None) -> tuple[int, ...]:
    """No axes mean all of them, or none where the node says so."""
    chosen = site.numbers("axes", axes, [])
    if not chosen:
        return () if site.attribute("noop_with_empty_axes", 0) else tuple(range(x.type.rank))
    return tuple(sorted(axis_in(axis, x.type.rank) for axis in chosen))


def _folded(site: OnnxSite, function: str, x: Value, over: tuple[int, ...]) -> Value:
    if not over:
        return x
    result = site.emit(Reduce(function, over, bool(site.attribute("keepdims", 1))), x)
    return site.cast(result, x.type.dtype)


def _first(site: OnnxSite, x: Value, change: Callable[[Value], Value], over: tuple[int, ...]) -> Value:
    return _folded(site, "sum", change(x), over)


@imports("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceMean")
def fold(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    function = site.operator.removeprefix("Reduce").lower()
    over = _axes(site, x, axes)
    if x.type.dtype is DType.BOOL:  # the larger of two truths is "or"
        function = {"max": "any", "min": "all"}[function]
    if function in ("max", "min") and any(x.type.shape[axis] == 0 for axis in over):
        shape = [1 if i in over else size for i, size in enumerate(x.type.shape)]
        if not site.attribute("keepdims", 1):
            shape = [size for i, size in enumerate(x.type.shape) if i not in over]
        if not x.type.dtype.is_float:
            raise NotExpressible("it looks for the largest of no integers")
        return site.filled(float("-inf") if function == "max" else float("inf"), x.type.with_shape(tuple(shape)))
    if function == "mean" and not x.type.dtype.is_float:
        raise NotExpressible("the mean of integers is none; cast them to float32")
    return _folded(site, function, x, over)


@imports("ReduceL1")
def l1(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    return _first(site, x, lambda v: site.unary("abs", v), _axes(site, x, axes))


@imports("ReduceSumSquare")
def sum_of_squares(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    return _first(site, x, lambda v: site.binary("multiply", v, v), _axes(site, x, axes))


@imports("ReduceL2")
def l2(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    return site.cast(site.unary("sqrt", sum_of_squares(site, x, axes)), x.type.dtype)


@imports("ReduceLogSum")
def log_of_sum(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    return site.cast(site.unary("log", _folded(site, "sum", x, _axes(site, x, axes))), x.type.dtype)


@imports("ReduceLogSumExp")
def log_of_sum_of_exponentials(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    """The largest is taken out first, so that no exponential overflows."""
    over = _axes(site, x, axes)
    if not over or any(x.type.shape[axis] == 0 for axis in over):
        return site.unary("log", _first(site, x, lambda v: site.unary("exp", v), over))
    highest = site.emit(Reduce("max", over, True), x)
    rest = _first(site, x, lambda v: site.unary("exp", site.binary("subtract", v, highest)), over)
    return site.binary("add", site.unary("log", rest), site.reshape(highest, rest.type.shape))
