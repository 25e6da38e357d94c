"""torch.export of a model: its call signature, functionalised in-place operators, and messages for failures.

The model is traced on fake tensors that claim to be on the CPU rather than on the meta device: both need no memory,
but constants that a model creates on its inputs' device keep their values, and so do its buffers. An in-place write
is visible to everything that shares the storage. Fake tensors know their storages, so a trace shows where nothing
else of one storage is read after the write: there the operator without the underscore gives the same program. Other
in-place writes are left to PyTorch's functionalisation. `sequence` counts tokens for text and frames for audio
models; an encoder-decoder is one program.
"""

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from nxpipe.emulator.capture.aten import is_known
from nxpipe.emulator.capture.constants import retry_with_known_constants, track_small_constants
from nxpipe.emulator.capture.decoder import (
    cache_types,
    flatten_arguments,
    group_arguments,
    make_stepwise,
    step_input_types,
)
from nxpipe.emulator.capture.image_models import (
    DIFFUSION,
    PATCH_MASK,
    PATCHES,
    diffusion_input_types,
    patch_mask_type,
    patches_type,
)
from nxpipe.emulator.capture.importer import import_program
from nxpipe.emulator.capture.model import build_model, quiet_libraries, stored_names
from nxpipe.emulator.capture.provenance import failing_line, unset_settings
from nxpipe.emulator.capture.request import CaptureRequest
from nxpipe.emulator.errors import CaptureError, GraphBreak
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.types import DType, TensorType

# In evaluation these return their very argument, but a trace shows a tensor with memory of its own.
_PASSING = (torch.ops.aten.dropout.default, torch.ops.aten.feature_dropout.default)


def functionalise_safe_writes(graph: Any) -> None:
    """Rewrite those in-place calls of a traced graph that are safe to rewrite, in place."""
    for node in list(graph.nodes):
        if node.target in _PASSING and not node.args[2]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        functional = _functional(node.target)
        if functional is not None and _unseen(node, order):
            written = node.args[0]
            node.target = functional
            written.replace_all_uses_with(node, delete_user_cb=lambda user, write=node: order[user] > order[write])


def _functional(target: Any) -> Any:
    """The operator that returns what an in-place one writes, if there is one that the importer knows."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    namespace, _, name = target._schema.name.partition("::")
    mutated = [argument.is_write for argument in target._schema.arguments]
    if not name.endswith("_") or mutated != [True, *[False] * (len(mutated) - 1)]:
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    found = getattr(packet, target._overloadname, None)
    return found if found is not None and is_known(found) else None


def _unseen(write: Any, order: dict[Any, int]) -> bool:
    """Whether only the written tensor itself, and nothing else of its storage, is read after the write."""
    written = write.args[0]
    if written.op != "call_function":  # an argument of the program outlives it
        return False
    memory = _storages(written)
    sharing = [node for node in order if order[node] < order[write] and _storages(node) & memory]
    return len(memory) == 1 and all(
        node is written or (node.op == "call_function" and all(order[user] <= order[write] for user in node.users))
        for node in sharing
    )


def _storages(node: Any) -> set[int]:
    """The memory that a call's results lie in."""
    results = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return {tensor.untyped_storage()._cdata for tensor in results if isinstance(tensor, torch.Tensor)}


_DEFAULT_IMAGE = 224
_IMAGE_SIZES = ("image_size", "input_size", "img_size")
_CHANNELS = ("num_channels", "in_channels", "in_chans")
# Settings by which a text model finds the places that images take in its text; without images it just reads text.
_PLACEHOLDERS = ("image_token_id", "image_token_index", "media_placeholder_token_id")


def input_types(model: Any, request: CaptureRequest) -> dict[str, TensorType]:
    """The tensors that one forward pass of this model takes, in the order of its signature."""
    if request.task in DIFFUSION:
        return diffusion_input_types(model, request)
    accepted = inspect.signature(model.forward).parameters
    wanted = _wanted(model, accepted)
    for name, parameter in accepted.items():
        required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if name not in _TYPES and (name in wanted or required):
            raise CaptureError(f"{type(model).__name__} needs an input {name!r}, whose shape no configuration tells")
        if required:
            wanted.add(name)
    types = {name: _TYPES[name](model.config, request) for name in accepted if name in wanted}
    return {name: type_.with_dtype(_carried(type_, request)) for name, type_ in types.items()}


def _wanted(model: Any, accepted: Iterable[str]) -> set[str]:
    """The model's main input, and what has to come with it."""
    main = model.main_input_name
    wanted = {main} if isinstance(main, str) else set(main)
    if "input_ids" in accepted and "pixel_values" in accepted and not _is_language_model_with_eyes(model.config):
        wanted |= {"input_ids", "pixel_values"}
    if "input_ids" in accepted and "input_features" in accepted and hasattr(model.config, "projection_dim"):
        wanted |= {"input_ids", "input_features"}  # a text and an audio tower side by side
    if "input_ids" in wanted:
        wanted |= {"attention_mask", "bbox"}
    if "input_features" in wanted:
        wanted.add("input_features_mask")
    if model.config.is_encoder_decoder or "input_ids" not in accepted:
        wanted.add("decoder_input_ids")
    return wanted & set(accepted)


def _is_language_model_with_eyes(config: Any) -> bool:
    return any(getattr(config, name, None) is not None for name in _PLACEHOLDERS)


def _carried(type_: TensorType, request: CaptureRequest) -> DType:
    """Floats come in the type that the model's weights have."""
    return DType(request.dtype) if type_.dtype.is_float else type_.dtype


def _tokens(config: Any, request: CaptureRequest) -> TensorType:
    return TensorType((request.batch, request.sequence), DType.INT64)


def _boxes(config: Any, request: CaptureRequest) -> TensorType:
    return TensorType((request.batch, request.sequence, 4), DType.INT64)


def _image(config: Any, request: CaptureRequest) -> TensorType:
    height, width = _pair(_setting(config, _IMAGE_SIZES, _DEFAULT_IMAGE))
    return TensorType((request.batch, int(_setting(config, _CHANNELS, 3)), height, width), DType.FLOAT32)


def _video(config: Any, request: CaptureRequest) -> TensorType:
    image = _image(config, request)
    frames = int(_setting(config, ("num_frames", "frames_per_clip"), 16))
    return image.with_shape((image.shape[0], frames, *image.shape[1:]))


def _image_or_video(config: Any, request: CaptureRequest) -> TensorType:
    watches = getattr(config, "num_frames", None) and hasattr(config, "tubelet_size")
    return _video(config, request) if watches else _image(config, request)


def _waveform(config: Any, request: CaptureRequest) -> TensorType:
    """Raw samples; or, for models of spectrograms, all of the one that the configuration fixes."""
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return TensorType((request.batch, config.max_length, config.num_mel_bins), DType.FLOAT32)
    samples = _samples(config, request.sequence)
    channels = _setting(config, ("audio_channels", "num_channels"), None)
    shape = (request.batch, samples) if channels is None else (request.batch, int(channels), samples)
    return TensorType(shape, DType.FLOAT32)


def _samples(config: Any, frames: int) -> int:
    """The fewest samples from which the convolutions in front make this many frames."""
    kernels, strides = getattr(config, "conv_kernel", None), getattr(config, "conv_stride", None)
    if isinstance(kernels, Sequence) and isinstance(strides, Sequence):
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            frames = (frames - 1) * stride + kernel
        return frames
    hop = getattr(config, "hop_length", None)
    return frames * (hop if isinstance(hop, int) else 320)


def _spectrogram(config: Any, request: CaptureRequest) -> TensorType:
    """Models that position each frame fix their number; they halve it once. The others take any number."""
    mels = _setting(config, ("num_mel_bins", "feature_size"), None)
    if _setting(config, ("spec_size",), None):
        return TensorType((request.batch, 1, 1024, int(mels or 64)), DType.FLOAT32)
    if _is_fixed(config):
        frames = 2 * int(_setting(config, ("max_source_positions",), None))
        return TensorType((request.batch, int(mels), frames), DType.FLOAT32)
    width = _setting(config, ("feature_projection_input_dim", "input_feat_per_channel", "input_dim"), mels or 80)
    return TensorType((request.batch, request.sequence, int(width)), DType.FLOAT32)


def _is_fixed(config: Any) -> bool:
    known = _setting(config, ("max_source_positions",), None) and _setting(
        config, ("num_mel_bins", "feature_size"), None
    )
    return bool(known) and not hasattr(config, "input_feat_per_channel")


def _frames(config: Any, request: CaptureRequest) -> TensorType:
    """Which frames of a spectrogram are sound."""
    batch, *sizes = _spectrogram(config, request).shape
    return TensorType((batch, max(sizes) if len(sizes) == 2 and _is_fixed(config) else sizes[0]), DType.INT64)


def _series(config: Any, request: CaptureRequest) -> TensorType:
    length, channels = getattr(config, "context_length", None), getattr(config, "num_input_channels", None)
    if length is None or channels is None:
        raise CaptureError(f"a {config.model_type!r} configuration does not tell the shape of its 'past_values'")
    return TensorType((request.batch, int(length), int(channels)), DType.FLOAT32)


def _setting(config: Any, names: Sequence[str], default: Any) -> Any:
    """The first of these settings that the configuration, or one of the configurations inside it, has."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for owner in (config, *inner):
        for name in names:
            found = getattr(owner, name, None)
            if found is not None:
                return found
    return default


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        return int(size["height"]), int(size["width"])
    if isinstance(size, Sequence):
        return int(size[-2] if len(size) > 1 else size[0]), int(size[-1])
    return int(size), int(size)


_TYPES: dict[str, Callable[[Any, CaptureRequest], TensorType]] = {
    "input_ids": _tokens,
    "attention_mask": _tokens,
    "bbox": _boxes,
    "decoder_input_ids": _tokens,
    "pixel_values": _image_or_video,
    "pixel_values_videos": _video,
    "input_values": _waveform,
    "input_features": _spectrogram,
    "input_features_mask": _frames,
    "past_values": _series,
    PATCHES: patches_type,
    PATCH_MASK: patch_mask_type,
}


# What a tensor without values says when it is asked for them in ways that have no exception of their own.
_ESCAPES = ("passed to FakeTensor.__format__", ".numpy() is not supported for tensor subclasses")


def capture_model(request: CaptureRequest) -> Graph:
    """Build the model, trace it, import the trace."""
    return capture_built(build_model(request), request)


def capture_built(model: Any, request: CaptureRequest) -> Graph:
    """The graph of a model that `build_model` made; it is used up."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    names = _replace_parameters_by_fakes(model, mode)
    if not request.has_cache:
        return _traced(model, _fakes(mode, input_types(model, request)), names)
    inputs = _fakes(mode, step_input_types(request))
    with _explaining(model, inputs), mode, _compiling_state_context(), _unchanged(model):
        states = cache_types(model, request, inputs["input_ids"])
    make_stepwise(model, request)
    return _traced(model, inputs | _fakes(mode, states), names)


@contextlib.contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Whatever modules note about a run, such as the longest sequence so far, is forgotten again."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def capture_module(module: Any, inputs: Mapping[str, Any]) -> Graph:
    """The graph of any PyTorch module, called with keyword arguments of these tensors' types.

    The module is used up: its parameters are replaced by fakes, because real ones would be copied.
    """
    mode = FakeTensorMode()
    names = _replace_parameters_by_fakes(module, mode)
    return _traced(module, {name: _fake(mode, tensor) for name, tensor in inputs.items()}, names)


def _fake(mode: FakeTensorMode, tensor: Any) -> Any:
    return FakeTensor(mode, tensor.to("meta"), torch.device("cpu"))


def _fakes(mode: FakeTensorMode, types: Mapping[str, TensorType]) -> dict[str, Any]:
    def empty(type_: TensorType) -> Any:
        return torch.empty(type_.shape, dtype=getattr(torch, type_.dtype), device="meta")

    return {name: _fake(mode, empty(type_)) for name, type_ in types.items()}


def _traced(module: Any, inputs: Mapping[str, Any], names: Mapping[str, str]) -> Graph:
    return retry_with_known_constants(lambda: _traced_once(module, inputs, names))


def _traced_once(module: Any, inputs: Mapping[str, Any], names: Mapping[str, str]) -> Graph:
    with _explaining(module, inputs):
        arguments = group_arguments(inputs)
        program = torch.export.export(module, (), arguments, strict=False)
        program = lower_to_known_operators(program)
    graph = import_program(program, names)
    # The exporter has its own spelling of names, and keeps the order of the arguments.
    given = flatten_arguments({key: arguments[key] for key in program.call_spec.in_spec.child(1).context})
    return replace(graph, inputs=dict(zip(given, graph.inputs.values(), strict=True)))


def _replace_parameters_by_fakes(module: Any, mode: FakeTensorMode) -> dict[str, str]:
    """Fakes in place of parameters, tied as they were. Returns, for each one's name, that which it is stored under."""
    stored = stored_names(module)
    fakes: dict[int, Any] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or isinstance(parameter, FakeTensor):
                continue
            if id(parameter) not in fakes:
                fake = _fake(mode, parameter.detach())
                fakes[id(parameter)] = torch.nn.Parameter(fake, requires_grad=False)
            owner._parameters[name] = fakes[id(parameter)]
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:  # it is in the checkpoint, as parameters are
                owner._buffers[name] = _fake(mode, buffer)
    return stored


def lower_to_known_operators(program: Any) -> Any:
    """Let PyTorch take apart the composite operators that we do not keep whole, and remove other in-place writes.

    Most models need neither, and the round trip costs as much as the export.
    """
    functionalise_safe_writes(program.graph)
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    called = {node.target for module in modules for node in module.graph.nodes}
    targets = {target for target in called if isinstance(target, torch._ops.OpOverload)}
    if all(is_known(target) and not target._schema.is_mutable for target in targets):
        return program
    table = {**torch._decomp.decomposition_table, **torch.export.default_decompositions()}
    return program.run_decompositions({target: rule for target, rule in table.items() if not is_known(target)})


@contextlib.contextmanager
def _explaining(module: Any, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Run the model's own code quietly; it may raise anything, and what it raises becomes a sentence."""
    try:
        with quiet_libraries(), quiet_torch(), torch.no_grad(), track_small_constants():
            yield
    except CaptureError:
        raise
    except Exception as fault:
        raise _explained(module, inputs, fault) from fault


def _explained(module: Any, inputs: Mapping[str, Any], fault: Exception) -> CaptureError:
    place = failing_line(fault.__traceback__)
    at = f" at {place}" if place else ""
    escapes = any(sign in str(fault) for sign in _ESCAPES)
    if escapes or isinstance(fault, GuardOnDataDependentSymNode | DataDependentOutputException):
        return GraphBreak(
            f"the model decides by a tensor's value{at}, which a compiled program cannot: "
            "use torch.where for a branch, and padding or buckets for a size",
            place,
        )
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
    reason = (next(iter(str(fault).splitlines()), "") or "no reason given")[:300] + unset_settings(fault)
    return CaptureError(
        f"{type(module).__name__} cannot be traced with {shapes}: {type(fault).__name__}{at}: {reason}", place
    )


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """On failure torch prints the partial trace and logs; the exception that follows says it better."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
