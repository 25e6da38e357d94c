"""Small files that demand unbounded work: `check` and `build` stop within limits, with one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import onnx
import pytest
from onnx import TensorProto, helper

from tests.pipeline.in_process import InProcess, nxpipe
from tests.security.saved_entries import WEIGHTS, saved_program

__all__ = ["nxpipe"]  # the fixture

BERT: Final = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
_LIMITS: Final = ("--timeout", "4s", "--memory-limit", "2GiB", "--target", "inf2.xlarge")


def configured(**changes: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({**BERT, **changes}))
        return folder / "model"

    return write


def large_weight(folder: Path) -> Path:
    """One entry of 64 MiB shared by 200 weights."""
    saved = saved_program(folder)
    listing = saved.json(WEIGHTS)
    for number in range(200):
        listing["config"][f"w{number}"] = {**listing["config"]["0.weight"], "path_name": "big"}
    saved.entries["data/weights/big"] = bytes(2**26)
    saved.put(WEIGHTS, listing)
    document = saved.json()
    document["graph_module"]["signature"]["input_specs"][0]["parameter"]["parameter_name"] = "w7"
    saved.put("models/model.json", document)
    return saved.write(folder / "m.pt2")


def value(name: str, kind: int = TensorProto.FLOAT, shape: tuple[int, ...] = (2,)) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def nested_loops(folder: Path) -> Path:
    """Loops of 4,096 iterations, nested five deep."""
    trips = helper.make_tensor("n", TensorProto.INT64, (), [4096])
    body = [helper.make_node("Add", ["x0", "x0"], ["y0"])]
    for depth in range(5):
        inner = helper.make_graph(
            [*body, helper.make_node("Identity", [f"c{depth}"], [f"d{depth}"])],
            f"g{depth}",
            [value(f"i{depth}", TensorProto.INT64, ()), value(f"c{depth}", TensorProto.BOOL, ()), value(f"x{depth}")],
            [value(f"d{depth}", TensorProto.BOOL, ()), value(f"y{depth}")],
        )
        body = [helper.make_node("Loop", ["n", "", f"x{depth + 1}"], [f"y{depth + 1}"], body=inner)]
    return _written(folder, helper.make_graph(body, "g", [value("x5")], [value("y5")], [trips]), [])


def billion_laughs(folder: Path) -> Path:
    """Functions that call the next one twice, thirty deep."""
    functions = [
        helper.make_function(
            "laughs",
            f"f{depth}",
            ["a"],
            ["c"],
            [
                helper.make_node(f"f{depth + 1}", ["a"], ["b"], domain="laughs")
                if depth < 29
                else helper.make_node("Add", ["a", "a"], ["b"]),
                helper.make_node(f"f{depth + 1}", ["b"], ["c"], domain="laughs")
                if depth < 29
                else helper.make_node("Add", ["b", "b"], ["c"]),
            ],
            [helper.make_opsetid("", 18), helper.make_opsetid("laughs", 1)],
        )
        for depth in range(30)
    ]
    call = helper.make_node("f0", ["x"], ["y"], domain="laughs")
    return _written(folder, helper.make_graph([call], "g", [value("x")], [value("y")]), functions)


def _written(folder: Path, graph: Any, functions: list[Any]) -> Path:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("laughs", 1)]
    model = helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=8)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    assert onnx.load(folder / "m.onnx").graph.node
    return folder / "m.onnx"


CASES: Final = [
    pytest.param(configured(num_hidden_layers=10**9), marks=pytest.mark.attempt("L01", "L02"), id="layers"),
    pytest.param(configured(num_labels=10**8), marks=pytest.mark.attempt("L03"), id="labels"),
    pytest.param(nested_loops, marks=pytest.mark.attempt("L05"), id="loops"),
    pytest.param(billion_laughs, marks=pytest.mark.attempt("L06"), id="laughs"),
]


def sentence(answer: Any) -> None:
    assert answer.code not in (0, 1), answer.err
    assert "Traceback" not in answer.out + answer.err
    assert "internal error" not in answer.out + answer.err


@pytest.mark.sample(4)
@pytest.mark.parametrize("write", CASES)
def test_check_ends_within_its_limits(nxpipe: InProcess, tmp_path: Path, write: Callable[[Path], Path]) -> None:
    sentence(nxpipe("check", "--model-id", str(write(tmp_path)), *_LIMITS))


@pytest.mark.slow
@pytest.mark.parametrize("write", CASES)
def test_build_ends_within_its_limits(nxpipe: InProcess, tmp_path: Path, write: Callable[[Path], Path]) -> None:
    model = str(write(tmp_path))
    weights = () if model.endswith(".onnx") else ("--weights", "random:0")
    store = ("--store", str(tmp_path / "st"), "--retries", "0")
    sentence(nxpipe("build", "--model-id", model, *_LIMITS, *weights, *store))


@pytest.mark.sample(8)
@pytest.mark.attempt("L04")
def test_an_entry_that_many_weights_name_is_within_limits(nxpipe: InProcess, tmp_path: Path) -> None:
    """Of 12.8 GB that the weights claim, the few bytes are read that the program uses, in 2 GiB of memory."""
    limits = ("--memory-limit", "2GiB", "--target", "inf2.xlarge")
    answer = nxpipe("build", "--model-id", str(large_weight(tmp_path)), *limits, "--store", str(tmp_path / "st"))
    assert answer.code == 0, answer.err
