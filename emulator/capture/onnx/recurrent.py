"""Recurrent layers, written out step by step; the product with the inputs of all steps is one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nxpipe.emulator.capture.onnx.base import IMPORTERS, OnnxSite, imports
from nxpipe.emulator.capture.site import NotExpressible
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ops import Concat, Linear, Transpose, Where

_State = tuple[Value, ...]
_ACTIVATIONS = (
    *("Relu", "Tanh", "Sigmoid", "LeakyRelu", "ThresholdedRelu", "HardSigmoid", "Elu", "Softsign", "Softplus"),
)


@dataclass(frozen=True)
class _Cell:
    """One direction of a layer: its weights, and the functions that it applies."""

    site: OnnxSite
    recurrent: Value  # [gates * hidden, hidden]
    bias: Value | None  # what the recurrent product adds, [gates * hidden]
    peepholes: Value | None
    functions: Sequence[Callable[[Value], Value]]

    @property
    def hidden(self) -> int:
        return self.recurrent.type.shape[1]

    def part(self, x: Value, number: int) -> Value:
        """One gate's share of the last axis."""
        return self.site.slice(x, x.type.rank - 1, number * self.hidden, (number + 1) * self.hidden)

    def rows(self, x: Value, start: int, stop: int) -> Value:
        return self.site.slice(x, 0, start * self.hidden, stop * self.hidden)

    def product(self, h: Value, start: int = 0, stop: int | None = None) -> Value:
        """The state times the weights of some gates, their bias added."""
        end = self.recurrent.type.shape[0] // self.hidden if stop is None else stop
        bias = () if self.bias is None else (self.rows(self.bias, start, end),)
        return self.site.emit(Linear(h.type.dtype), h, self.rows(self.recurrent, start, end), *bias)


def _rnn(cell: _Cell, x: Value, state: _State) -> _State:
    (h,) = state
    return (cell.functions[0](cell.site.binary("add", x, cell.product(h))),)


def _gru(cell: _Cell, x: Value, state: _State) -> _State:
    """Update, reset, candidate. The reset may come before or after the product with the state."""
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
    """Input, output, forget, cell; peepholes let the gates see the cell."""
    (h, c), site = state, cell.site
    gates = site.binary("add", x, cell.product(h))
    entered, left, forgotten, candidate = (cell.part(gates, number) for number in range(4))

    def seen(gate: Value, memory: Value, number: int) -> Value:
        if cell.peepholes is None:
            return gate
        return site.binary("add", gate, site.binary("multiply", cell.part(cell.peepholes, number), memory))

    enter = cell.functions[0](seen(entered, c, 0))
    forget = cell.functions[0](seen(forgotten, c, 2))
    if site.attribute("input_forget", 0):
        forget = site.binary("subtract", site.like(enter, 1), enter)
    kept = site.binary("multiply", forget, c)
    memory = site.binary("add", kept, site.binary("multiply", enter, cell.functions[1](candidate)))
    leave = cell.functions[0](seen(left, memory, 1))
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
    """Results are the outputs of all steps and the last states, in the layout that the node asks for."""
    states = 2 if site.operator == "LSTM" else 1
    by_batch = bool(site.attribute("layout", 0))
    peepholes = more[states] if len(more) > states else None
    if by_batch:
        x = site.emit(Transpose((1, 0, 2)), x)
    hidden, batch = recurrent.type.shape[2], x.type.shape[1]
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    sequences, lasts = [], []
    for number, backwards in enumerate(directions[site.attribute("direction", "forward")]):
        both = None if bias is None else _row(site, bias, number)
        half = recurrent.type.shape[1]
        of_x, of_h = (None, None) if both is None else (site.slice(both, 0, i * half, (i + 1) * half) for i in (0, 1))
        cell = _Cell(
            site,
            _row(site, recurrent, number),
            of_h,
            None if peepholes is None else _row(site, peepholes, number),
            _functions(site, number),
        )
        operands = [x, _row(site, weight, number), *([] if of_x is None else [of_x])]
        gates = site.emit(Linear(x.type.dtype), *operands)
        start = [_start(site, given, number, by_batch, (batch, hidden), x) for given in (*more, None, None)[:states]]
        outputs, last = _along_time(cell, gates, tuple(start), lengths, backwards)
        sequences.append(outputs)
        lasts.append(last)
    return _laid_out(site, sequences, lasts, by_batch)


def _row(site: OnnxSite, x: Value, number: int) -> Value:
    return site.reshape(site.slice(x, 0, number, number + 1), x.type.shape[1:])


def _start(site: OnnxSite, given: Value | None, number: int, by_batch: bool, shape: tuple[int, ...], x: Value) -> Value:
    if given is None:
        return site.filled(0, x.type.with_shape(shape))
    return _row(site, site.emit(Transpose((1, 0, 2)), given) if by_batch else given, number)


def _along_time(
    cell: _Cell, gates: Value, state: _State, lengths: Value | None, backwards: bool
) -> tuple[list[Value], _State]:
    """Rows that have ended keep their state, and put out zeros."""
    site, count = cell.site, gates.type.shape[0]
    outputs: list[Value] = []
    for time in range(count)[:: -1 if backwards else 1]:
        after = _STEPS[site.operator](cell, _row(site, gates, time), state)
        if lengths is None:
            state, output = after, after[0]
        else:
            alive = site.reshape(site.binary("less", site.like(lengths, time), lengths), (lengths.type.elements, 1))
            state = tuple(site.emit(Where(), alive, new, old) for new, old in zip(after, state, strict=True))
            output = site.emit(Where(), alive, after[0], site.like(after[0], 0))
        outputs.append(output)
    return outputs[:: -1 if backwards else 1], state


def _laid_out(
    site: OnnxSite, sequences: Sequence[Sequence[Value]], lasts: Sequence[_State], by_batch: bool
) -> list[Value]:
    """[time, direction, batch, hidden] and [direction, batch, hidden]; with the batch in front if asked for."""

    def joined(parts: Sequence[Value]) -> Value:
        return site.emit(Concat(0), *(site.reshape(part, (1, *part.type.shape)) for part in parts))

    whole = joined([joined(step) for step in zip(*sequences, strict=True)])
    ends = [joined(parts) for parts in zip(*lasts, strict=True)]
    if not by_batch:
        return [whole, *ends]
    return [site.emit(Transpose((2, 0, 1, 3)), whole), *(site.emit(Transpose((1, 0, 2)), end) for end in ends)]


def _functions(site: OnnxSite, direction: int) -> list[Callable[[Value], Value]]:
    """The activations of one direction, each behind the clip that the node may ask for."""
    defaults = _DEFAULTS[site.operator]
    names = site.attribute("activations", defaults * (direction + 1))[direction * len(defaults) :]
    settings = [site.attribute(f"activation_{name}", [])[direction * len(defaults) :] for name in ("alpha", "beta")]
    return [
        _function(site, name, *(given[place] if place < len(given) else None for given in settings))
        for place, name in enumerate(names[: len(defaults)])
    ]


def _function(site: OnnxSite, name: str, alpha: float | None, beta: float | None) -> Callable[[Value], Value]:
    if name not in _ACTIVATIONS:
        raise NotExpressible(f"its activation {name} has no counterpart; use one of {', '.join(_ACTIVATIONS)}")
    attributes = {key: number for key, number in (("alpha", alpha), ("beta", beta)) if number is not None}
    alone = replace(site, operator=name, attributes=attributes)
    limit = site.attribute("clip")

    def apply(x: Value) -> Value:
        if limit is not None:
            x = site.binary("minimum", site.binary("maximum", x, site.like(x, -limit)), site.like(x, limit))
        result = IMPORTERS[name](alone, x)
        assert isinstance(result, Value)
        return result

    return apply
