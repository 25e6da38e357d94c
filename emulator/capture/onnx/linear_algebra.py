"""ONNX importers: matrix products, normalisations, softmax, reductions, recurrent layers.

A recurrent layer is unrolled; the inputs of all steps are multiplied by their weights in one matmul.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nxpipe.emulator.capture.composites import einsum, matrix_product, vector_product
from nxpipe.emulator.capture.onnx.base import IMPORTERS, OnnxSite, axis_in, imports
from nxpipe.emulator.capture.site import NotExpressible, present
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.ops import ArgReduce, Concat, Iota, LayerNorm, Linear, Reduce, RmsNorm, Softmax, Transpose, Where


@imports("MatMul")
def matmul(site: OnnxSite, a: Value, b: Value) -> Value:
    return vector_product(site, a, b, a.type.dtype)


@imports("Einsum")
def einsum_(site: OnnxSite, *operands: Value) -> Value:
    return einsum(site, site.attribute("equation"), operands, operands[0].type.dtype)


@imports("Gemm")
def gemm(site: OnnxSite, a: Value, b: Value, c: Value | None = None) -> Value:
    alpha, beta = site.attribute("alpha", 1.0), site.attribute("beta", 1.0)
    rows = site.emit(Transpose((1, 0)), a) if site.attribute("transA", 0) else a
    weight = b if site.attribute("transB", 0) else site.emit(Transpose((1, 0)), b)
    if alpha == beta == 1 and c is not None and c.type.shape == weight.type.shape[:1] and c.type.dtype.is_float:
        return site.emit(Linear(a.type.dtype), rows, weight, c)
    if a.type.dtype.is_float:
        product = site.emit(Linear(a.type.dtype), rows, weight)
    else:
        product = matrix_product(site, rows, site.emit(Transpose((1, 0)), weight), a.type.dtype)
    scaled = product if alpha == 1 else site.binary("multiply", product, site.like(product, alpha))
    if c is None:
        return scaled
    return site.binary("add", scaled, c if beta == 1 else site.binary("multiply", c, site.like(c, beta)))


@imports("Softmax", "LogSoftmax")
def softmax(site: OnnxSite, x: Value) -> Value:
    """Before operator set 13 the softmax is over all axes from `axis` on, flattened."""
    log = site.operator == "LogSoftmax"
    if site.opset >= 13:
        return site.emit(Softmax(site.axis(x, -1), log), x)
    axis = site.axis(x, 1)
    flat = site.reshape(x, (math.prod(x.type.shape[:axis]), math.prod(x.type.shape[axis:])))
    return site.reshape(site.emit(Softmax(1, log), flat), x.type.shape)


@imports("Hardmax")
def hardmax(site: OnnxSite, x: Value) -> Value:
    """One at the first maximum, zero elsewhere."""
    axis = site.axis(x, -1)
    first = site.emit(ArgReduce("argmax", axis, True), x)
    numbers = site.emit(Iota(x.type.shape[axis], 0, 1, DType.INT64))
    indices = site.reshape(numbers, (x.type.shape[axis], *[1] * (x.type.rank - axis - 1)))
    return site.cast(site.binary("equal", indices, first), x.type.dtype)


@imports("LayerNormalization")
def layer_norm(site: OnnxSite, x: Value, scale: Value, bias: Value | None = None) -> list[Value]:
    axis = site.axis(x, -1)
    if scale.type.shape != x.type.shape[axis:]:
        raise NotExpressible("its scale does not cover the normalised axes; broadcast it")
    epsilon = float(site.attribute("epsilon", 1e-5))
    normal = site.emit(LayerNorm(x.type.rank - axis, epsilon), *present([x, scale, bias]))
    if site.result_count == 1:
        return [normal]
    over = tuple(range(axis, x.type.rank))
    wide = site.cast(x, DType.FLOAT32)
    mean = site.emit(Reduce("mean", over, True), wide)
    centred = site.binary("subtract", wide, mean)
    variance = site.emit(Reduce("mean", over, True), site.binary("multiply", centred, centred))
    return [normal, mean, site.unary("rsqrt", site.binary("add", variance, epsilon))]


@imports("RMSNormalization")
def rms_norm(site: OnnxSite, x: Value, scale: Value) -> Value:
    axis = site.axis(x, -1)
    op = RmsNorm(x.type.rank - axis, float(site.attribute("epsilon", 1e-5)))
    if scale.type.shape == x.type.shape[axis:]:
        return site.emit(op, x, scale)
    return site.binary("multiply", site.emit(op, x), scale)


def _grouped_norm(site: OnnxSite, x: Value, groups: int, default: float) -> Value:
    """x normalised to zero mean and unit variance in each group of channels, in float32."""
    batch = x.type.shape[0]
    wide = site.cast(x, DType.FLOAT32)
    flat = site.reshape(wide, (batch, groups, x.type.elements // max(batch * groups, 1)))
    return site.reshape(site.emit(LayerNorm(1, float(site.attribute("epsilon", default))), flat), x.type.shape)


def _by_channel(site: OnnxSite, parameter: Value, x: Value) -> Value:
    return site.reshape(parameter, (parameter.type.elements, *[1] * (x.type.rank - 2)))


def _scaled(site: OnnxSite, normal: Value, x: Value, scale: Value, bias: Value) -> Value:
    product = site.binary("multiply", normal, _by_channel(site, scale, x))
    return site.cast(site.binary("add", product, _by_channel(site, bias, x)), x.type.dtype)


@imports("InstanceNormalization")
def instance_norm(site: OnnxSite, x: Value, scale: Value, bias: Value) -> Value:
    return _scaled(site, _grouped_norm(site, x, x.type.shape[1], 1e-5), x, scale, bias)


@imports("GroupNormalization")
def group_norm(site: OnnxSite, x: Value, scale: Value, bias: Value) -> Value:
    channels, groups = x.type.shape[1], site.attribute("num_groups")
    if scale.type.elements == groups != channels:  # before operator set 21: one per group
        size = channels // groups
        scale, bias = (
            site.reshape(site.broadcast(site.reshape(part, (groups, 1)), (groups, size)), (channels,))
            for part in (scale, bias)
        )
    return _scaled(site, _grouped_norm(site, x, groups, 1e-5), x, scale, bias)


@imports("BatchNormalization")
def batch_norm(site: OnnxSite, x: Value, scale: Value, bias: Value, mean: Value, variance: Value) -> list[Value]:
    """Batch normalisation; in training mode by batch statistics, and the running statistics are results."""
    running: list[Value] = []
    if site.attribute("training_mode", 0):
        others = tuple(axis for axis in range(x.type.rank) if axis != 1)
        wide = site.cast(x, DType.FLOAT32)
        own = site.emit(Reduce("mean", others, False), wide)
        centred = site.binary("subtract", wide, _by_channel(site, own, x))
        spread = site.emit(Reduce("mean", others, False), site.binary("multiply", centred, centred))
        running = [_running_average(site, mean, own), _running_average(site, variance, spread)]
        mean, variance = own, spread
    epsilon = site.attribute("epsilon", 1e-5)
    deviation = site.unary("rsqrt", site.binary("add", site.cast(variance, DType.FLOAT32), epsilon))
    factor = site.binary("multiply", deviation, scale)
    centred = site.binary("subtract", x, _by_channel(site, mean, x))
    return [_scaled(site, centred, x, factor, bias), *running]


def _running_average(site: OnnxSite, running: Value, own: Value) -> Value:
    momentum = site.attribute("momentum", 0.9)
    kept = site.binary("multiply", running, site.like(running, momentum))
    return site.cast(site.binary("add", kept, site.binary("multiply", own, 1 - momentum)), running.type.dtype)


@imports("LpNormalization")
def lp_norm(site: OnnxSite, x: Value) -> Value:
    """Division by the norm; a zero norm gives zeros."""
    axis = site.axis(x, -1)
    if site.attribute("p", 2) == 1:
        length = site.emit(Reduce("sum", (axis,), True), site.unary("abs", x))
    else:
        length = site.unary("sqrt", site.emit(Reduce("sum", (axis,), True), site.binary("multiply", x, x)))
    empty = site.cast(site.binary("equal", length, site.like(length, 0)), length.type.dtype)
    return site.binary("divide", x, site.binary("add", length, empty))


def _axes(site: OnnxSite, x: Value, axes: Value | None) -> tuple[int, ...]:
    """The sorted axes of a reduction; without any, all axes, or none with `noop_with_empty_axes`."""
    chosen = site.numbers("axes", axes, [])
    if not chosen:
        return () if site.attribute("noop_with_empty_axes", 0) else tuple(range(x.type.rank))
    return tuple(sorted(axis_in(axis, x.type.rank) for axis in chosen))


def _reduced(site: OnnxSite, function: str, x: Value, over: tuple[int, ...]) -> Value:
    if not over:
        return x
    result = site.emit(Reduce(function, over, bool(site.attribute("keepdims", 1))), x)
    return site.cast(result, x.type.dtype)


def _mapped_sum(site: OnnxSite, x: Value, change: Callable[[Value], Value], over: tuple[int, ...]) -> Value:
    return _reduced(site, "sum", change(x), over)


@imports("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceMean")
def fold(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    function = site.operator.removeprefix("Reduce").lower()
    over = _axes(site, x, axes)
    if x.type.dtype is DType.BOOL:  # max is "or"
        function = {"max": "any", "min": "all"}[function]
    if function in ("max", "min") and any(x.type.shape[axis] == 0 for axis in over):
        shape = [1 if i in over else size for i, size in enumerate(x.type.shape)]
        if not site.attribute("keepdims", 1):
            shape = [size for i, size in enumerate(x.type.shape) if i not in over]
        if not x.type.dtype.is_float:
            raise NotExpressible("it reduces an empty axis of integers by max or min")
        return site.filled(float("-inf") if function == "max" else float("inf"), x.type.with_shape(tuple(shape)))
    if function == "mean" and not x.type.dtype.is_float:
        raise NotExpressible("the mean of integers is not an integer; cast them to float32")
    return _reduced(site, function, x, over)


@imports("ReduceL1")
def l1(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    return _mapped_sum(site, x, lambda v: site.unary("abs", v), _axes(site, x, axes))


@imports("ReduceSumSquare")
def sum_of_squares(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    return _mapped_sum(site, x, lambda v: site.binary("multiply", v, v), _axes(site, x, axes))


@imports("ReduceL2")
def l2(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    return site.cast(site.unary("sqrt", sum_of_squares(site, x, axes)), x.type.dtype)


@imports("ReduceLogSum")
def log_of_sum(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    return site.cast(site.unary("log", _reduced(site, "sum", x, _axes(site, x, axes))), x.type.dtype)


@imports("ReduceLogSumExp")
def log_of_sum_of_exponentials(site: OnnxSite, x: Value, axes: Value | None = None) -> Value:
    """The maximum is subtracted first, so that no exponential overflows."""
    over = _axes(site, x, axes)
    if not over or any(x.type.shape[axis] == 0 for axis in over):
        return site.unary("log", _mapped_sum(site, x, lambda v: site.unary("exp", v), over))
    highest = site.emit(Reduce("max", over, True), x)
    total = _mapped_sum(site, x, lambda v: site.unary("exp", site.binary("subtract", v, highest)), over)
    return site.binary("add", site.unary("log", total), site.reshape(highest, total.type.shape))


_State = tuple[Value, ...]
_ACTIVATIONS = (
    *("Relu", "Tanh", "Sigmoid", "LeakyRelu", "ThresholdedRelu", "HardSigmoid", "Elu", "Softsign", "Softplus"),
)


@dataclass(frozen=True)
class _Cell:
    """One direction of a recurrent layer: its weights and activation functions."""

    site: OnnxSite
    recurrent: Value  # [gates * hidden, hidden]
    bias: Value | None  # of the recurrent product, [gates * hidden]
    peepholes: Value | None
    functions: Sequence[Callable[[Value], Value]]

    @property
    def hidden(self) -> int:
        return self.recurrent.type.shape[1]

    def part(self, x: Value, number: int) -> Value:
        """The slice of the last axis for one gate."""
        return self.site.slice(x, x.type.rank - 1, number * self.hidden, (number + 1) * self.hidden)

    def rows(self, x: Value, start: int, stop: int) -> Value:
        return self.site.slice(x, 0, start * self.hidden, stop * self.hidden)

    def product(self, h: Value, start: int = 0, stop: int | None = None) -> Value:
        """The state times the recurrent weights of gates start to stop, plus their bias."""
        end = self.recurrent.type.shape[0] // self.hidden if stop is None else stop
        bias = () if self.bias is None else (self.rows(self.bias, start, end),)
        return self.site.emit(Linear(h.type.dtype), h, self.rows(self.recurrent, start, end), *bias)


def _rnn(cell: _Cell, x: Value, state: _State) -> _State:
    (h,) = state
    return (cell.functions[0](cell.site.binary("add", x, cell.product(h))),)


def _gru(cell: _Cell, x: Value, state: _State) -> _State:
    """One GRU step. Gates: update, reset, candidate. The reset applies before or after the product with the state."""
    (h,), site = state, cell.site
    gates = cell.product(h, 0, 2)
    update = cell.functions[0](site.binary("add", cell.part(x, 0), cell.part(gates, 0)))
    reset = cell.functions[0](site.binary("add", cell.part(x, 1), cell.part(gates, 1)))
    if site.attribute("linear_before_reset", 0):
        remembered = site.binary("multiply", reset, cell.product(h, 2, 3))
    else:
        remembered = cell.product(site.binary("multiply", reset, h), 2, 3)
    candidate = cell.functions[1](site.binary("add", cell.part(x, 2), remembered))
    old = site.binary("multiply", update, h)
    new = site.binary("multiply", site.binary("subtract", site.like(update, 1), update), candidate)
    return (site.binary("add", new, old),)


def _lstm(cell: _Cell, x: Value, state: _State) -> _State:
    """One LSTM step. Gates: input, output, forget, cell; peepholes add the cell state to the gates."""
    (h, c), site = state, cell.site
    gates = site.binary("add", x, cell.product(h))
    input_, output, forget_, candidate = (cell.part(gates, number) for number in range(4))

    def with_peephole(gate: Value, memory: Value, number: int) -> Value:
        if cell.peepholes is None:
            return gate
        return site.binary("add", gate, site.binary("multiply", cell.part(cell.peepholes, number), memory))

    enter = cell.functions[0](with_peephole(input_, c, 0))
    forget = cell.functions[0](with_peephole(forget_, c, 2))
    if site.attribute("input_forget", 0):
        forget = site.binary("subtract", site.like(enter, 1), enter)
    kept = site.binary("multiply", forget, c)
    memory = site.binary("add", kept, site.binary("multiply", enter, cell.functions[1](candidate)))
    leave = cell.functions[0](with_peephole(output, memory, 1))
    return site.binary("multiply", leave, cell.functions[2](memory)), memory


_STEPS = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}
_DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


@imports("RNN", "GRU", "LSTM")
def recurrent_layer(
    site: OnnxSite,
    x: Value,
    weight: Value,
    recurrent: Value,
    bias: Value | None = None,
    lengths: Value | None = None,
    *more: Value | None,
) -> list[Value]:
    """The outputs of all steps and the last states, in the layout of the node."""
    states = 2 if site.operator == "LSTM" else 1
    by_batch = bool(site.attribute("layout", 0))
    peepholes = more[states] if len(more) > states else None
    if by_batch:
        x = site.emit(Transpose((1, 0, 2)), x)
    hidden, batch = recurrent.type.shape[2], x.type.shape[1]
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    sequences, lasts = [], []
    for number, backwards in enumerate(directions[site.attribute("direction", "forward")]):
        biases = None if bias is None else _row(site, bias, number)
        half = recurrent.type.shape[1]
        of_x, of_h = (
            (None, None) if biases is None else (site.slice(biases, 0, i * half, (i + 1) * half) for i in (0, 1))
        )
        cell = _Cell(
            site,
            _row(site, recurrent, number),
            of_h,
            None if peepholes is None else _row(site, peepholes, number),
            _functions(site, number),
        )
        operands = [x, _row(site, weight, number), *([] if of_x is None else [of_x])]
        gates = site.emit(Linear(x.type.dtype), *operands)
        start = [_start(site, state, number, by_batch, (batch, hidden), x) for state in (*more, None, None)[:states]]
        outputs, last = _along_time(cell, gates, tuple(start), lengths, backwards)
        sequences.append(outputs)
        lasts.append(last)
    return _in_layout(site, sequences, lasts, by_batch)


def _row(site: OnnxSite, x: Value, number: int) -> Value:
    return site.reshape(site.slice(x, 0, number, number + 1), x.type.shape[1:])


def _start(site: OnnxSite, state: Value | None, number: int, by_batch: bool, shape: tuple[int, ...], x: Value) -> Value:
    """The initial state of one direction; zeros if it is absent."""
    if state is None:
        return site.filled(0, x.type.with_shape(shape))
    return _row(site, site.emit(Transpose((1, 0, 2)), state) if by_batch else state, number)


def _along_time(
    cell: _Cell, gates: Value, state: _State, lengths: Value | None, backwards: bool
) -> tuple[list[Value], _State]:
    """The outputs of all steps and the last state. Rows beyond their length keep their state and output zeros."""
    site, count = cell.site, gates.type.shape[0]
    outputs: list[Value] = []
    for time in range(count)[:: -1 if backwards else 1]:
        after = _STEPS[site.operator](cell, _row(site, gates, time), state)
        if lengths is None:
            state, output = after, after[0]
        else:
            active = site.reshape(site.binary("less", site.like(lengths, time), lengths), (lengths.type.elements, 1))
            state = tuple(site.emit(Where(), active, new, old) for new, old in zip(after, state, strict=True))
            output = site.emit(Where(), active, after[0], site.like(after[0], 0))
        outputs.append(output)
    return outputs[:: -1 if backwards else 1], state


def _in_layout(
    site: OnnxSite, sequences: Sequence[Sequence[Value]], lasts: Sequence[_State], by_batch: bool
) -> list[Value]:
    """[time, direction, batch, hidden] and [direction, batch, hidden]; batch first with `layout` 1."""

    def joined(parts: Sequence[Value]) -> Value:
        return site.emit(Concat(0), *(site.reshape(part, (1, *part.type.shape)) for part in parts))

    whole = joined([joined(step) for step in zip(*sequences, strict=True)])
    ends = [joined(parts) for parts in zip(*lasts, strict=True)]
    if not by_batch:
        return [whole, *ends]
    return [site.emit(Transpose((2, 0, 1, 3)), whole), *(site.emit(Transpose((1, 0, 2)), end) for end in ends)]


def _functions(site: OnnxSite, direction: int) -> list[Callable[[Value], Value]]:
    """The activations of one direction, after the optional clip."""
    defaults = _DEFAULTS[site.operator]
    names = site.attribute("activations", defaults * (direction + 1))[direction * len(defaults) :]
    settings = [site.attribute(f"activation_{name}", [])[direction * len(defaults) :] for name in ("alpha", "beta")]
    return [
        _function(site, name, *(values[index] if index < len(values) else None for values in settings))
        for index, name in enumerate(names[: len(defaults)])
    ]


def _function(site: OnnxSite, name: str, alpha: float | None, beta: float | None) -> Callable[[Value], Value]:
    if name not in _ACTIVATIONS:
        raise NotExpressible(f"its activation {name} has no counterpart; use one of {', '.join(_ACTIVATIONS)}")
    attributes = {key: number for key, number in (("alpha", alpha), ("beta", beta)) if number is not None}
    activation = replace(site, operator=name, attributes=attributes)
    limit = site.attribute("clip")

    def apply(x: Value) -> Value:
        if limit is not None:
            x = site.binary("minimum", site.binary("maximum", x, site.like(x, -limit)), site.like(x, limit))
        result = IMPORTERS[name](activation, x)
        assert isinstance(result, Value)
        return result

    return apply
