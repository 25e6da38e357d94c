"""Text that would control a terminal or a CI runner, models with such text, and checks of a command's output."""

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from tests.pipeline.conftest import BERT, write_model
from tests.pipeline.saved_programs import write_pt2

EVIL: Final = "\x1b]0;PWNED\x07\x9b35m\x1b[35mX\u202e\x7f\n::add-mask::PWNMASK\n"
IN_A_NAME: Final = EVIL.replace("/", "")  # of a file
_OUR_STYLES: Final = re.compile("\x1b\\[(?:0|1|2|3[1-46]|[12];3[1-46])m")
_OUR_CURSOR: Final = re.compile("\r?\x1b\\[K|\r|\x1b\\[\\d*[AJ]|\x1b\\[2K|\x1b\\[\\?25[hl]")


def assert_harmless(text: str, *, terminal: bool = False) -> None:
    """Require printable characters, line breaks and, on a terminal, our own styles; no command for a CI runner."""
    if terminal:
        text = _OUR_CURSOR.sub("", _OUR_STYLES.sub("", text)).replace("\r\n", "\n")
    assert [entry for entry in text if not entry.isprintable() and entry != "\n"] == []
    assert "##[" not in text
    commands = [line for line in text.split("\n") if line.lstrip().startswith("::")]
    assert [line for line in commands if not re.match(r"::(error|warning) title=nxpipe build[^:]*::", line)] == []


# Models


def save_onnx(
    path: Path, *, operator: str = "Relu", node: str = "n", x: str = "x", y: str = "y", made: str | None = None,
    shape: tuple[int | str, ...] = (4, 4), initializers: tuple[onnx.TensorProto, ...] = (),
) -> Path:  # fmt: skip
    value = helper.make_tensor_value_info
    inputs = [x, *(initializer.name for initializer in initializers)][:1] if operator == "Relu" else [x]
    nodes = [helper.make_node(operator, inputs, [made or y], name=node)]
    if initializers:
        nodes = [helper.make_node("MatMul", [x, initializers[0].name], [made or y], name=node)]
    graph = helper.make_graph(
        nodes,
        "g",
        [value(x, TensorProto.FLOAT, shape)],
        [value(y, TensorProto.FLOAT, (4, 4))],
        list(initializers),
    )
    path.write_bytes(helper.make_model(graph, ir_version=8).SerializeToString())
    return path


def outside_data(location: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def bad_weights(name: str) -> onnx.TensorProto:
    tensor = numpy_helper.from_array(np.zeros((4, 4), np.float32), name)
    tensor.raw_data = tensor.raw_data[:7]
    return tensor


def pt2_with(path: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """A program of torch.export with changed entries."""
    plain = write_pt2(path.with_suffix(".whole.pt2"))
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    plain.unlink()
    return path


def in_text(found: str, evil: str = EVIL) -> Callable[[str, bytes], bytes]:
    """Append the text to every occurrence of a word in a JSON entry."""
    spelled = (found + json.dumps(evil)[1:-1]).encode()
    return lambda name, data: data.replace(found.encode(), spelled) if name.endswith(".json") else data


def in_tree_spec() -> Callable[[str, bytes], bytes]:
    """The same in a tree spec, which is JSON in a string of the document."""
    spelled = json.dumps(json.dumps("builtins.tuple" + EVIL)[1:-1])[1:-1].encode()
    return lambda name, data: data.replace(b"builtins.tuple", spelled) if name.endswith(".json") else data


def bert(folder: Path, **changes: Any) -> Path:
    return write_model(folder, {**BERT, "architectures": ["BertForMaskedLM"], **changes})


def with_index(folder: Path, name: str) -> Path:
    bert(folder)
    weights = {"weight_map": {"bert.embeddings.word_embeddings.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    return folder


def with_tensors(folder: Path) -> Path:
    bert(folder)
    shapes = {"bert.embeddings.word_embeddings.weight": (2, 2), EVIL: (2, 2)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder
