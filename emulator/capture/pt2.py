"""Reader of `.pt2` files, programs saved by torch.export, into a graph.

`torch.export.load` unpickles parts of a file, imports modules that it names and evaluates its expressions, so a file
can run any code. This reader uses only the program's JSON, validated field by field, and the raw bytes of tensors;
nothing is extracted to disk, decompressed or unpickled, and memory use is bounded by the file's size. The graph needs
no weights.
"""

import contextlib
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch._export.serde import serialize
from torch._subclasses.fake_tensor import FakeTensor

from nxpipe.emulator.capture.export import lower_to_known_operators, quiet_torch
from nxpipe.emulator.capture.importer import import_program
from nxpipe.emulator.capture.model import quiet_libraries
from nxpipe.emulator.capture.pt2_document import extent, payload_of, program_of
from nxpipe.emulator.errors import CaptureError, CompileError
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.regular_file import open_regular

_REMEDY: Final = "save it again with torch.export.save from torch 2.9 or newer"
_MIB: Final = 2**20
_DOCUMENT: Final = 64 * _MIB  # bytes of one JSON document
_DIRECTORY: Final = 32 * _MIB  # bytes of the zip file's central directory
_REASON: Final = 200  # characters
_END: Final = 2**16 + 22 + 20 + 56  # bytes that contain the zip file's end records: a comment and the records before it
# Tensors may share bytes: tied weights, or the rows of an expanded tensor. So all tensors may take twice the size of
# the file, plus a constant.
_SHARED: Final = 2
_EXPANDED: Final = 64 * _MIB

# Exceptions of the zip module for damaged archives.
_DAMAGED = (zipfile.BadZipFile, ValueError, EOFError, RuntimeError, NotImplementedError, zlib.error)


class Archive:
    """An open `.pt2` archive: one folder with a program, weights and constants."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        try:
            self._file = open_regular(path)
        except OSError as fault:
            raise CaptureError(f"{path} cannot be read: {fault.strerror or fault}") from fault
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self._require_short_directory()
            self._zip = zipfile.ZipFile(self._file)
            self._entries = self._list_entries()
        except OSError as fault:
            self._file.close()
            raise CaptureError(f"{path} cannot be read: {fault.strerror or fault}") from fault
        except _DAMAGED as fault:
            self._file.close()
            raise CaptureError(
                f"{path.name} is truncated, or was not saved by torch.export: {_message(fault)}"
            ) from fault
        except BaseException:
            self._file.close()
            raise
        self._unread = self._size
        self._data: dict[str, bytearray] = {}

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()
        self._file.close()

    def _require_short_directory(self) -> None:
        """Raise CaptureError for a large central directory, before the zip module creates an object for each entry."""
        self._file.seek(max(self._size - _END, 0))
        end = self._file.read(_END)
        record = end.rfind(b"PK\5\6")
        length = int.from_bytes(end[record + 12 : record + 16], "little") if record >= 0 else 0
        zip64 = end.rfind(b"PK\6\6")
        if zip64 >= 0:
            length = max(length if length != 2**32 - 1 else 0, int.from_bytes(end[zip64 + 40 : zip64 + 48], "little"))
        if length > _DIRECTORY:
            raise CaptureError(f"{self._name} lists its entries in {length:,} bytes, and the limit is {_DIRECTORY:,}")

    def _list_entries(self) -> dict[str, zipfile.ZipInfo]:
        """The entries by their names below the top folder, which must be unique."""
        entries = {stored.filename.partition("/")[2]: stored for stored in self._zip.infolist()}
        if len(entries) != len(self._zip.infolist()):
            raise CaptureError(f"{self._name} has two entries with the same name; {_REMEDY}")
        return entries

    def _bytes(self, entry: str, most: int) -> bytes:
        if entry not in self._entries:
            raise CaptureError(f"{self._name} has no {entry}; {_REMEDY}")
        stored = self._entries[entry]
        if stored.compress_type != zipfile.ZIP_STORED or stored.file_size != stored.compress_size:
            raise CaptureError(f"{entry} in {self._name} is compressed, which torch.export.save never does; {_REMEDY}")
        if stored.file_size > most:
            raise CaptureError(f"{entry} in {self._name} has {stored.file_size:,} bytes, and the limit is {most:,}")
        self._unread -= stored.file_size
        if self._unread < 0:  # overlapping entries
            raise CaptureError(f"{self._name} is smaller than the sum of its entries; {_REMEDY}")
        try:
            return self._zip.read(stored)
        except (OSError, *_DAMAGED) as fault:
            raise CaptureError(f"{entry} in {self._name} is damaged: {_message(fault)}") from fault

    def _json(self, entry: str) -> Any:
        try:
            return json.loads(self._bytes(entry, _DOCUMENT))
        except ValueError as fault:
            raise CaptureError(f"{entry} in {self._name} is not JSON: {fault}") from fault
        except RecursionError:
            raise CaptureError(f"{entry} in {self._name} is nested too deep to be read; {_REMEDY}") from None

    @cached_property
    def program(self) -> Any:
        """The validated program of the file, as a record of torch's schema."""
        models = [entry for entry in self._entries if entry.startswith("models/") and entry.endswith(".json")]
        if models != ["models/model.json"]:
            raise CaptureError(f"{self._name} has {len(models)} programs, where one named 'model' is expected")
        return program_of(self._json(models[0]), self._name)

    def deserialize(self, *, read: bool) -> Any:
        """The ExportedProgram, with its weights, or with meta tensors for them."""
        arguments = (self.program, self.weights(read=read), self.constants())
        return serialize.ExportedProgramDeserializer().deserialize(*arguments)

    def weights(self, *, read: bool) -> dict[str, Any]:
        """Parameters and buffers of the program; without `read`, as tensors on the meta device."""
        return self._tensors(
            "data/weights/", self._named(("parameter", "parameter_name"), ("buffer", "buffer_name")), read
        )

    def constants(self) -> dict[str, Any]:
        named = self._named(("tensor_constant", "tensor_constant_name"), ("buffer", "buffer_name"))
        return self._tensors("data/constants/", named, True)

    def _named(self, *kinds: tuple[str, str]) -> set[str]:
        """The names of the program's lifted inputs of these kinds; other tensors of the file are never read."""
        specs = self.program.graph_module.signature.input_specs
        return {getattr(spec.value, field) for spec in specs for kind, field in kinds if spec.type == kind}

    def _tensors(self, folder: str, names: set[str], read: bool) -> dict[str, Any]:
        kind = folder.split("/")[1]
        config = payload_of(self._json(f"{folder}model_{kind}_config.json"), self._name).config
        payloads = {name: payload for name, payload in config.items() if name in names}
        self._require_bounded(payload.tensor_meta for payload in payloads.values())
        tensors: dict[tuple[Any, ...], Any] = {}
        return {name: self._tensor(folder, payload, read, tensors) for name, payload in payloads.items()}

    def _require_bounded(self, metas: Iterable[Any]) -> None:
        total = sum(math.prod(_layout(meta)[0]) * _dtype(meta).itemsize for meta in metas)
        most = _SHARED * self._size + _EXPANDED
        if total > most:
            raise CaptureError(
                f"{self._name} has tensors of {total:,} bytes in a file of {self._size:,}, and the limit is {most:,}"
            )

    def _tensor(self, folder: str, payload: Any, read: bool, tensors: dict[tuple[Any, ...], Any]) -> Any:
        """The tensor of a payload; payloads of the same tensor share the object, so that ties are kept."""
        meta, entry = payload.tensor_meta, folder + payload.path_name
        key = (entry, payload.is_param, meta.dtype, *_layout(meta), meta.storage_offset.as_int)
        if key not in tensors:
            tensor = self._read_tensor(entry, meta) if read else _empty(meta)
            tensors[key] = torch.nn.Parameter(tensor, requires_grad=False) if payload.is_param else tensor
        return tensors[key]

    def _read_tensor(self, entry: str, meta: Any) -> Any:
        if entry not in self._data:
            self._data[entry] = bytearray(self._bytes(entry, self._size))
        data, dtype = self._data[entry], _dtype(meta)
        needed = extent(meta) * dtype.itemsize
        if needed > len(data) or len(data) % dtype.itemsize:
            raise CaptureError(f"{entry} in {self._name} has {len(data):,} bytes, where a tensor needs {needed:,}")
        raw = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return torch.as_strided(raw, *_layout(meta), meta.storage_offset.as_int)


def _message(fault: Exception) -> str:
    """The message, shortened: the zip module quotes bytes of any length."""
    return str(fault)[:_REASON]


def _dtype(meta: Any) -> Any:
    return serialize._SERIALIZE_TO_TORCH_DTYPE[meta.dtype]


def _layout(meta: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(size.as_int for size in meta.sizes), tuple(stride.as_int for stride in meta.strides)


def _empty(meta: Any) -> Any:
    return torch.empty_strided(*_layout(meta), dtype=_dtype(meta), device="meta")


_TORCH_REASON = 300  # characters of torch's message


def capture_exported(path: Path) -> Graph:
    """The graph of a saved program; parameters have their names in the exported module."""
    with Archive(path) as archive, _capture_errors(path):
        program = archive.deserialize(read=False)
        _share_mode(program)
        return import_program(lower_to_known_operators(program), {})


def run_exported(path: Path, graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a saved program with its weights, computed by torch.fx.Interpreter.

    `graph` is the graph of the file; its import guarantees that the file calls only supported operators.
    """
    with Archive(path) as archive, _capture_errors(path):
        program = archive.deserialize(read=True)
        results = torch.fx.Interpreter(program.graph_module).run(*_arguments(program, inputs))
    kinds = (spec.kind.name for spec in program.graph_signature.output_specs)
    outputs = [result for kind, result in zip(kinds, results, strict=True) if kind == "USER_OUTPUT"]
    tensors = [result for result in outputs if isinstance(result, torch.Tensor)]
    return {name: _plain(tensor) for name, tensor in zip(graph.outputs, tensors, strict=True)}


def _arguments(program: Any, inputs: Mapping[str, Array]) -> Iterator[Any]:
    """Weights, constants and inputs, in the order of the program's placeholders."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    copies: dict[int, Any] = {}  # by id of the original, because the program may write to them; ties are kept
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        value = node.meta.get("val")
        if spec.kind.name != "USER_INPUT":
            source = program.state_dict if spec.target in program.state_dict else program.constants
            tensor = source[spec.target]
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.clone()
            yield copies[id(tensor)]
        elif isinstance(value, torch.Tensor):
            yield torch.from_numpy(inputs[node.name].copy()).to(value.dtype)
        else:
            yield getattr(spec.arg, "value", None)


def _plain(tensor: Any) -> Array:
    exact: Array = (tensor.float() if tensor.is_floating_point() else tensor).detach().numpy()
    return exact


@contextlib.contextmanager
def _capture_errors(path: Path) -> Iterator[None]:
    """Raise CaptureError for any exception of torch, which damaged or newer programs cause."""
    try:
        with quiet_libraries(), quiet_torch(), torch.no_grad():
            yield
    except CompileError:
        raise
    except Exception as fault:
        first = fault.__cause__ or fault  # torch wraps the error, with the whole node and a traceback as text
        reason = " ".join(f"{type(first).__name__}: {first}".split())[:_TORCH_REASON]
        raise CaptureError(f"{path.name} cannot be read by torch {torch.__version__}: {reason}") from fault


def exported_parameters(path: Path) -> dict[str, Array]:
    """The weights of a saved program, by name."""
    with Archive(path) as archive, _capture_errors(path):
        weights = archive.weights(read=True)
        plain = {id(tensor): _plain(tensor) for tensor in weights.values()}
    return {name: plain[id(tensor)] for name, tensor in weights.items()}


def _share_mode(program: Any) -> None:
    """Replace the program's weights by fake CPU tensors in the fake mode of its node values."""
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None:
        return
    mode.allow_non_fake_inputs = True  # constants are real
    for name, tensor in program.state_dict.items():
        fake = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        program.state_dict[name] = torch.nn.Parameter(fake, requires_grad=False) if is_parameter else fake
