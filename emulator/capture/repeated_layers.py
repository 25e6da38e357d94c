"""Capture of a deep model at the cost of a shallow one, where its layers provably repeat.

The model is built at full depth, without weights, and captured at two smaller depths. Three facts together prove that
the graph at full depth differs only in its repeat count. First, the layers recur: equal classes, settings, parameters,
buffers, and entries in every per-layer list. Second, the two captures differ only in the count of a repeat. Third, the
forward pass reads no other setting that counts layers.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import transformers

from nxpipe.emulator.capture.export import capture_built
from nxpipe.emulator.capture.model import build_model, tensor_type
from nxpipe.emulator.capture.request import CaptureRequest
from nxpipe.emulator.errors import CaptureError, CompileError
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.repeat import NotResizable, resize

# Settings and attributes that count layers, that are the index of a layer, and that matter only in training.
_COUNTS_LAYERS = re.compile(r"layer|depth|block")
_LAYER_INDEX = re.compile(r"(layer|block)_?(idx|index|id|num|number)$|^idx$|_idx$")
_TRAINING_ONLY = re.compile(r"drop|training|gradient_checkpointing")

_LONGEST_PERIOD = 12
_MOST_SPECIAL_LAYERS = 4  # at the front, before layers recur
_WORTHWHILE = 0.75  # most modules that two shallow captures may run, as a fraction of a full capture


@dataclass(frozen=True)
class Cut:
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
        """The shorter depth: the special layers, one or two periods, and the remainder of the depth by the period."""
        periods = 2 if self.period < 3 else 1
        return self.special + (self.depth - self.special) % self.period + periods * self.period

    @property
    def long(self) -> int:
        """The longer depth: one period more."""
        return self.short + self.period

    @property
    def pattern(self) -> tuple[int, int, int]:
        return self.depth, self.special, self.period


def find_cuts(model: Any) -> list[Cut]:
    """The stacks to cut; empty if that saves no work, or if two stacks of equal depth have different patterns.

    One number of a configuration may be the depth of several stacks.
    """
    stacks = {path: module for path, module in model.named_modules() if _is_stack(module)}
    configs = _configurations(model)
    cuts: list[Cut] = []
    for path, stack in stacks.items():
        if not any(path.startswith(cut.scope) for cut in cuts) and (cut := _cut(path, stack, configs)):
            cuts.append(cut)
    depths = {cut.depth for cut in cuts}
    of_these_depths = [path for path, stack in stacks.items() if len(stack) in depths]
    uniform = len(of_these_depths) == len(cuts) and len({cut.pattern for cut in cuts}) == len(depths)
    return cuts if uniform and _saves_work(model, cuts, stacks) else []


class ShortenedModel:
    """A model with only the first layers of its stacks, and every setting that counts them reduced to match.

    A setting that may count other layers is replaced by a sentinel: a model that reads it cannot be captured.
    """

    def __init__(self, model: Any, cuts: Sequence[Cut]) -> None:
        self.model = model
        self._cuts = list(cuts)
        self._counts: list[tuple[Any, str, Any, int]] = []
        for owner in (*model.modules(), *_configurations(model)):
            self._find_counts(owner)
        self._truncate({cut.depth: cut.long for cut in cuts})

    def shorter_still(self) -> "ShortenedModel":
        """A copy with one period less in each stack."""
        try:
            shorter = copy.deepcopy(self)
        except Exception as fault:  # third-party code may raise any exception
            raise CaptureError(f"{type(self.model).__name__} cannot be copied: {fault}") from fault
        shorter._truncate({cut.depth: cut.short for cut in self._cuts})
        return shorter

    def _truncate(self, lengths: Mapping[int, int]) -> None:
        """Keep the first layers of each stack: full depth to number of layers."""
        for cut in self._cuts:
            del self.model.get_submodule(cut.path)[lengths[cut.depth] :]
        for owner, name, value, depth in self._counts:
            vars(owner)[name] = lengths[depth] if isinstance(value, int) else value[: lengths[depth]]

    def _find_counts(self, owner: Any) -> None:
        longest, depths = min(cut.long for cut in self._cuts), {cut.depth for cut in self._cuts}
        for name, value in list(vars(owner).items()):
            if name.startswith("_") or _LAYER_INDEX.search(name):
                continue
            counts_layers = bool(_COUNTS_LAYERS.search(name))
            if isinstance(value, list | tuple) and len(value) in depths:
                self._counts.append((owner, name, value, len(value)))
            elif counts_layers and type(value) is int and value in depths:
                self._counts.append((owner, name, value, value))
            elif counts_layers and type(value) is int and longest <= value < max(depths):
                vars(owner)[name] = _UnreadableSetting(f"{type(owner).__name__}.{name}")


class _UnreadableSetting:
    """Sentinel for a setting that the forward pass of a shortened model must not read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object) -> NoReturn:
        raise CaptureError(f"the model's forward depends on {self._name}, which counts layers")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __hash__ = _refuse


def _is_stack(module: Any) -> bool:
    return isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)


def _configurations(model: Any) -> list[Any]:
    """The configuration objects of all modules, and those nested in them."""
    configurations: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if isinstance(config, transformers.PreTrainedConfig) and id(config) not in configurations:
            configurations[id(config)] = config
            for inner in vars(config).values():
                visit(inner)

    for module in model.modules():
        visit(vars(module).get("config"))
    return list(configurations.values())


def _cut(path: str, stack: Any, configs: Sequence[Any]) -> Cut | None:
    lists = [value for config in configs for value in vars(config).values() if _has_length(value, len(stack))]
    layers = [(_fingerprint(layer, number), [row[number] for row in lists]) for number, layer in enumerate(stack)]
    recurring = _recurrence(layers)
    cut = Cut(path, len(stack), *recurring) if recurring else None
    return cut if cut and cut.long < cut.depth else None


def _has_length(value: object, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _recurrence(layers: Sequence[object]) -> tuple[int, int] | None:
    """The number of special layers at the front and the period of the others; the pair that needs the fewest layers."""
    pairs = [
        (special, period)
        for period in range(1, _LONGEST_PERIOD + 1)
        for special in range(_MOST_SPECIAL_LAYERS + 1)
        if special + 2 * period <= len(layers)
        and all(layers[i] == layers[i + period] for i in range(special, len(layers) - period))
    ]
    return min(pairs, key=lambda pair: pair[0] + 2 * pair[1], default=None)


def _saves_work(model: Any, cuts: Sequence[Cut], stacks: Mapping[str, Any]) -> bool:
    """True if both captures together run far fewer modules than the full one; each capture has a fixed cost."""
    sizes = [(cut, sum(1 for _ in stacks[cut.path][-1].modules())) for cut in cuts]
    whole = sum(1 for _ in model.modules())
    omitted = sum(size * (2 * cut.depth - cut.short - cut.long) for cut, size in sizes)
    return 2 * whole - omitted < _WORTHWHILE * whole


def _fingerprint(module: Any, number: int) -> object:
    """The settings and tensors that determine a module's result, apart from its code and its configuration; indices are
    relative to layer `number`."""
    children = [(name, _fingerprint(child, number)) for name, child in module.named_children()]
    settings = sorted(
        (name, _plain(name, value, number))
        for name, value in vars(module).items()
        if not name.startswith("_") and not _TRAINING_ONLY.search(name)
    )
    return type(module), settings, list(_tensors(module)), children


def _tensors(module: Any) -> Iterator[object]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None:
            yield name, None
        elif tensor.is_meta:
            yield name, tensor_type(tensor)
        else:
            numbers = tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
            yield name, tensor_type(tensor), numbers


def _plain(name: str, value: object, number: int) -> str:
    """A setting as text; for objects only the class, because configurations are compared separately."""
    if type(value) is int and _LAYER_INDEX.search(name):
        return str(value - number)
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        return repr([_plain(name, part, number) for part in value])
    if isinstance(value, set | frozenset):
        return repr(sorted(_plain(name, part, number) for part in value))
    if isinstance(value, Mapping):
        return repr(sorted((str(key), _plain(name, part, number)) for key, part in value.items()))
    return str(getattr(value, "__qualname__", type(value).__qualname__))


Finish = Callable[[Graph], Graph]


def compile_by_depth(request: CaptureRequest, finish: Finish) -> Graph | None:
    """The graph of the model at full depth, from two shallow captures; None if the layers do not provably repeat.

    `finish` runs the compiler's passes on a captured graph.
    """
    model = build_model(request)
    cuts = find_cuts(model)
    if not cuts:
        return None
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    weights = {name: tensor_type(tensor) for name, tensor in tensors}
    try:
        longer = ShortenedModel(model, cuts)
        shorter = longer.shorter_still()
        long, short = (finish(capture_built(shortened.model, request)) for shortened in (longer, shorter))
        graph = _extend(long, short, cuts)
    except (CompileError, NotResizable):
        return None  # the capture at full depth raises the error, with the right counts
    matches = graph is not None and all(weights.get(name) == value.type for name, value in graph.parameters.items())
    return graph if matches else None


def _extend(longer: Graph, shorter: Graph, cuts: list[Cut]) -> Graph | None:
    """The graph at full depth; None if the two graphs differ in more than the counts of their repeats."""
    if resize(longer, {cut.scope: cut.short - cut.long for cut in cuts}).key != shorter.key:
        return None
    return resize(longer, {cut.scope: cut.depth - cut.long for cut in cuts})
