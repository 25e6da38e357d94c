"""Capture of models: the graphs, and the messages of failures."""

import contextlib
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from nxpipe.emulator.capture import CaptureRequest, capture, parameter_specs, reference_outputs
from nxpipe.emulator.capture.export import capture_module
from nxpipe.emulator.capture.model import build_model
from nxpipe.emulator.errors import CaptureError, CompileError, GraphBreak, MissingTensor, UnsupportedOperators
from nxpipe.emulator.ir.types import DType
from tests.emulator.models import CONFIGS, request, weights

HERE = "tests/emulator/test_capture.py"


@pytest.mark.parametrize("family", CONFIGS)
def test_buffers_have_the_values_of_a_model_built_in_full(family: str) -> None:
    wanted = request(family)
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    expected = dict(transformers.AutoModel.from_config(config).named_buffers())
    found = dict(build_model(wanted).named_buffers())
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("family", CONFIGS)
def test_parameter_specs_are_the_state_dict_of_a_model_built_in_full(family: str) -> None:
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    state = transformers.AutoModel.from_config(config).state_dict()
    specs = parameter_specs(request(family))
    assert {name: (spec.shape, spec.dtype) for name, spec in specs.items()} == {
        name: (tuple(tensor.shape), DType.FLOAT32) for name, tensor in state.items()
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "task", "kept", "dropped"),
    [
        ("gpt2", "text-generation", "transformer.wte.weight", "lm_head.weight"),
        ("bert", "fill-mask", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ],
)
def test_tied_weights_go_by_one_name(family: str, task: str, kept: str, dropped: str) -> None:
    wanted = request(family, task)
    assert kept in parameter_specs(wanted)
    assert dropped not in parameter_specs(wanted)
    assert kept in capture(wanted).parameters
    assert dropped not in capture(wanted).parameters


def test_every_parameter_of_a_graph_is_in_the_specs_with_the_same_type() -> None:
    for dtype in ("float32", "bfloat16"):
        wanted = request("llama", "text-generation", dtype=dtype)
        specs = parameter_specs(wanted)
        for name, value in capture(wanted).parameters.items():
            assert specs[name] == value.type


def test_capturing_twice_gives_the_same_bytes() -> None:
    assert capture(request("bert")).to_bytes() == capture(request("bert")).to_bytes()


def test_a_configuration_read_from_json_is_the_same_as_the_object() -> None:
    wanted = request("llama")
    config = transformers.AutoConfig.for_model("llama", **CONFIGS["llama"]).to_dict()
    full = CaptureRequest(json.loads(json.dumps(config)), "feature-extraction", "forward", 2, 12, "float32")
    assert capture(full).key == capture(wanted).key


def test_nodes_remember_the_module_and_the_line_that_they_came_from() -> None:
    graph = capture(request("bert"))
    origins = {node.origin.module: node.origin.source for node in graph.nodes}
    assert origins["encoder.layer.1.attention.self.query"].startswith("transformers/models/bert/modeling_bert.py:")
    for node in graph.nodes:
        assert not node.origin.source.startswith("/")
        assert "site-packages" not in node.origin.source


def test_attention_and_norms_stay_whole() -> None:
    names = [node.op.name for node in capture(request("bert")).nodes]
    assert names.count("attention") == 2
    assert names.count("layer_norm") == 5
    assert names.count("linear") == 13


def test_capture_is_silent() -> None:
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(stream):
        capture(request("gpt2", "text-classification"))
    assert stream.getvalue() == ""


class Unsupported(torch.nn.Module):
    """Uses two operations that no NeuronCore has, and one without a fixed shape."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Spectrum()

    def forward(self, x: Any) -> Any:
        chosen = x[x > 0].sum()  # LINE: boolean
        return self.block(self.block(x)) + chosen + torch.linalg.det(x)  # LINE: determinant


class Spectrum(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.special.airy_ai(x)  # LINE: airy


class Branches(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        if x.sum() > 0:  # LINE: branch
            return x + 1
        return x - 1


class SlicesByAnItem(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x[:, : int(x.max().item())]  # LINE: item


class MakesAList(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * len([y for y in x[0].tolist() if y > 0])  # LINE: list


class TakesATruth(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * bool((x > 0).all())  # LINE: truth


class TakesAnInteger(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x.roll(int(x[0, 0]), 0)  # LINE: integer


class TakesAFloat(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * float(x.mean())  # LINE: float


class LoopsOnATensor(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        while x.norm() > 1:  # LINE: loop
            x = x / 2
        return x


class CountsInARange(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        for _ in range(x.argmax()):  # LINE: range
            x = x + 1
        return x


class FormatsAValue(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return {f"about {x.sum():.1f}": x}  # LINE: format


class ComparesWithIn(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x + (1 if 3.0 in x else 0)  # LINE: in


class GoesToNumpy(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * x.numpy().max()  # LINE: numpy


class FindsPlaces(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.nonzero(x > 0) + 1  # LINE: nonzero


class FindsUniqueValues(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.unique(x) * 2  # LINE: unique


class RepeatsByCounts(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.repeat_interleave(x, x[:, 0].long(), 0)  # LINE: repeats


class SplitsByAMask(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x[x[:, 0] > 0].sum(0)  # LINE: mask


class Prints(torch.nn.Module):
    """Prints a tensor with its values, on which no result depends."""

    def forward(self, x: Any) -> Any:
        print(x)  # noqa: T201
        return x + 1


class Doubles(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x.double().sum()  # LINE: double


class Mistaken(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x @ x[:2]  # LINE: mistake


def line_of(label: str) -> str:
    source = open(__file__).read().splitlines()  # noqa: SIM115, PTH123
    (number,) = (i for i, line in enumerate(source, 1) if line.endswith(f"# LINE: {label}"))
    return f"{HERE}:{number}"


def test_all_unsupported_operators_are_listed_with_module_line_count_and_advice() -> None:
    with pytest.raises(UnsupportedOperators) as caught:
        capture_module(Unsupported(), {"x": torch.ones(4, 4)})
    findings = {finding.operator: finding for finding in caught.value.findings}
    airy = findings["aten.special_airy_ai.default"]
    assert (airy.module, airy.source, airy.count) == ("block", line_of("airy"), 2)
    boolean = findings["aten.index.Tensor"]
    assert (boolean.module, boolean.source) == ("", line_of("boolean"))
    assert "use torch.where" in boolean.advice
    determinant = next(finding for name, finding in findings.items() if "linalg" in name)
    assert determinant.source == line_of("determinant")
    assert "aten.special_airy_ai.default (2 calls)" in str(caught.value)


DECISIONS = [
    (Branches, "branch"),
    (SlicesByAnItem, "item"),
    (MakesAList, "list"),
    (TakesATruth, "truth"),
    (TakesAnInteger, "integer"),
    (TakesAFloat, "float"),
    (LoopsOnATensor, "loop"),
    (CountsInARange, "range"),
    (FormatsAValue, "format"),
    (ComparesWithIn, "in"),
    (GoesToNumpy, "numpy"),
    (FindsPlaces, "nonzero"),
    (FindsUniqueValues, "unique"),
    (RepeatsByCounts, "repeats"),
    (SplitsByAMask, "mask"),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("kind", "label"), DECISIONS, ids=[label for _, label in DECISIONS])
@pytest.mark.parametrize("held", [torch.ones(4, 4), torch.arange(16.0).reshape(4, 4)], ids=["ones", "range"])
def test_a_decision_by_a_tensors_value_is_never_taken_and_names_its_line(kind: Any, label: str, held: Any) -> None:
    with pytest.raises(CompileError) as caught:
        capture_module(kind(), {"x": held})
    assert line_of(label) in str(caught.value)
    assert "torch.where" in str(caught.value) or "keep it a tensor" in str(caught.value)
    if isinstance(caught.value, GraphBreak):
        assert caught.value.source == line_of(label)


def test_a_branch_on_a_buffer_or_a_parameter_is_no_less_a_decision() -> None:
    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            return x + 1 if self.gate > 0 else x  # LINE: gate

    with pytest.raises(GraphBreak, match="on a tensor's value") as caught:
        capture_module(Gated(), {"x": torch.ones(4, 4)})
    assert caught.value.source == line_of("gate")


def test_printing_a_tensor_does_no_harm() -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        graph = capture_module(Prints(), {"x": torch.ones(4, 4)})
    assert [node.op.label for node in graph.nodes] == ["add"]


def test_a_type_that_the_hardware_lacks_is_a_finding() -> None:
    with pytest.raises(UnsupportedOperators) as caught:
        capture_module(Doubles(), {"x": torch.ones(4, 4)})
    assert [finding.source for finding in caught.value.findings] == [line_of("double")]
    assert "no such element type" in caught.value.findings[0].advice


def test_a_mistake_in_a_model_is_a_sentence_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"^Mistaken cannot be traced with x \[4, 4\]: RuntimeError at ") as caught:
        capture_module(Mistaken(), {"x": torch.ones(4, 4)})
    assert line_of("mistake") in str(caught.value)
    assert "\n" not in str(caught.value)


BERT = {"model_type": "bert", **CONFIGS["bert"]}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"task": "poetry"}, "task 'poetry' is unknown; choose one of"),
        ({"phase": "encode"}, "phase 'encode' is unknown; choose one of forward, prefill, extend, decode"),
        ({"phase": "prefill"}, "phase 'prefill' belongs to task 'text-generation'"),
        ({"phase": "decode"}, "phase 'decode' belongs to task 'text-generation'"),
        (
            {"capacity": 9},
            "a capacity of 9 is invalid in phase 'forward' of 8 tokens; only prefill and extend have one",
        ),
        ({"task": "text-generation", "phase": "prefill", "capacity": 7}, "at least as large as the sequence"),
        ({"task": "text-generation", "phase": "prefill", "capacity": 65}, "sequence 65 is longer than the model's"),
        ({"dtype": "int4"}, "dtype 'int4' is unknown"),
        ({"batch": 0}, "must both be at least 1"),
        ({"sequence": 65}, "sequence 65 is longer than the model's max_position_embeddings of 64"),
        ({"config": {}}, "names no model_type"),
        ({"config": {"model_type": "brt"}}, "model_type 'brt' is unknown to transformers"),
        ({"config": {"model_type": "vit"}, "task": "fill-mask"}, "no fill-mask model of type 'vit'"),
        ({"config": BERT | {"hidden_size": 33}}, "cannot be built from this configuration: The hidden size"),
        ({"config": BERT | {"hidden_size": "wide"}}, "transformers rejects this 'bert' configuration"),
        ({"config": BERT | {"quantization_config": {"bits": 4}}}, "quantised checkpoint"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_in_a_sentence(changes: dict[str, Any], complaint: str) -> None:
    fields: dict[str, Any] = {"config": BERT, "task": "feature-extraction", "phase": "forward"}
    fields |= {"batch": 1, "sequence": 8, "dtype": "float32"}
    with pytest.raises(CaptureError, match=complaint) as caught:
        capture(CaptureRequest(**(fields | changes)))
    assert "\n" not in str(caught.value)


def test_the_reference_names_a_weight_that_it_was_not_given() -> None:
    wanted = request("bert")
    parameters = weights(wanted)
    del parameters["pooler.dense.bias"]
    ids = np.ones((2, 12), np.int64)
    with pytest.raises(MissingTensor, match=r"parameter 'pooler\.dense\.bias' is missing"):
        reference_outputs(wanted, parameters, {"input_ids": ids, "attention_mask": ids})
