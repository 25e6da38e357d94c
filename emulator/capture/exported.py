"""A program that torch.export saved (`.pt2`), as a graph.

`torch.export.load` unpickles parts of such a file and evaluates its size expressions, so a file can make it run any
code. This reader never does: it takes the program's JSON and the raw bytes of tensors, and refuses a file that holds
anything else. Weights are not read for the graph.
"""

import contextlib
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._export.serde import schema, serialize
from torch._subclasses.fake_tensor import FakeTensor

from emulator.capture.export import lower_to_known_operators, quiet_torch
from emulator.capture.importer import import_program
from emulator.capture.model import quiet_libraries
from emulator.errors import CaptureError
from emulator.graph import Graph
from emulator.numerics import Array

_ANSWER = "save it again with torch.export.save from torch 2.9 or newer"

# What the zip module raises on archives with wrong bytes in them.
_DAMAGED = (zipfile.BadZipFile, ValueError, EOFError, RuntimeError, zlib.error)


def capture_exported(path: Path) -> Graph:
    """The graph of a saved program; its parameters go by the names that the exported module had."""
    with _Archive(path) as archive, _explaining(path):
        program = archive.deserialised(read=False)
        _share_mode(program)
        lowered = lower_to_known_operators(program)
    return import_program(lowered, {})


def run_exported(path: Path, graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """What PyTorch computes with a saved program and its weights, one operator after another.

    `graph` is the file's own: that it exists shows that the file calls nothing but operators of ours.
    """
    with _Archive(path) as archive, _explaining(path):
        program = archive.deserialised(read=True)
        results = torch.fx.Interpreter(program.graph_module).run(*_arguments(program, inputs))
    kinds = (spec.kind.name for spec in program.graph_signature.output_specs)
    wanted = [result for kind, result in zip(kinds, results, strict=True) if kind == "USER_OUTPUT"]
    tensors = [result for result in wanted if isinstance(result, torch.Tensor)]
    return {name: _plain(tensor) for name, tensor in zip(graph.outputs, tensors, strict=True)}


def _arguments(program: Any, inputs: Mapping[str, Array]) -> Iterator[Any]:
    """Weights, constants and inputs, in the order of the program's placeholders."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        value = node.meta.get("val")
        if spec.kind.name != "USER_INPUT":
            held = program.state_dict if spec.target in program.state_dict else program.constants
            yield held[spec.target].clone()
        elif isinstance(value, torch.Tensor):
            yield torch.from_numpy(inputs[node.name].copy()).to(value.dtype)
        else:
            yield getattr(spec.arg, "value", None)


def _plain(tensor: Any) -> Array:
    exact: Array = (tensor.float() if tensor.is_floating_point() else tensor).detach().numpy()
    return exact


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Whatever a damaged or newer program leads torch to raise becomes a sentence."""
    try:
        with quiet_libraries(), quiet_torch(), torch.no_grad():
            yield
    except CaptureError:
        raise
    except Exception as fault:
        reason = " ".join(str(fault).split())
        raise CaptureError(f"{path.name} is no program that torch {torch.__version__} reads: {reason}") from fault


def exported_parameters(path: Path) -> dict[str, Array]:
    """The weights that a saved program carries, by name."""
    with _Archive(path) as archive:
        weights = archive.weights(read=True)
    return {name: _plain(tensor) for name, tensor in weights.items()}


def _share_mode(program: Any) -> None:
    """Give the program weights of the kind of the values in it: fakes of one mode that claim to be on the CPU."""
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None:
        return
    mode.allow_non_fake_inputs = True  # constants are real
    for name, tensor in program.state_dict.items():
        fake = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        program.state_dict[name] = torch.nn.Parameter(fake, requires_grad=False) if is_parameter else fake


class _Archive:
    """The zip file: one folder that holds models, weights and constants."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        try:
            self._zip = zipfile.ZipFile(path)
        except OSError as fault:
            raise CaptureError(f"{path} cannot be read: {fault.strerror or fault}") from fault
        except _DAMAGED as fault:
            raise CaptureError(f"{path.name} is truncated, or was not saved by torch.export: {fault}") from fault
        self._entries = {name.partition("/")[2]: name for name in self._zip.namelist()}

    def __enter__(self) -> "_Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def _bytes(self, entry: str) -> bytes:
        if entry not in self._entries:
            raise CaptureError(f"{self._name} has no {entry}; {_ANSWER}")
        stored = self._zip.getinfo(self._entries[entry])
        if stored.file_size > stored.compress_size:  # torch never compresses; a small file could fill the memory
            raise CaptureError(f"{entry} in {self._name} is compressed, which torch.export.save never does; {_ANSWER}")
        try:
            return self._zip.read(stored)
        except (OSError, *_DAMAGED) as fault:
            raise CaptureError(f"{entry} in {self._name} is damaged: {fault}") from fault

    def _json(self, entry: str) -> Any:
        try:
            return json.loads(self._bytes(entry))
        except ValueError as fault:
            raise CaptureError(f"{entry} in {self._name} is not JSON: {fault}") from fault

    def program(self) -> Any:
        """The one program in the file, if torch can build it without evaluating or looking up anything unusual."""
        models = [entry for entry in self._entries if entry.startswith("models/") and entry.endswith(".json")]
        if models != ["models/model.json"]:
            raise CaptureError(f"{self._name} holds {len(models)} programs, where one named 'model' is expected")
        content = self._json(models[0])
        for key, value in _entries(content):
            if key in ("as_expr", "expr_str"):
                raise CaptureError(f"{self._name} has dynamic sizes; export it again without dynamic_shapes")
            if key == "target" and isinstance(value, str) and not value.startswith(("torch.ops.", "_operator.")):
                raise CaptureError(f"{self._name} calls {value!r}, which is no operator")
        try:
            return serialize._dict_to_dataclass(schema.ExportedProgram, content)
        except Exception as fault:  # it trusts its input, and fails in any way on another
            raise CaptureError(f"{self._name} does not describe a program: {type(fault).__name__} {fault}") from fault

    def deserialised(self, *, read: bool) -> Any:
        """torch's own exported program, with its weights or without."""
        parts = (self.program(), self.weights(read=read), self.constants())
        return serialize.ExportedProgramDeserializer().deserialize(*parts)

    def weights(self, *, read: bool) -> dict[str, Any]:
        """Parameters and buffers; tensors of the meta device where they are not to be read."""
        return self._tensors("data/weights/", read)

    def constants(self) -> dict[str, Any]:
        return self._tensors("data/constants/", True)

    def _tensors(self, folder: str, read: bool) -> dict[str, Any]:
        kind = folder.split("/")[1]
        listing = self._json(f"{folder}model_{kind}_config.json")
        try:
            metas = {name: (entry, self._meta(name, entry)) for name, entry in listing["config"].items()}
            return {
                name: _marked(self._filled(folder + entry["path_name"], meta) if read else _empty(meta), entry)
                for name, (entry, meta) in metas.items()
            }
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as fault:
            raise CaptureError(f"{self._name} describes its {kind} wrongly: {fault}") from fault

    def _meta(self, name: str, entry: Mapping[str, Any]) -> Any:
        if entry["use_pickle"] or entry["tensor_meta"] is None:
            raise CaptureError(f"{self._name} holds {name!r} as pickled Python, which could run any code; {_ANSWER}")
        return serialize._dict_to_dataclass(schema.TensorMeta, entry["tensor_meta"])

    def _filled(self, entry: str, meta: Any) -> Any:
        data = bytearray(self._bytes(entry))
        dtype = serialize.deserialize_scalar_type(meta.dtype)
        raw = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        offset = serialize.deserialize_storage_offset(meta.storage_offset)
        return torch.as_strided(raw, *_layout(meta), offset)


def _layout(meta: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(serialize.deserialize_size(meta.sizes)), tuple(serialize.deserialize_stride(meta.strides))


def _empty(meta: Any) -> Any:
    return torch.empty_strided(*_layout(meta), dtype=serialize.deserialize_scalar_type(meta.dtype), device="meta")


def _marked(tensor: Any, entry: Mapping[str, Any]) -> Any:
    """A parameter where the program knows it as one."""
    return torch.nn.Parameter(tensor, requires_grad=False) if entry["is_param"] else tensor


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    """Each key of each object in a JSON document, with its value; documents may be deep."""
    waiting = [content]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield from part.items()
        waiting.extend(part.values() if isinstance(part, dict) else part if isinstance(part, list) else ())
