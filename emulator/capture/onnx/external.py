"""The files of data that an ONNX file keeps its large tensors in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from emulator.capture.onnx.reader import loaded
from emulator.errors import CaptureError


def data_files(path: Path) -> dict[str, int]:
    """Each by its name in the ONNX file, with the number of bytes that it must have at least."""
    found: dict[str, int] = {}
    for tensor in _tensors(loaded(path).graph):
        if uses_external_data(tensor):
            name, end = _place(tensor)
            found[name] = max(found.get(name, 0), end)
    return found


def _place(tensor: TensorProto) -> tuple[str, int]:
    try:
        info = ExternalDataInfo(tensor)
    except ValueError as fault:
        raise CaptureError(f"initialiser {tensor.name!r} says wrongly where its data is: {fault}") from fault
    return info.location, (info.offset or 0) + (info.length or 0)


def _tensors(graph: Any) -> Iterator[TensorProto]:
    """All that a graph and the bodies inside it hold."""
    yield from graph.initializer
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for body in (attribute.g, *attribute.graphs):
            yield from _tensors(body)
