"""The graph of a deep model at the price of a shallow one, or a plain no.

A model of many equal layers is captured twice, cut to a few layers each. Three things together prove that the graph
at full depth is the same with a larger count. The model at full depth, built without weights, consists of layers that
recur: same classes, settings, parameters, buffers, and the same entries in the configuration's lists with one entry a
layer. The two captures differ in the count of a repeat and in nothing else. And no other setting counts layers.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from emulator.capture.model import build_model, tensor_type
from emulator.capture.request import CaptureRequest
from emulator.errors import CompileError
from emulator.graph import Graph
from emulator.resize import NotResizable, resize

# Settings and attributes that count layers, that number one, and that matter in training only.
_COUNTS_LAYERS = re.compile(r"layer|depth|block")
_NUMBERS_A_LAYER = re.compile(r"(layer|block)_?(idx|index|id|num|number)$|^idx$|_idx$")
_TRAINING_ONLY = re.compile(r"drop|training|gradient_checkpointing")

_LONGEST_PERIOD = 12
_MOST_SPECIAL_LAYERS = 4  # at the front, before layers recur

Compile = Callable[[CaptureRequest], Graph]


def compile_by_depth(request: CaptureRequest, compile_whole: Compile) -> Graph | None:
    """The graph of the model at its full depth, made of two shallow captures; nothing if that cannot be proven."""
    model = build_model(request)
    cuts = _cuts(model, request.config)
    if not cuts:
        return None
    known = model.config.to_dict()
    short, long = (
        replace(request, config=_cut_settings(request.config, known, depths))
        for depths in ({cut.depth: cut.short for cut in cuts}, {cut.depth: cut.long for cut in cuts})
    )
    try:
        shorter, longer = compile_whole(short), compile_whole(long)
        differ_in_count_only = resize(longer, {cut.scope: -cut.period for cut in cuts}).key == shorter.key
        if not differ_in_count_only or not _is_the_same_but_shorter(build_model(long), model, cuts):
            return None
        graph = resize(longer, {cut.scope: cut.depth - cut.long for cut in cuts})
    except (CompileError, NotResizable):
        return None  # the capture at full depth says what is wrong, with the right counts
    return graph if _has_the_weights_of(model, graph) else None


@dataclass(frozen=True)
class _Cut:
    """A stack of layers that recur with a period after a few special ones."""

    path: str
    depth: int
    special: int
    period: int

    @property
    def scope(self) -> str:
        return f"{self.path}."

    @property
    def short(self) -> int:
        """The special layers, a period or two, and as many layers as the full depth has beside whole periods."""
        periods = 2 if self.period < 3 else 1
        return self.special + (self.depth - self.special) % self.period + periods * self.period

    @property
    def long(self) -> int:
        return self.short + self.period

    @property
    def is_worthwhile(self) -> bool:
        return self.short + self.long < self.depth


def _cuts(model: Any, config: Mapping[str, object]) -> list[_Cut]:
    """The stacks worth cutting; empty if a setting says something of layers that is not understood."""
    stacks = _stacks(model)
    settings = {**model.config.to_dict(), **config}
    counts = set(_layer_counts(settings).values())
    cuts = [
        cut
        for path, stack in stacks.items()
        if len(stack) in counts and (cut := _cut(path, stack, settings)) and cut.is_worthwhile
    ]
    return cuts if cuts and _is_understood(cuts, stacks, counts) else []


def _cut(path: str, stack: Any, settings: Mapping[str, Any]) -> _Cut | None:
    lists = _lists_by_layer(settings, len(stack))
    layers = [(_portrait(layer, number), [row[number] for row in lists]) for number, layer in enumerate(stack)]
    recurring = _recurrence(layers)
    return _Cut(path, len(stack), *recurring) if recurring else None


def _is_understood(cuts: Sequence[_Cut], stacks: Mapping[str, Any], counts: set[int]) -> bool:
    """Whether the numbers that speak of layers are depths, or too small to mean a layer that the captures lack.

    One number cuts all stacks of its depth, so these must be cut alike.
    """
    lengths = {len(stack) for stack in stacks.values()}
    fewest, deepest = min(cut.short for cut in cuts), max(cut.depth for cut in cuts)
    if any(fewest <= number < deepest and number not in lengths for number in counts):
        return False
    ways = {cut.path: (cut.depth, cut.special, cut.period) for cut in cuts}
    of_cut_depth = [path for path, stack in stacks.items() if len(stack) in {cut.depth for cut in cuts}]
    return ways.keys() == set(of_cut_depth) and len(set(ways.values())) == len({cut.depth for cut in cuts})


def _stacks(model: Any) -> dict[str, Any]:
    """The outermost lists of modules by their paths."""
    stacks: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in stacks):
            stacks[path] = module
    return stacks


def _layer_counts(settings: Mapping[str, Any], path: str = "") -> dict[str, int]:
    """Every whole number among the settings, nested ones too, whose name speaks of layers."""
    found: dict[str, int] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= _layer_counts(value, f"{path}{key}.")
        elif type(value) is int and _COUNTS_LAYERS.search(key):
            found[f"{path}{key}"] = value
    return found


def _lists_by_layer(settings: Mapping[str, Any], depth: int) -> list[Sequence[Any]]:
    found: list[Sequence[Any]] = []
    for value in settings.values():
        if isinstance(value, Mapping):
            found += _lists_by_layer(value, depth)
        elif isinstance(value, list | tuple) and len(value) == depth:
            found.append(value)
    return found


def _recurrence(layers: Sequence[object]) -> tuple[int, int] | None:
    """How many special layers come first, and the period of the others: the pair that needs fewest layers to show."""
    pairs = [
        (special, period)
        for period in range(1, _LONGEST_PERIOD + 1)
        for special in range(_MOST_SPECIAL_LAYERS + 1)
        if special + 2 * period <= len(layers)
        and all(layers[i] == layers[i + period] for i in range(special, len(layers) - period))
    ]
    return min(pairs, key=lambda pair: pair[0] + 2 * pair[1], default=None)


def _cut_settings(given: Mapping[str, Any], known: Mapping[str, Any], depths: Mapping[int, int]) -> dict[str, Any]:
    """The configuration with its numbers of layers, and its lists of one entry a layer, made shorter."""
    changed = dict(given)
    for key, value in {**known, **given}.items():
        if isinstance(value, Mapping):
            nested = _cut_settings(given.get(key) or {}, known.get(key) or {}, depths)
            if nested:
                changed[key] = nested
        elif type(value) is int and value in depths and _COUNTS_LAYERS.search(key):
            changed[key] = depths[value]
        elif key in given and isinstance(value, list | tuple) and len(value) in depths:
            changed[key] = value[: depths[len(value)]]
    return changed


def _is_the_same_but_shorter(shallow: Any, model: Any, cuts: Sequence[_Cut]) -> bool:
    """Whether the shallow model consists of the first layers of the other, and is equal to it beside them."""
    paths = {cut.path for cut in cuts}
    stacks, originals = _stacks(shallow), _stacks(model)
    for path in paths:
        few, many = stacks.get(path, ()), originals[path]
        pairs = zip(few, many, strict=False)
        if not few or any(_portrait(a, i) != _portrait(b, i) for i, (a, b) in enumerate(pairs)):
            return False
    return _portrait(shallow, 0, paths) == _portrait(model, 0, paths)


def _portrait(module: Any, number: int, without: Collection[str] = (), path: str = "") -> object:
    """All that decides what a module computes, beside its code and its configuration; layer `number` is called zero."""
    if path in without:
        return type(module)
    children = [
        (name, _portrait(child, number, without, f"{path}.{name}" if path else name))
        for name, child in module.named_children()
    ]
    settings = sorted(
        (name, _plain(name, value, number))
        for name, value in vars(module).items()
        if not name.startswith("_") and not _TRAINING_ONLY.search(name)
    )
    tensors = [(name, _tensor(tensor)) for name, tensor in (*module._parameters.items(), *module._buffers.items())]
    return type(module), settings, tensors, children


def _plain(name: str, value: object, number: int) -> str:
    """A setting as text; of objects only the kind, because a configuration is compared elsewhere."""
    if type(value) is int and _NUMBERS_A_LAYER.search(name):
        return str(value - number)
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        return repr(sorted(_plain(name, part, number) for part in value))
    if isinstance(value, Mapping):
        return repr(sorted((str(key), _plain(name, part, number)) for key, part in value.items()))
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _tensor(tensor: Any) -> object:
    if tensor is None:
        return None
    numbers = b"" if tensor.is_meta else tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return tensor_type(tensor), numbers


def _has_the_weights_of(model: Any, graph: Graph) -> bool:
    weights = dict((*model.named_parameters(), *model.named_buffers()))
    return all(name in weights and tensor_type(weights[name]) == value.type for name, value in graph.parameters.items())
