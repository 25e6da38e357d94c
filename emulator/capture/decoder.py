"""Decoder as two pure functions over a KV cache: prefill reads a prompt, decode reads one token.

The static cache of transformers keeps its tensors to itself and writes them in place. Here the cache's layers are
arguments of a call, a write makes new tensors, and those are results: the state of a compiled program. The rows of a
batch have independent positions: prompts are padded on the right, and `position` gives each row's write position.
Attention never reads beyond a row's position, so nothing else needs masking.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from nxpipe.emulator.capture.model import tensor_type
from nxpipe.emulator.capture.request import CaptureRequest
from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.ir.types import DType, TensorType

# A number of tokens that no other axis of a cache is likely to have, to recognise the axis of tokens by.
_PROBE = 5


def step_input_types(request: CaptureRequest) -> dict[str, TensorType]:
    """What a step reads beside the cache."""
    if request.phase == "decode":
        shapes = {"input_ids": (request.batch, 1), "position": (request.batch,)}
    else:
        shapes = dict.fromkeys(("input_ids", "attention_mask"), (request.batch, request.sequence))
    return {name: TensorType(shape, DType.INT64) for name, shape in shapes.items()}


def cache_types(model: Any, request: CaptureRequest, ids: Any) -> dict[str, TensorType]:
    """The types of the tensors in the model's cache, found by letting it read a few tokens.

    `ids` is a fake tensor of at least one row and token; the model's parameters are fakes of the same mode.
    """
    probe = ids.new_zeros((request.batch, _PROBE))
    found = model(input_ids=probe, use_cache=True).get("past_key_values")
    if not isinstance(found, Cache):
        raise CaptureError(f"{type(model).__name__} keeps no cache of keys and values; use phase 'forward'")
    types = {}
    for position, layer in enumerate(found.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            kind = type(layer).__name__
            raise CaptureError(f"layer {position} of {type(model).__name__} keeps a {kind}, not keys and values alone")
        for role, tensor in (("key", layer.keys), ("value", layer.values)):
            seen = min(_PROBE, getattr(layer, "sliding_window", _PROBE + 1) - 1)
            types[state_name(position, role)] = _grown(position, role, tensor_type(tensor), seen, request)
    return types


def state_name(layer: int, role: str) -> str:
    return f"cache.{layer}.{role}"


def _grown(layer: int, role: str, probed: TensorType, seen: int, request: CaptureRequest) -> TensorType:
    """A layer that looks back a few tokens only is given all places too: one rule for every layer's places."""
    shape = probed.shape
    if len(shape) != 4 or shape[0] != request.batch or shape[2] != seen:
        raise CaptureError(
            f"the {role} that layer {layer} keeps after {_PROBE} tokens in {request.batch} rows has shape "
            f"{list(shape)}, where [rows, heads, tokens, width] was expected"
        )
    return probed.with_shape((*shape[:2], request.cache_length, shape[3]))


def make_stepwise(model: Any, request: CaptureRequest) -> None:
    """Make the model's forward a step: from tokens, places and cache to the last token's logits and the new cache.

    The forward is replaced rather than wrapped in a module, so that parameters and modules keep their names.
    """
    whole = model.forward
    read = _decode if request.phase == "decode" else _prefill

    def step(**arguments: Any) -> dict[str, Any]:
        return read(model, whole, flatten_arguments(arguments))

    model.forward = step


def group_arguments(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the exporter, whose own code needs identifiers: names with dots share one dictionary."""
    arguments: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if "." not in name}
    states = {name: tensor for name, tensor in tensors.items() if "." in name}
    return arguments | ({"cache": states} if states else {})


def flatten_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of `grouped` arguments again; flat ones stay as they are."""
    parts = (value.items() if isinstance(value, Mapping) else [(name, value)] for name, value in arguments.items())
    return {name: tensor for part in parts for name, tensor in part}


def _prefill(model: Any, whole: Callable[..., Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Later tokens never change what earlier ones see, so padding on the right needs no mask."""
    ids, mask = tensors["input_ids"], tensors["attention_mask"]
    cache = _StateCache(tensors)
    places = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape)
    last = mask.sum(1) - 1
    with _logits_only_of(model, last, ids.shape[1]):
        output = whole(input_ids=ids, past_key_values=cache, use_cache=True, **_places(model, whole, places))
    logits = output["logits"]
    if logits.shape[1] != 1:  # the model computes its logits in a way of its own
        logits = _row_by_row(logits, last)
    return {"logits": logits, **cache.tensors()}


def _decode(model: Any, whole: Callable[..., Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Models that work with a static cache see its places as they are. The others take the last key for the newest.

    They are shown each row's keys moved up to the end, as in a batch that is padded on the left.
    """
    ids, position = tensors["input_ids"], tensors["position"]
    aligned = not model._can_compile_fullgraph
    cache = _StateCache(tensors, position, aligned)
    places = torch.arange(cache.get_max_length(), device=ids.device)
    seen = places >= places[-1] - position[:, None] if aligned else places <= position[:, None]
    arguments = {"attention_mask": seen.to(torch.int64), **_places(model, whole, position[:, None])}
    with nullcontext() if aligned else _masks_row_by_row():
        output = whole(input_ids=ids, past_key_values=cache, use_cache=True, **arguments)
    return {"logits": output["logits"], **cache.tensors()}


def _places(model: Any, forward: Callable[..., Any], places: Any) -> dict[str, Any]:
    """Positions, for the models that ask for them; those that know distances only need none."""
    if "position_ids" in inspect.signature(forward).parameters:
        return {"position_ids": places}
    if getattr(model.config, "max_position_embeddings", None) is not None:
        raise CaptureError(f"{type(model).__name__} counts positions itself, and takes none for the rows of a batch")
    return {}


def _row_by_row(x: Any, places: Any) -> Any:
    """Of each row, the one element at its own place."""
    return x[torch.arange(x.shape[0], device=x.device), places][:, None]


@contextmanager
def _logits_only_of(model: Any, last: Any, length: int) -> Iterator[None]:
    """Cut all tokens but one before the product with the vocabulary, the largest of a prefill, and not after it."""

    def cut(_: Any, arguments: tuple[Any, ...]) -> Any:
        hidden = arguments[0]
        whole = hidden.ndim == 3 and hidden.shape[1] == length
        return (_row_by_row(hidden, last), *arguments[1:]) if whole else arguments

    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(cut) if head is not None else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


class _StateLayer(DynamicLayer):
    """One layer's keys and values: tensors that came in, replaced by new ones when the layer writes."""

    is_compileable = True

    def __init__(self, keys: Any, values: Any, position: Any, aligned: bool) -> None:
        super().__init__()
        self.keys, self.values, self._position, self._aligned = keys, values, position, aligned
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        self.keys = self._written(self.keys, key_states)
        self.values = self._written(self.values, value_states)
        if self._position is None:  # a prompt attends to itself; the rest of the cache is not its business
            return key_states, value_states
        return self._shown(self.keys), self._shown(self.values)

    def _written(self, held: Any, new: Any) -> Any:
        if self._position is None:
            return torch.slice_scatter(held, new.to(held.dtype), 2, 0, new.shape[2])
        rows = torch.arange(held.shape[0], device=held.device)
        return torch.ops.aten.index_put(held, [rows, None, self._position], new[:, :, 0].to(held.dtype))

    def _shown(self, held: Any) -> Any:
        if not self._aligned:
            return held
        rows, places = (torch.arange(size, device=held.device) for size in (held.shape[0], held.shape[2]))
        moved = (places + self._position[:, None] - places[-1]).clamp(min=0)
        return held[rows[:, None], :, moved].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self._position is None else self.get_max_length()), 0

    def get_seq_length(self) -> Any:
        """How much was seen: a number, or, where rows may differ, a column of them."""
        if self._position is None:
            return 0
        if self._aligned:
            return self.get_max_length() - 1
        return self._position[0] if self._position.shape[0] == 1 else self._position[:, None]

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class _StateCache(Cache):
    """The cache of a call, from the call's arguments; without a position, an empty one to fill."""

    def __init__(self, tensors: Mapping[str, Any], position: Any = None, aligned: bool = False) -> None:
        depth = sum(name.startswith("cache.") for name in tensors) // 2
        states = [(tensors[state_name(i, "key")], tensors[state_name(i, "value")]) for i in range(depth)]
        super().__init__(layers=[_StateLayer(*state, position, aligned) for state in states])

    def get_max_length(self, layer_idx: int = 0) -> int:
        return int(self.layers[layer_idx].get_max_length())

    def tensors(self) -> dict[str, Any]:
        pairs = [(i, (("key", layer.keys), ("value", layer.values))) for i, layer in enumerate(self.layers)]
        return {state_name(i, role): tensor for i, pair in pairs for role, tensor in pair}


@contextmanager
def _masks_row_by_row() -> Iterator[None]:
    """transformers counts a query's place from one offset for all rows; here each row has its own."""
    before = {kind: ALL_MASK_ATTENTION_FUNCTIONS[kind] for kind in ("sdpa", "eager")}
    ALL_MASK_ATTENTION_FUNCTIONS.update({"sdpa": _allowed, "eager": _added})
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS.update(before)


def _allowed(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any, mask_function: Callable[..., Any], **_: Any
) -> Any:
    """Where each query may look: what the model's rule (causal, sliding, chunked) says of the row's true place."""
    device = q_offset.device
    rows, heads = torch.arange(batch_size, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    queries = q_offset.reshape(-1, 1) + torch.arange(q_length, device=device)
    keys = torch.arange(kv_length, device=device)
    allowed = mask_function(rows[:, None, None, None], heads[:, None, None], queries[:, None, :, None], keys)
    return allowed.expand(batch_size, -1, q_length, kv_length)


def _added(*, dtype: Any, **arguments: Any) -> Any:
    """The same, for models that add their mask."""
    allowed = _allowed(**arguments)
    nowhere = torch.finfo(dtype).min
    return torch.where(allowed, torch.zeros((), dtype=dtype), torch.full((), nowhere, dtype=dtype))
