"""Saved programs: a `.pt2` of torch.export, an ONNX file with a dynamic axis, and one with external weights."""

from pathlib import Path

import numpy as np
import onnx
import torch


def write_pt2(path: Path) -> Path:
    torch.manual_seed(0)
    program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU()), (torch.zeros(2, 8),))
    torch.export.save(program, path)
    return path


def write_onnx(path: Path, *, data: str | None = None) -> Path:
    """A network of two layers; `data` names the file for its weights."""
    value = onnx.helper.make_tensor_value_info
    random = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(random.standard_normal(shape, np.float32), name)
        for name, shape in (("v", (32, 64)), ("w", (64, 16)))
    ]
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", ["x", "v"], ["h"]),
            onnx.helper.make_node("Relu", ["h"], ["r"]),
            onnx.helper.make_node("MatMul", ["r", "w"], ["y"]),
        ],
        "g",
        [value("x", onnx.TensorProto.FLOAT, ["batch", 32])],
        [value("y", onnx.TensorProto.FLOAT, ["batch", 16])],
        weights,
    )
    model = onnx.helper.make_model(graph, ir_version=8)
    onnx.save(model, path, save_as_external_data=data is not None, location=data, size_threshold=0)
    return path
