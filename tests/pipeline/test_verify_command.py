"""`nxpipe verify`, in this process: real models, real PyTorch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from nxpipe.artifact_store import open_store
from nxpipe.pipeline.models.configuration import first_layers
from nxpipe.pipeline.models.weights import numpy_dtype
from tests.emulator.divided_models import FAMILIES
from tests.emulator.models import small_config
from tests.pipeline.conftest import BERT, LLAMA, write_model
from tests.pipeline.in_process import InProcess, nxpipe

pytestmark = pytest.mark.sample(12)

__all__ = ["nxpipe"]


def verified(nxpipe: InProcess, model: Path, *more: str, code: int = 0) -> dict[str, Any]:
    words = ("--model-id", str(model), "--weights", "random:0", "--buckets", "16", "--json", "-q")
    answer = nxpipe("verify", *words, *more)
    assert answer.code == code, answer.err
    (document,) = json.loads(answer.out)
    assert isinstance(document, dict)
    return document


def test_each_autocast_mode_asked_for_is_measured_beside_pytorchs_own_bf16(nxpipe: InProcess, bert: Path) -> None:
    found = verified(nxpipe, bert, "--task", "fill-mask", "--also", "none", "--also", "all")
    assert list(found["emulated"]) == ["matmult", "none", "all"]
    divergence = {way: run["outputs"][0]["kl"] for way, run in found["emulated"].items()}
    assert abs(divergence["none"]) < 1e-9 < divergence["matmult"]
    assert divergence["matmult"] <= found["beside"]["PyTorch bf16"]["outputs"][0]["kl"]
    assert found["passed"]
    assert not any("layers" in run for run in (*found["emulated"].values(), *found["beside"].values()))


def test_every_layer_is_found_in_the_graph_and_errors_grow_from_the_first(
    nxpipe: InProcess, llama: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    found = verified(nxpipe, llama, "--phases", "prefill", "--layers", "--html", str(page))
    assert "No layer is beyond the thresholds" in page.read_text()
    layers = found["emulated"]["matmult"]["layers"]
    assert [layer["output"] for layer in layers] == ["model.layers.0", "model.layers.1"]
    assert all(layer["max_absolute"] > 0 for layer in layers)
    assert found["emulated"]["matmult"]["first_layer_beyond"] is None


@pytest.mark.parametrize("mode", ["fast", "isa"])
@pytest.mark.parametrize("family", ["llama", "gptj"])  # gptj adds what two branches give before ranks meet
def test_layers_are_seen_whole_however_many_ranks_make_them(
    family: str, mode: str, nxpipe: InProcess, tmp_path: Path
) -> None:
    model = write_model(tmp_path / family, {"model_type": family, **FAMILIES[family][1], "torch_dtype": "float32"})
    words = ("--task", "text-generation", "--phases", "prefill", "--layers", "--tp", "2", "--mode", mode)
    found = verified(nxpipe, model, *words)
    layers = found["emulated"]["matmult"]["layers"]
    assert [layer["output"].rpartition(".")[2] for layer in layers] == ["0", "1"]
    assert all(0 < layer["max_relative"] < 0.02 for layer in layers)


def test_the_first_layer_that_diverges_is_named(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight of the second layer is wrong on the emulator's side only: the first layer is not to blame."""
    from nxpipe.emulator.run.fast import LoadedGraph

    model = write_model(tmp_path / "deep", {**LLAMA, "num_hidden_layers": 3, "torch_dtype": "float32"})
    load = LoadedGraph.__init__

    def spoiled(self: LoadedGraph, graph: Any, parameters: Any, *more: Any) -> None:
        wrong = "model.layers.1.mlp.down_proj.weight"
        values = {name: parameters[name] for name in parameters}
        values[wrong] = -20 * values[wrong]
        load(self, graph, values, *more)

    monkeypatch.setattr(LoadedGraph, "__init__", spoiled)
    found = verified(nxpipe, model, "--phases", "prefill", "--layers", code=12)
    assert found["emulated"]["matmult"]["first_layer_beyond"] == "model.layers.1"
    assert not found["passed"]


def test_a_threshold_of_the_configuration_decides_the_exit_code(nxpipe: InProcess, bert: Path, tmp_path: Path) -> None:
    config = tmp_path / "nxpipe.toml"
    config.write_text('[project]\nname = "x"\n\n[verify]\nmax_kl = 1e-12\n')
    words = ("--model-id", str(bert), "--weights", "random:0", "--task", "fill-mask", "--config", str(config))
    answer = nxpipe("verify", *words, "--buckets", "16")
    assert answer.code == 12
    assert "KL divergence" in answer.err
    assert "> max_kl 1e-12" in answer.err


def test_a_deep_model_is_verified_on_its_first_layers_and_the_report_says_so(nxpipe: InProcess, tmp_path: Path) -> None:
    model = write_model(tmp_path / "deep", {**LLAMA, "num_hidden_layers": 5})
    found = verified(nxpipe, model, "--phases", "prefill", "--layers", "--slice-layers", "2")
    assert found["slice_layers"] == 2
    assert len(found["emulated"]["matmult"]["layers"]) == 2
    answer = nxpipe(
        "verify",
        "--model-id",
        str(model),
        "--weights",
        "random:0",
        "--slice-layers",
        "2",
        "--buckets",
        "8",
        *("--phases", "prefill"),
    )
    assert "first 2 layers" in answer.out


def test_lists_with_an_entry_a_layer_are_cut_with_the_layers() -> None:
    config = {"model_type": "x", "num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "eos_token_id": [1, 2]}
    assert first_layers(config, 2) == config | {"num_hidden_layers": 2, "layer_types": ["a", "b"]}


@pytest.mark.parametrize(
    ("config", "cut"),
    [
        ({"depths": [3, 1, 27]}, {"depths": [2, 1, 2]}),
        ({"layers_per_block": 3}, {"layers_per_block": 2}),
        (
            {"num_hidden_layers": 3, "num_feat_extract_layers": 3, "conv_dim": [8, 8, 8]},
            {"num_hidden_layers": 2},
        ),
        (
            {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
            {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
        ),
        ({"encoder_layers": 6, "decoder_layers": 1}, {"encoder_layers": 2}),
        ({"vision_config": {"num_hidden_layers": 3}}, {"vision_config": {"num_hidden_layers": 2}}),
    ],
)
def test_stages_towers_and_what_stands_in_front_of_the_layers_keep_their_own_counts(
    config: dict[str, object], cut: dict[str, object]
) -> None:
    assert first_layers(config, 2) == config | cut


@pytest.mark.parametrize("family", ["swin", "t5", "clip", "wav2vec2"])
def test_images_sound_and_encoder_decoders_are_sliced_and_compared_layer_by_layer(
    family: str, nxpipe: InProcess, tmp_path: Path
) -> None:
    found = verified(nxpipe, write_model(tmp_path / family, small_config(family)), "--layers", "--slice-layers", "1")
    assert found["passed"]
    layers = found["emulated"]["matmult"]["layers"]
    assert layers
    assert all(layer["max_relative"] < 0.05 for layer in layers)


def test_prompts_are_read_in_batches_and_padding_does_not_count(nxpipe: InProcess, bert: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("[3, 4, 5, 6]\n\n[7, 8]\n[9, 10, 11]\n")
    found = verified(nxpipe, bert, "--task", "fill-mask", "--prompts", str(prompts), "--batches", "2")
    assert found["inputs"] == "3 prompts"
    assert found["passed"]


def test_prompts_are_read_by_the_prefill_and_a_decode_beside_it_has_random_inputs(
    nxpipe: InProcess, llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("[3, 4, 5, 6]\n")
    words = ("verify", "--model-id", str(llama), "--weights", "random:0", "--buckets", "16", "--json", "-q")
    found = json.loads(nxpipe(*words, "--prompts", str(tmp_path / "prompts.txt")).out)
    assert {program["program"]: program["inputs"] for program in found} == {
        "decode-b1-s16": "random inputs",
        "prefill-b1-s16": "1 prompts",
    }
    alone = nxpipe(*words, "--prompts", str(tmp_path / "prompts.txt"), "--phases", "decode")
    assert "not text alone; leave out --prompts, or pass --phases prefill" in alone.err


@pytest.mark.parametrize(
    ("text", "complaint", "code"),
    [
        ("", "holds no prompt", 2),
        ("hello\n", "has no tokenizer", 10),
        ("[3, 97]\n", "token 97 is not in the vocabulary of 97", 2),
        ("[3, -1]\n", "token -1 is not in the vocabulary of 97", 2),
        ("[]\n", "no token at all", 2),
        ("[3.0, 4.0]\n", "token ids are whole numbers", 2),
        ("[[3, 4], [5, 6]]\n", "token ids are whole numbers", 2),
        ("[3, 4]\n[" + "5," * 16 + "6]\n", "Prompt 2 has 17 tokens, and the largest bucket 16", 2),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(
    nxpipe: InProcess, bert: Path, tmp_path: Path, text: str, complaint: str, code: int
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(text)
    words = ("--model-id", str(bert), "--weights", "random:0", "--buckets", "16")
    answer = nxpipe("verify", *words, "--prompts", str(prompts))
    assert answer.code == code
    assert complaint in answer.err


def test_weights_beyond_memory_are_refused_with_the_way_out(
    nxpipe: InProcess, bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nxpipe.pipeline.verify.comparison.available_memory", lambda: 1000)
    answer = nxpipe("verify", "--model-id", str(bert), "--weights", "random:0", "--buckets", "16")
    assert answer.code == 11
    assert "--slice-layers N" in answer.err


def test_a_checkpoint_deeper_than_the_slice_is_read_in_part(nxpipe: InProcess, bert: Path) -> None:
    from safetensors.numpy import save_file

    from nxpipe.emulator.capture import CaptureRequest, parameter_specs

    specs = parameter_specs(CaptureRequest(BERT, "feature-extraction", "forward", 1, 16, "float32"))
    generator = np.random.default_rng(0)
    tensors = {
        name: (0.05 * generator.standard_normal(kind.shape)).astype(numpy_dtype(str(kind.dtype)))
        for name, kind in specs.items()
    }
    save_file(tensors, str(bert / "model.safetensors"))
    answer = nxpipe("verify", "--model-id", str(bert), "--slice-layers", "1", "--buckets", "16", "-q")
    assert answer.code == 0, answer.err


def test_a_decoder_is_followed_token_by_token_beside_its_own_cache(nxpipe: InProcess, llama: Path) -> None:
    answer = nxpipe(
        *("verify", "--model-id", str(llama), "--weights", "random:0", "--buckets", "16", "--json", "-q"),
        *("--phases", "prefill", "--steps", "3", "--autocast", "none"),
    )
    assert answer.code == 0, answer.err
    _, steps = json.loads(answer.out)
    outputs = steps["emulated"]["none"]["outputs"]
    assert [found["output"] for found in outputs] == [f"token {number}.logits" for number in range(4)]
    assert all(found["top1"] == 1 and found["max_relative"] < 0.05 for found in outputs)


def test_steps_that_leave_no_room_for_a_prompt_are_refused(nxpipe: InProcess, llama: Path) -> None:
    words = ("verify", "--model-id", str(llama), "--weights", "random:0", "--buckets", "16", "--steps", "16", "-q")
    answer = nxpipe(*words)
    assert answer.code == 11
    assert "leaves no tokens for a prompt" in answer.err


@pytest.mark.parametrize("degree", ["1", "2"])
def test_a_stored_artifact_is_verified_blob_by_blob_and_repeats_its_answers(
    nxpipe: InProcess, llama: Path, tmp_path: Path, degree: str
) -> None:
    store = tmp_path / "store"
    built = (
        "build",
        "--model-id",
        str(llama),
        "--weights",
        "random:0",
        "--buckets",
        "16",
        "--tp",
        degree,
        "--phases",
        "prefill",
    )
    assert nxpipe(*built, "--store", str(store), "-q").code == 0
    answer = nxpipe("verify", "tiny-llama", "--store", str(store), "--json", "-q")
    assert answer.code == 0, answer.err
    first, again = json.loads(answer.out)
    assert first["yardstick"] == "PyTorch fp32"
    assert any(output["max_absolute"] > 0 for output in first["emulated"]["as stored"]["outputs"])
    assert again["yardstick"] == "the stored outputs"
    assert all(output["max_absolute"] == 0 for output in again["emulated"]["as stored"]["outputs"])
    largest = max((path for path in (store / "cas").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    spoiled = bytearray(largest.read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    largest.chmod(0o600)
    largest.write_bytes(spoiled)
    assert nxpipe("verify", "tiny-llama", "--store", str(store), "-q").code == 22


def test_answers_that_are_not_those_stored_fail_however_near_to_pytorch(
    nxpipe: InProcess, bert: Path, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "store"))
    built = ("build", "--model-id", str(bert), "--weights", "random:0", "--buckets", "16")
    assert nxpipe(*built, "--store", str(tmp_path / "store"), "-q").code == 0
    (evidence,) = store.evidence(store.resolve("tiny-bert").manifest_digest)
    (compared,) = evidence.programs
    others = {name: -array for name, array in load(store.read_blob(compared.answers)).items()}
    lie = compared.model_copy(update={"answers": store.put_blob(save(others))})
    (tmp_path / "store" / evidence.path).unlink()
    store.attest(evidence.model_copy(update={"programs": (lie,)}))
    answer = nxpipe("verify", "tiny-bert", "--store", str(tmp_path / "store"), "--json", "-q")
    assert answer.code == 12
    assert [found["passed"] for found in json.loads(answer.out)] == [True, False]


@pytest.mark.parametrize(
    "more", [("--phases", "prefill"), ("--phases", "prefill", "--layers"), ("--steps", "2", "--phases", "decode")]
)
def test_a_sharded_model_is_verified_from_all_of_its_ranks(
    nxpipe: InProcess, llama: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nxpipe.emulator.run.fast import LoadedRanks

    degrees = []
    load = LoadedRanks.__init__

    def watched(self: LoadedRanks, graph: Any, parameters: Any) -> None:
        load(self, graph, parameters)
        degrees.append(self.degree)

    monkeypatch.setattr(LoadedRanks, "__init__", watched)
    words = ("--model-id", str(llama), "--weights", "random:0", "--buckets", "16", "--json", "-q")
    answer = nxpipe("verify", *words, "--tp", "2", *more)
    assert answer.code == 0, answer.err
    assert set(degrees) == {2}
    (first, *_) = json.loads(answer.out)
    layers = [layer["output"] for layer in first["emulated"]["matmult"].get("layers", ())]
    assert layers == (["model.layers.0", "model.layers.1"] if "--layers" in more else [])


def test_a_degree_that_the_model_cannot_have_is_refused_as_a_build_refuses_it(nxpipe: InProcess, llama: Path) -> None:
    words = ("--model-id", str(llama), "--weights", "random:0", "--buckets", "16", "--target", "trn2.48xlarge")
    answer = nxpipe("verify", *words, "--tp", "16")
    assert answer.code == 11
    assert "the nearest is --tp 8" in answer.err


def test_a_saved_program_is_held_against_pytorch_and_against_onnx(nxpipe: InProcess, tmp_path: Path) -> None:
    import onnx
    import torch

    torch.manual_seed(0)
    program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU()), (torch.zeros(2, 8),))
    torch.export.save(program, tmp_path / "m.pt2")
    value = onnx.helper.make_tensor_value_info
    weight = onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [value("x", onnx.TensorProto.FLOAT, ["batch", 4])],
        [value("y", onnx.TensorProto.FLOAT, ["batch", 3])],
        [weight],
    )
    onnx.save(onnx.helper.make_model(graph, ir_version=8), tmp_path / "m.onnx")
    for name, axes, yardstick in (
        ("m.pt2", (), "PyTorch, as saved"),
        ("m.onnx", ("--axis", "batch=2"), "ONNX's reference evaluator"),
    ):
        answer = nxpipe("verify", "--model-id", str(tmp_path / name), *axes, "--also", "none", "--json", "-q")
        assert answer.code == 0, answer.err
        (found,) = json.loads(answer.out)
        assert found["yardstick"] == yardstick
        assert found["emulated"]["none"]["outputs"][0]["max_relative"] < 1e-5
    useless = nxpipe("verify", "--model-id", str(tmp_path / "m.pt2"), "--buckets", "16")
    assert useless.code == 2
    assert "which has shapes and weights of its own" in useless.err
