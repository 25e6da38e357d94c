"""Decoder as pure functions over a KV cache: prefill reads a prompt, extend a chunk of one, decode one token.

The static cache of transformers owns its tensors and writes them in place. In a step program the KV cache is
functional: its layers are inputs, a write creates new tensors, and these are outputs, which are the state of the
compiled program. The rows of a batch have independent positions: prompts are padded on the right, and `position` is
each row's write position. Attention never reads beyond a row's position, so padding needs no other mask.

An extend reads and writes one `row` of the cache, from `position` on, and leaves the other rows as they are: prompts
are read in chunks while other rows are being decoded, and tokens that the row already holds are not read again.
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

# A number of tokens that identifies the token axis: other axes of a cache are unlikely to have this size.
_PROBE = 5


def step_input_types(request: CaptureRequest) -> dict[str, TensorType]:
    """The inputs of a step, without the KV cache."""
    shapes: dict[str, tuple[int, ...]]
    if request.phase == "decode":
        shapes = {"input_ids": (request.batch, 1), "position": (request.batch,)}
    elif request.phase == "extend":
        shapes = dict.fromkeys(("input_ids", "attention_mask"), (1, request.sequence)) | {"row": (1,), "position": (1,)}
    else:
        shapes = dict.fromkeys(("input_ids", "attention_mask"), (request.batch, request.sequence))
    return {name: TensorType(shape, DType.INT64) for name, shape in shapes.items()}


def cache_types(model: Any, request: CaptureRequest, ids: Any) -> dict[str, TensorType]:
    """The types of the tensors in the model's KV cache, found by a forward pass on a few tokens.

    `ids` is a fake tensor of at least one row and token; the model's parameters are fakes of the same mode.
    """
    probe = ids.new_zeros((request.batch, _PROBE))
    cache = model(input_ids=probe, use_cache=True).get("past_key_values")
    if not isinstance(cache, Cache):
        raise CaptureError(f"{type(model).__name__} has no KV cache; use phase 'forward'")
    types = {}
    for position, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            kind = type(layer).__name__
            raise CaptureError(f"layer {position} of {type(model).__name__} has a {kind}, not only keys and values")
        for role, tensor in (("key", layer.keys), ("value", layer.values)):
            seen = min(_PROBE, getattr(layer, "sliding_window", _PROBE + 1) - 1)
            types[state_name(position, role)] = _full_length_type(position, role, tensor_type(tensor), seen, request)
    return types


def state_name(layer: int, role: str) -> str:
    return f"cache.{layer}.{role}"


def _full_length_type(layer: int, role: str, probed: TensorType, seen: int, request: CaptureRequest) -> TensorType:
    """The type at the full cache length; layers with a sliding window get the full length too."""
    shape = probed.shape
    if len(shape) != 4 or shape[0] != request.batch or shape[2] != seen:
        raise CaptureError(
            f"the {role} in the KV cache of layer {layer} after {_PROBE} tokens in {request.batch} rows has shape "
            f"{list(shape)}, where [rows, heads, tokens, width] was expected"
        )
    return probed.with_shape((*shape[:2], request.cache_length, shape[3]))


def make_stepwise(model: Any, request: CaptureRequest) -> None:
    """Replace the model's forward by a step: from tokens, positions and cache to the last token's logits and the new
    cache.

    `forward` is replaced rather than wrapped in a module, so that parameters and modules keep their names.
    """
    whole = model.forward
    read = {"decode": _decode, "extend": _extend, "prefill": _prefill}[request.phase]

    def step(**arguments: Any) -> dict[str, Any]:
        return read(model, whole, flatten_arguments(arguments))

    model.forward = step


def group_arguments(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for torch.export, which needs identifiers: tensors with dots in their names are in one dictionary."""
    arguments: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if "." not in name}
    states = {name: tensor for name, tensor in tensors.items() if "." in name}
    return arguments | ({"cache": states} if states else {})


def flatten_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `group_arguments`; arguments without a dictionary are returned unchanged."""
    parts = (value.items() if isinstance(value, Mapping) else [(name, value)] for name, value in arguments.items())
    return {name: tensor for part in parts for name, tensor in part}


def _prefill(model: Any, whole: Callable[..., Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A prefill step. Attention is causal, so padding on the right needs no mask."""
    ids, mask = tensors["input_ids"], tensors["attention_mask"]
    cache = _StateCache(tensors)
    positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape)
    last = mask.sum(1) - 1
    with _logits_of_last_token(model, last, ids.shape[1]):
        output = whole(
            input_ids=ids, past_key_values=cache, use_cache=True, **_position_arguments(model, whole, positions)
        )
    logits = output["logits"]
    if logits.shape[1] != 1:  # the model does not compute its logits by the output embeddings alone
        logits = _take_per_row(logits, last)
    return {"logits": logits, **cache.tensors()}


def _decode(model: Any, whole: Callable[..., Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A decode step. Models that support a static cache read it as it is; others take the last key for the newest.

    For these each row's keys are shifted to the end, as in a batch that is padded on the left.
    """
    ids, position = tensors["input_ids"], tensors["position"]
    aligned = not model._can_compile_fullgraph
    cache = _StateCache(tensors, position, aligned)
    positions = torch.arange(cache.get_max_length(), device=ids.device)
    seen = positions >= positions[-1] - position[:, None] if aligned else positions <= position[:, None]
    arguments = {"attention_mask": seen.to(torch.int64), **_position_arguments(model, whole, position[:, None])}
    with nullcontext() if aligned else _per_row_masks():
        output = whole(input_ids=ids, past_key_values=cache, use_cache=True, **arguments)
    return {"logits": output["logits"], **cache.tensors()}


def _extend(model: Any, whole: Callable[..., Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A step that reads the next tokens of one row. Padding is on the right; later tokens overwrite what it leaves."""
    if not model._can_compile_fullgraph:
        raise CaptureError(
            f"{type(model).__name__} takes the last key of its cache for the newest, so it cannot read a chunk of a "
            "prompt; build the phases prefill and decode"
        )
    ids, mask, position = tensors["input_ids"], tensors["attention_mask"], tensors["position"]
    cache = _StateCache(tensors, position, row=tensors["row"])
    seen = torch.ones((1, cache.get_max_length()), dtype=torch.int64, device=ids.device)
    last = mask.sum(1) - 1
    positions = (position + torch.arange(ids.shape[1], device=ids.device))[None]
    arguments = {"attention_mask": seen, **_position_arguments(model, whole, positions)}
    with _per_row_masks(), _logits_of_last_token(model, last, ids.shape[1]):
        output = whole(input_ids=ids, past_key_values=cache, use_cache=True, **arguments)
    logits = output["logits"]
    return {"logits": logits if logits.shape[1] == 1 else _take_per_row(logits, last), **cache.tensors()}


def _position_arguments(model: Any, forward: Callable[..., Any], positions: Any) -> dict[str, Any]:
    """The `position_ids` argument, if the model accepts it; models with relative positions need none."""
    if "position_ids" in inspect.signature(forward).parameters:
        return {"position_ids": positions}
    if getattr(model.config, "max_position_embeddings", None) is not None:
        raise CaptureError(
            f"{type(model).__name__} takes no position_ids, so rows of a batch cannot have different positions"
        )
    return {}


def _take_per_row(x: Any, positions: Any) -> Any:
    """One element of each row, at the row's position."""
    return x[torch.arange(x.shape[0], device=x.device), positions][:, None]


@contextmanager
def _logits_of_last_token(model: Any, last: Any, length: int) -> Iterator[None]:
    """Select the last token before the output embeddings, whose matmul is the largest of a prefill, not after them."""

    def cut(_: Any, arguments: tuple[Any, ...]) -> Any:
        hidden = arguments[0]
        whole = hidden.ndim == 3 and hidden.shape[1] == length
        return (_take_per_row(hidden, last), *arguments[1:]) if whole else arguments

    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(cut) if head is not None else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


class _StateLayer(DynamicLayer):
    """Functional keys and values of one layer: inputs of the step, replaced by new tensors on a write."""

    is_compileable = True

    def __init__(self, keys: Any, values: Any, position: Any, aligned: bool, row: Any) -> None:
        super().__init__()
        self.keys, self.values, self._position, self._aligned, self._row = keys, values, position, aligned, row
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        self.keys = self._write(self.keys, key_states)
        self.values = self._write(self.values, value_states)
        if self._position is None:  # a prompt attends only to itself
            return key_states, value_states
        if self._row is not None:
            return self.keys[self._row], self.values[self._row]
        return self._aligned_rows(self.keys), self._aligned_rows(self.values)

    def _write(self, cached: Any, new: Any) -> Any:
        if self._position is None:
            return torch.slice_scatter(cached, new.to(cached.dtype), 2, 0, new.shape[2])
        if self._row is not None:
            length = new.shape[2]
            rows, positions = self._row.expand(length), self._position + torch.arange(length, device=cached.device)
            return torch.ops.aten.index_put(cached, [rows, None, positions], new[0].transpose(0, 1).to(cached.dtype))
        rows = torch.arange(cached.shape[0], device=cached.device)
        return torch.ops.aten.index_put(cached, [rows, None, self._position], new[:, :, 0].to(cached.dtype))

    def _aligned_rows(self, cached: Any) -> Any:
        if not self._aligned:
            return cached
        rows, positions = (torch.arange(size, device=cached.device) for size in (cached.shape[0], cached.shape[2]))
        shifted = (positions + self._position[:, None] - positions[-1]).clamp(min=0)
        return cached[rows[:, None], :, shifted].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self._position is None else self.get_max_length()), 0

    def get_seq_length(self) -> Any:
        """The number of tokens in the cache; a column of numbers if rows may differ."""
        if self._position is None:
            return 0
        if self._aligned:
            return self.get_max_length() - 1
        return self._position[0] if self._position.shape[0] == 1 else self._position[:, None]

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class _StateCache(Cache):
    """The KV cache of one step, from its arguments; without a position, an empty cache for a prefill; with a row, that
    row of it."""

    def __init__(
        self, tensors: Mapping[str, Any], position: Any = None, aligned: bool = False, row: Any = None
    ) -> None:
        depth = sum(name.startswith("cache.") for name in tensors) // 2
        states = [(tensors[state_name(i, "key")], tensors[state_name(i, "value")]) for i in range(depth)]
        super().__init__(layers=[_StateLayer(*state, position, aligned, row) for state in states])

    def get_max_length(self, layer_idx: int = 0) -> int:
        return int(self.layers[layer_idx].get_max_length())

    def tensors(self) -> dict[str, Any]:
        pairs = [(i, (("key", layer.keys), ("value", layer.values))) for i, layer in enumerate(self.layers)]
        return {state_name(i, role): tensor for i, pair in pairs for role, tensor in pair}


@contextmanager
def _per_row_masks() -> Iterator[None]:
    """Replace transformers' mask functions, which assume one query offset for all rows, by ones with an offset per
    row."""
    before = {kind: ALL_MASK_ATTENTION_FUNCTIONS[kind] for kind in ("sdpa", "eager")}
    ALL_MASK_ATTENTION_FUNCTIONS.update({"sdpa": _boolean_mask, "eager": _additive_mask})
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS.update(before)


def _boolean_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any, mask_function: Callable[..., Any], **_: Any
) -> Any:
    """The boolean mask: the model's mask function (causal, sliding, chunked) at each row's position."""
    device = q_offset.device
    rows, heads = torch.arange(batch_size, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    queries = q_offset.reshape(-1, 1) + torch.arange(q_length, device=device)
    keys = torch.arange(kv_length, device=device)
    allowed = mask_function(rows[:, None, None, None], heads[:, None, None], queries[:, None, :, None], keys)
    return allowed.expand(batch_size, -1, q_length, kv_length)


def _additive_mask(*, dtype: Any, **arguments: Any) -> Any:
    """The additive mask."""
    allowed = _boolean_mask(**arguments)
    lowest = torch.finfo(dtype).min
    return torch.where(allowed, torch.zeros((), dtype=dtype), torch.full((), lowest, dtype=dtype))
