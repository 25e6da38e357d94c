"""torch.export of a model: its call signature, functionalised in-place operators, and messages for failures.

The model is traced on fake tensors whose device is the CPU rather than meta: neither takes memory, but constants that a
model creates on its inputs' device keep their values, and so do buffers. An in-place write changes every alias of the
storage. Fake tensors know their storages, so the trace shows whether an alias is read after the write; if none is, the
out-of-place operator gives the same program. Other in-place writes are left to PyTorch's functionalisation. `sequence`
counts tokens for text and frames for audio models; an encoder-decoder is one program.
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

# In evaluation mode these return their argument, but the trace shows a result with its own storage.
_IDENTITIES = (torch.ops.aten.dropout.default, torch.ops.aten.feature_dropout.default)


def functionalise_safe_writes(graph: Any) -> None:
    """Replace in-place calls of an FX graph, where no alias is read afterwards, by their out-of-place operators."""
    for node in list(graph.nodes):
        if node.target in _IDENTITIES and not node.args[2]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        functional = _out_of_place(node.target)
        if functional is not None and _has_no_later_alias_read(node, order):
            mutated = node.args[0]
            node.target = functional
            mutated.replace_all_uses_with(node, delete_user_cb=lambda user, write=node: order[user] > order[write])


def _out_of_place(target: Any) -> Any:
    """The out-of-place overload of an in-place operator, if there is one with an importer."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    namespace, _, name = target._schema.name.partition("::")
    mutated = [argument.is_write for argument in target._schema.arguments]
    if not name.endswith("_") or mutated != [True, *[False] * (len(mutated) - 1)]:
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    overload = getattr(packet, target._overloadname, None)
    return overload if overload is not None and is_known(overload) else None


def _has_no_later_alias_read(write: Any, order: dict[Any, int]) -> bool:
    """True if no alias of the written tensor is read after the write."""
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
    """The storages of a call's results."""
    results = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return {tensor.untyped_storage()._cdata for tensor in results if isinstance(tensor, torch.Tensor)}


_DEFAULT_IMAGE = 224
_IMAGE_SIZES = ("image_size", "input_size", "img_size")
_CHANNELS = ("num_channels", "in_channels", "in_chans")
# Settings of a language model with a vision tower: the tokens that images replace. Without images it reads text alone.
_PLACEHOLDERS = ("image_token_id", "image_token_index", "media_placeholder_token_id")


def input_types(model: Any, request: CaptureRequest) -> dict[str, TensorType]:
    """The inputs of one forward pass of this model, in the order of its signature."""
    if request.task in DIFFUSION:
        return diffusion_input_types(model, request)
    accepted = inspect.signature(model.forward).parameters
    names = _input_names(model, accepted)
    for name, parameter in accepted.items():
        required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if name not in _TYPES and (name in names or required):
            raise CaptureError(f"{type(model).__name__} needs an input {name!r}, whose shape no configuration gives")
        if required:
            names.add(name)
    types = {name: _TYPES[name](model.config, request) for name in accepted if name in names}
    return {name: type_.with_dtype(_element_type(type_, request)) for name, type_ in types.items()}


def _input_names(model: Any, accepted: Iterable[str]) -> set[str]:
    """The model's main input, and the inputs that it implies."""
    main = model.main_input_name
    names = {main} if isinstance(main, str) else set(main)
    if "input_ids" in accepted and "pixel_values" in accepted and not _is_vision_language_model(model.config):
        names |= {"input_ids", "pixel_values"}
    if "input_ids" in accepted and "input_features" in accepted and hasattr(model.config, "projection_dim"):
        names |= {"input_ids", "input_features"}  # a text and an audio tower side by side
    if "input_ids" in names:
        names |= {"attention_mask", "bbox"}
    if "input_features" in names:
        names.add("input_features_mask")
    if model.config.is_encoder_decoder or "input_ids" not in accepted:
        names.add("decoder_input_ids")
    return names & set(accepted)


def _is_vision_language_model(config: Any) -> bool:
    return any(getattr(config, name, None) is not None for name in _PLACEHOLDERS)


def _element_type(type_: TensorType, request: CaptureRequest) -> DType:
    """The element type of an input: floats have that of the weights."""
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
    """Raw samples; or the spectrogram whose size the configuration fixes."""
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return TensorType((request.batch, config.max_length, config.num_mel_bins), DType.FLOAT32)
    samples = _samples(config, request.sequence)
    channels = _setting(config, ("audio_channels", "num_channels"), None)
    shape = (request.batch, samples) if channels is None else (request.batch, int(channels), samples)
    return TensorType(shape, DType.FLOAT32)


def _samples(config: Any, frames: int) -> int:
    """The fewest samples for which the convolutional feature encoder returns this many frames."""
    kernels, strides = getattr(config, "conv_kernel", None), getattr(config, "conv_stride", None)
    if isinstance(kernels, Sequence) and isinstance(strides, Sequence):
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            frames = (frames - 1) * stride + kernel
        return frames
    hop = getattr(config, "hop_length", None)
    return frames * (hop if isinstance(hop, int) else 320)


def _spectrogram(config: Any, request: CaptureRequest) -> TensorType:
    """Mel features. Models with a position table for frames have a fixed number, twice the table; others take any
    number."""
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
    """The mask of a spectrogram's frames."""
    batch, *sizes = _spectrogram(config, request).shape
    return TensorType((batch, max(sizes) if len(sizes) == 2 and _is_fixed(config) else sizes[0]), DType.INT64)


def _series(config: Any, request: CaptureRequest) -> TensorType:
    length, channels = getattr(config, "context_length", None), getattr(config, "num_input_channels", None)
    if length is None or channels is None:
        raise CaptureError(f"a {config.model_type!r} configuration does not give the shape of its 'past_values'")
    return TensorType((request.batch, int(length), int(channels)), DType.FLOAT32)


def _setting(config: Any, names: Sequence[str], default: Any) -> Any:
    """The first of these settings that is set in the configuration or in a nested one."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for owner in (config, *inner):
        for name in names:
            value = getattr(owner, name, None)
            if value is not None:
                return value
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


# Messages of a fake tensor whose value is read in ways that have no exception class.
_VALUE_READ = ("passed to FakeTensor.__format__", ".numpy() is not supported for tensor subclasses")


def capture_model(request: CaptureRequest) -> Graph:
    """Build the model, export it, and import the exported program."""
    return capture_built(build_model(request), request)


def capture_built(model: Any, request: CaptureRequest) -> Graph:
    """The graph of a model from `build_model`. The model cannot be used afterwards."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    names = _replace_parameters_by_fakes(model, mode)
    if not request.has_cache:
        return _export(model, _fakes(mode, input_types(model, request)), names)
    inputs = _fakes(mode, step_input_types(request))
    with _capture_errors(model, inputs), mode, _compiling_state_context(), _restored_state(model):
        states = cache_types(model, request, inputs["input_ids"])
    make_stepwise(model, request)
    return _export(model, inputs | _fakes(mode, states), names)


@contextlib.contextmanager
def _restored_state(model: Any) -> Iterator[None]:
    """Restore the attributes and buffers of all modules, such as a recorded maximum sequence length, after a run."""
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

    The module cannot be used afterwards: its parameters are replaced by fake tensors, because real ones would be
    copied.
    """
    mode = FakeTensorMode()
    names = _replace_parameters_by_fakes(module, mode)
    return _export(module, {name: _fake(mode, tensor) for name, tensor in inputs.items()}, names)


def _fake(mode: FakeTensorMode, tensor: Any) -> Any:
    return FakeTensor(mode, tensor.to("meta"), torch.device("cpu"))


def _fakes(mode: FakeTensorMode, types: Mapping[str, TensorType]) -> dict[str, Any]:
    def empty(type_: TensorType) -> Any:
        return torch.empty(type_.shape, dtype=getattr(torch, type_.dtype), device="meta")

    return {name: _fake(mode, empty(type_)) for name, type_ in types.items()}


def _export(module: Any, inputs: Mapping[str, Any], names: Mapping[str, str]) -> Graph:
    return retry_with_known_constants(lambda: _export_once(module, inputs, names))


def _export_once(module: Any, inputs: Mapping[str, Any], names: Mapping[str, str]) -> Graph:
    with _capture_errors(module, inputs):
        arguments = group_arguments(inputs)
        program = torch.export.export(module, (), arguments, strict=False)
        program = lower_to_known_operators(program)
    graph = import_program(program, names)
    # torch.export renames the arguments, but keeps their order.
    ordered = flatten_arguments({key: arguments[key] for key in program.call_spec.in_spec.child(1).context})
    return replace(graph, inputs=dict(zip(ordered, graph.inputs.values(), strict=True)))


def _replace_parameters_by_fakes(module: Any, mode: FakeTensorMode) -> dict[str, str]:
    """Replace parameters by fake tensors, with their ties. Returns parameter name to the name in the checkpoint."""
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
            if buffer is not None and buffer.is_meta:  # persistent: in the checkpoint, like a parameter
                owner._buffers[name] = _fake(mode, buffer)
    return stored


def lower_to_known_operators(program: Any) -> Any:
    """Decompose the operators without an importer, and functionalise the remaining in-place writes.

    Most models need neither, and `run_decompositions` takes as long as the export.
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
def _capture_errors(module: Any, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Run the model's code with logs suppressed; any exception becomes a CaptureError."""
    try:
        with quiet_libraries(), quiet_torch(), torch.no_grad(), track_small_constants():
            yield
    except CaptureError:
        raise
    except Exception as fault:
        raise _as_capture_error(module, inputs, fault) from fault


def _as_capture_error(module: Any, inputs: Mapping[str, Any], fault: Exception) -> CaptureError:
    place = failing_line(fault.__traceback__)
    at = f" at {place}" if place else ""
    reads_value = any(message in str(fault) for message in _VALUE_READ)
    if reads_value or isinstance(fault, GuardOnDataDependentSymNode | DataDependentOutputException):
        return GraphBreak(
            f"the model branches on a tensor's value{at}, which a compiled program cannot: "
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
    """Suppress the partial trace and the logs that torch writes on a failure; the exception has the reason."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
