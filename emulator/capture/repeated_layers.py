"""Capture of a deep model at the cost of a shallow one, where its layers provably repeat.

A model is built at full depth, without weights, and captured twice with only the first few of its layers. Three facts
together prove that the graph at full depth is the same with a larger repeat count. The layers recur: same classes,
settings, parameters, buffers, and equal entries in every per-layer list. The two captures differ in the count of a
repeat and in nothing else. And the model's run reads no other setting that counts layers.
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

# Settings and attributes that count layers, that number one, and that matter in training only.
_COUNTS_LAYERS = re.compile(r"layer|depth|block")
_NUMBERS_A_LAYER = re.compile(r"(layer|block)_?(idx|index|id|num|number)$|^idx$|_idx$")
_TRAINING_ONLY = re.compile(r"drop|training|gradient_checkpointing")

_LONGEST_PERIOD = 12
_MOST_SPECIAL_LAYERS = 4  # at the front, before layers recur
_WORTHWHILE = 0.75  # of the modules of a full capture: what two shallow ones may run


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
        """The special layers, a period or two, and as many layers as the full depth has beside whole periods."""
        periods = 2 if self.period < 3 else 1
        return self.special + (self.depth - self.special) % self.period + periods * self.period

    @property
    def long(self) -> int:
        return self.short + self.period

    @property
    def way(self) -> tuple[int, int, int]:
        return self.depth, self.special, self.period


def find_cuts(model: Any) -> list[Cut]:
    """The stacks to cut; empty if that saves nothing, or if two of one depth are not alike.

    One number in a configuration may stand for all stacks of its depth.
    """
    stacks = {path: module for path, module in model.named_modules() if _is_stack(module)}
    configs = _configurations(model)
    cuts: list[Cut] = []
    for path, stack in stacks.items():
        if not any(path.startswith(cut.scope) for cut in cuts) and (cut := _cut(path, stack, configs)):
            cuts.append(cut)
    depths = {cut.depth for cut in cuts}
    of_these_depths = [path for path, stack in stacks.items() if len(stack) in depths]
    alike = len(of_these_depths) == len(cuts) and len({cut.way for cut in cuts}) == len(depths)
    return cuts if alike and _saves_work(model, cuts, stacks) else []


class ShortenedModel:
    """A model with the first layers of its stacks only, and every setting that counts them changed to match.

    A setting that may count other layers is replaced by a sentinel: a model whose run asks for it cannot be captured.
    """

    def __init__(self, model: Any, cuts: Sequence[Cut]) -> None:
        self.model = model
        self._cuts = list(cuts)
        self._counts: list[tuple[Any, str, Any, int]] = []
        for owner in (*model.modules(), *_configurations(model)):
            self._find_counts(owner)
        self._keep({cut.depth: cut.long for cut in cuts})

    def shorter_still(self) -> "ShortenedModel":
        """A copy with one period less of each stack."""
        try:
            shorter = copy.deepcopy(self)
        except Exception as fault:  # third-party code: whatever it raises is a reason why there is no copy
            raise CaptureError(f"{type(self.model).__name__} cannot be copied: {fault}") from fault
        shorter._keep({cut.depth: cut.short for cut in self._cuts})
        return shorter

    def _keep(self, kept: Mapping[int, int]) -> None:
        """The first so many layers, by a stack's full depth."""
        for cut in self._cuts:
            del self.model.get_submodule(cut.path)[kept[cut.depth] :]
        for owner, name, value, depth in self._counts:
            vars(owner)[name] = kept[depth] if isinstance(value, int) else value[: kept[depth]]

    def _find_counts(self, owner: Any) -> None:
        longest, depths = min(cut.long for cut in self._cuts), {cut.depth for cut in self._cuts}
        for name, value in list(vars(owner).items()):
            if name.startswith("_") or _NUMBERS_A_LAYER.search(name):
                continue
            named = bool(_COUNTS_LAYERS.search(name))
            if isinstance(value, list | tuple) and len(value) in depths:
                self._counts.append((owner, name, value, len(value)))
            elif named and type(value) is int and value in depths:
                self._counts.append((owner, name, value, value))
            elif named and type(value) is int and longest <= value < max(depths):
                vars(owner)[name] = _Unanswerable(f"{type(owner).__name__}.{name}")


class _Unanswerable:
    """Stands for a setting that the run of a shortened model must not depend on."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object) -> NoReturn:
        raise CaptureError(f"the model's run depends on {self._name}, which counts layers")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __hash__ = _refuse


def _is_stack(module: Any) -> bool:
    return isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)


def _configurations(model: Any) -> list[Any]:
    """The configuration objects that any module holds, and those inside them."""
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if isinstance(config, transformers.PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            for inner in vars(config).values():
                visit(inner)

    for module in model.modules():
        visit(vars(module).get("config"))
    return list(found.values())


def _cut(path: str, stack: Any, configs: Sequence[Any]) -> Cut | None:
    lists = [value for config in configs for value in vars(config).values() if _has_length(value, len(stack))]
    layers = [(_portrait(layer, number), [row[number] for row in lists]) for number, layer in enumerate(stack)]
    recurring = _recurrence(layers)
    cut = Cut(path, len(stack), *recurring) if recurring else None
    return cut if cut and cut.long < cut.depth else None


def _has_length(value: object, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


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


def _saves_work(model: Any, cuts: Sequence[Cut], stacks: Mapping[str, Any]) -> bool:
    """Whether both captures together run far fewer modules than the full one; each capture has a cost of its own."""
    sizes = [(cut, sum(1 for _ in stacks[cut.path][-1].modules())) for cut in cuts]
    whole = sum(1 for _ in model.modules())
    left_out = sum(size * (2 * cut.depth - cut.short - cut.long) for cut, size in sizes)
    return 2 * whole - left_out < _WORTHWHILE * whole


def _portrait(module: Any, number: int) -> object:
    """All that decides what a module computes, beside its code and its configuration; layer `number` is called zero."""
    children = [(name, _portrait(child, number)) for name, child in module.named_children()]
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
    """A setting as text; of objects only the kind, because a configuration is compared elsewhere."""
    if type(value) is int and _NUMBERS_A_LAYER.search(name):
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
    """The graph of the model at its full depth, made of two shallow captures; nothing if that cannot be proven.

    `finish` is what is done to a captured graph: the compiler's passes.
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
