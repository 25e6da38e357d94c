"""ONNX files: their graphs, and the messages of failures."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from nxpipe.emulator.capture import capture_file
from nxpipe.emulator.capture.onnx import capture_onnx, onnx_parameters
from nxpipe.emulator.errors import CaptureError, DataUnusable, UnsupportedOperators
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.run.fast import execute

GENERATOR = np.random.default_rng(0)


def weight(name: str, *shape: int) -> Any:
    return numpy_helper.from_array((0.3 * GENERATOR.standard_normal(shape)).astype(np.float32), name)


def table(name: str, *numbers: int) -> Any:
    return numpy_helper.from_array(np.asarray(numbers, np.int64), name)


def model(nodes: list[Any], inputs: dict[str, list[Any]], outputs: list[str], weights: list[Any], **more: Any) -> Any:
    declared = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "test", declared, results, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], **more)


def attention_block(batch: Any = 2) -> Any:
    """One layer as exporters write it: shapes computed from shapes, norms written out."""
    nodes = [
        helper.make_node("Shape", ["x"], ["whole"]),
        helper.make_node("Slice", ["whole", "zero", "two"], ["front"]),
        helper.make_node("Concat", ["front", "heads"], ["split"], axis=0),
        helper.make_node("LayerNormalization", ["x", "gain", "shift"], ["normal"], axis=-1),
        *(helper.make_node("MatMul", ["normal", f"w_{n}"], [f"flat_{n}"]) for n in "qkv"),
        *(helper.make_node("Reshape", [f"flat_{n}", "split"], [f"parts_{n}"]) for n in "qkv"),
        *(helper.make_node("Transpose", [f"parts_{n}"], [n], perm=[0, 2, 1, 3]) for n in "qv"),
        helper.make_node("Transpose", ["parts_k"], ["k"], perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["q", "k"], ["scores"]),
        helper.make_node("Div", ["scores", "root"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["shares"], axis=-1),
        helper.make_node("MatMul", ["shares", "v"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["back"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["back", "whole"], ["joined"]),
        helper.make_node("Gelu", ["joined"], ["bent"], name="/layer/act", approximate="tanh"),
        helper.make_node("Add", ["x", "bent"], ["y"]),
    ]
    weights = [weight("gain", 8), weight("shift", 8), *(weight(f"w_{n}", 8, 8) for n in "qkv")]
    weights += [table("zero", 0), table("two", 2), table("heads", 2, 4), numpy_helper.from_array(np.float32(2), "root")]
    return model(nodes, {"x": [batch, 5, 8]}, ["y"], weights)


def saved(made: Any, folder: Path, **more: Any) -> Path:
    onnx.save(made, folder / "model.onnx", **more)
    return folder / "model.onnx"


def reference(made: Any, inputs: dict[str, Array]) -> Any:
    return ReferenceEvaluator(made).run(None, inputs)


def test_a_file_computes_what_the_reference_evaluator_computes(tmp_path: Path) -> None:
    made = attention_block()
    path = saved(made, tmp_path)
    x = GENERATOR.standard_normal((2, 5, 8)).astype(np.float32)
    found = execute(run_passes(capture_onnx(path), PassOptions()), onnx_parameters(path), {"x": x})
    np.testing.assert_allclose(found["y"], reference(made, {"x": x})[0], rtol=1e-5, atol=1e-6)


def test_files_are_told_apart_by_their_ending(tmp_path: Path) -> None:
    path = saved(attention_block(), tmp_path)
    assert capture_file(path).key == capture_onnx(path).key
    with pytest.raises(CaptureError, match=r"model\.bin is neither a \.pt2 nor an \.onnx file"):
        capture_file(tmp_path / "model.bin")


def test_weights_are_parameters_by_name_and_arithmetic_on_shapes_leaves_no_trace(tmp_path: Path) -> None:
    graph = capture_onnx(saved(attention_block(), tmp_path))
    assert set(graph.parameters) == {"gain", "shift", "w_q", "w_k", "w_v"}
    assert all(value.type.elements <= 4 for value in graph.constants)
    assert not any(value.type.dtype.is_integer for node in graph.nodes for value in node.operands)


def test_nodes_remember_their_names_and_places_in_the_file(tmp_path: Path) -> None:
    graph = capture_onnx(saved(attention_block(), tmp_path))
    (gelu,) = (node for node in graph.nodes if node.op.label == "gelu_tanh")
    assert gelu.origin.module == "/layer/act"
    assert gelu.origin.source.startswith("model.onnx:Gelu ")


def test_weights_in_a_file_of_their_own_are_found(tmp_path: Path) -> None:
    made = attention_block()
    inside = saved(made, tmp_path)
    expected, key = onnx_parameters(inside), capture_onnx(inside).key
    outside = saved(made, tmp_path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert capture_onnx(outside).key == key
    found = onnx_parameters(outside)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_an_open_axis_is_named_with_the_way_to_fix_it(tmp_path: Path) -> None:
    path = saved(attention_block("rows"), tmp_path)
    with pytest.raises(CaptureError, match=r"axis 0 of input 'x' is dynamic \('rows'\); give it a size"):
        capture_onnx(path)
    assert capture_onnx(path, {"rows": 3}).inputs["x"].type.shape == (3, 5, 8)
    unnamed = saved(attention_block(None), tmp_path)
    with pytest.raises(CaptureError, match="axis 0 of input 'x' is dynamic and has no name"):
        capture_onnx(unnamed)


def test_all_operators_without_counterpart_are_listed(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["d"], name="/volume"),
        helper.make_node("NonZero", ["x"], ["n"], name="/where"),
        helper.make_node("Add", ["d", "d"], ["y"]),
    ]
    with pytest.raises(UnsupportedOperators) as caught:
        capture_onnx(saved(model(nodes, {"x": [4, 4]}, ["y"], []), tmp_path))
    found = {finding.operator: finding for finding in caught.value.findings}
    assert found.keys() == {"onnx.Det", "onnx.NonZero"}
    assert (found["onnx.Det"].module, found["onnx.Det"].source) == ("/volume", "model.onnx:Det 0")
    assert "depends on data" in found["onnx.NonZero"].advice


def test_a_size_computed_at_run_time_is_refused_with_its_input(tmp_path: Path) -> None:
    sized = helper.make_tensor_value_info("shape", TensorProto.INT64, [2])
    made = model([helper.make_node("Reshape", ["x", "shape"], ["y"])], {"x": [2, 6]}, ["y"], [])
    made.graph.input.append(sized)
    with pytest.raises(CaptureError, match=r"onnx\.Reshape at .*its shape is computed at run time"):
        capture_onnx(saved(made, tmp_path))


def test_a_branch_on_a_value_is_refused_and_one_on_a_constant_is_taken(tmp_path: Path) -> None:
    def branch(name: str, operator: str) -> Any:
        result = helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])
        return helper.make_graph([helper.make_node(operator, ["x"], [name])], name, [], [result])

    both = {"then_branch": branch("a", "Neg"), "else_branch": branch("b", "Abs")}
    known = numpy_helper.from_array(np.asarray(False), "known")
    taken = model([helper.make_node("If", ["known"], ["y"], **both)], {"x": [2]}, ["y"], [known])
    assert [node.op.label for node in capture_onnx(saved(taken, tmp_path)).nodes] == ["abs"]
    decide = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "sum"], ["c"]),
        helper.make_node("If", ["c"], ["y"], **both),
    ]
    with pytest.raises(UnsupportedOperators, match="branches on a tensor's value"):
        capture_onnx(saved(model(decide, {"x": [2]}, ["y"], []), tmp_path))


def test_functions_of_the_model_and_of_the_standard_are_taken_apart(tmp_path: Path) -> None:
    twice = helper.make_function(
        "mine", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 20)]
    )
    nodes = [
        helper.make_node("Twice", ["x"], ["t"], domain="mine"),
        helper.make_node("MeanVarianceNormalization", ["t"], ["y"], axes=[0]),
    ]
    made = model(nodes, {"x": [4, 4]}, ["y"], [], functions=[twice])
    made.opset_import.append(helper.make_opsetid("mine", 1))
    x = GENERATOR.standard_normal((4, 4)).astype(np.float32)
    found = execute(capture_onnx(saved(made, tmp_path)), {}, {"x": x})
    np.testing.assert_allclose(found["y"], reference(made, {"x": x})[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.95])
def test_truncated_foreign_and_missing_files_are_sentences(tmp_path: Path, share: float) -> None:
    path = saved(attention_block(), tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(CaptureError, match=r"model\.onnx") as caught:
        capture_onnx(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(CaptureError, match="cannot be read: No such file"):
        capture_onnx(tmp_path / "missing.onnx")
    path.write_bytes(b"PK" + bytes(100))
    with pytest.raises(CaptureError, match=r"model\.onnx"):
        capture_onnx(path)


def test_weights_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    made = attention_block()
    path = saved(made, tmp_path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    moved = onnx.load(path, load_external_data=False)
    for tensor in moved.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../weights.bin"
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "model.onnx").write_bytes(moved.SerializeToString())
    with pytest.raises(DataUnusable, match="is outside of its folder, and is never read"):
        onnx_parameters(inner / "model.onnx")


def test_results_of_a_standard_function_that_nobody_asked_for_need_not_be_made(tmp_path: Path) -> None:
    labels = numpy_helper.from_array(np.asarray([1, 2], np.int64), "labels")
    loss = helper.make_node("SoftmaxCrossEntropyLoss", ["x", "labels"], ["y"])  # it may give the logarithms as well
    made = model([loss], {"x": [2, 4]}, ["y"], [labels])
    made.opset_import[0].version = 13
    x = GENERATOR.standard_normal((2, 4)).astype(np.float32)
    found = execute(capture_onnx(saved(made, tmp_path)), {}, {"x": x})
    np.testing.assert_allclose(found["y"], reference(made, {"x": x})[0], rtol=1e-4, atol=1e-6)
