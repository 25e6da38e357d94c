"""Builds for several ranks: one copy of the weights, one cache for all buckets, refusals with a remedy."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nxpipe.artifact_store import open_store
from nxpipe.emulator.capture import CaptureRequest, reference_outputs
from nxpipe.emulator.compile import CompiledGraph
from nxpipe.emulator.executable.executable import from_bytes
from nxpipe.emulator.hardware import instance
from nxpipe.emulator.ir.decoding import decode
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.ops import RankSlice
from nxpipe.emulator.passes.shard import Sharding
from nxpipe.emulator.run.fast import LoadedRanks
from nxpipe.pipeline.compile.frontend import compile_shape
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape, shapes_of
from nxpipe.pipeline.models.source import resolve
from nxpipe.pipeline.models.weights import RandomWeights, Tensors
from tests.pipeline.conftest import LLAMA, write_model
from tests.pipeline.test_build import build, built

pytestmark = pytest.mark.sample(12)


def test_every_degree_shares_one_copy_of_the_weights(tmp_path: Path, llama: Path) -> None:
    target = ["--target", "trn2.48xlarge", "--phases", "prefill,decode", "--no-verify"]
    keys = [str(built(tmp_path, llama, *target, "--tp", str(degree))["request_key"]) for degree in (1, 2, 8)]
    store = open_store(f"file://{tmp_path}/store")
    manifests = [store.resolve(key).manifest for key in keys]
    assert len(set(keys)) == 3
    assert manifests[0].weights == manifests[1].weights == manifests[2].weights
    assert [{program.tensor_parallel for program in manifest.executables} for manifest in manifests] == [{1}, {2}, {8}]


def test_an_artifact_says_which_piece_of_which_tensor_each_rank_has(tmp_path: Path, llama: Path) -> None:
    key = str(built(tmp_path, llama, "--target", "inf2.24xlarge", "--tp", "4", "--phases", "prefill")["request_key"])
    store = open_store(f"file://{tmp_path}/store")
    manifest = store.resolve(key).manifest
    (program,) = manifest.executables
    (file,) = [file for file in manifest.files if file.path == f"graphs/{program.name}"]
    result = from_bytes(store.read_blob(program.blob))
    graph = unroll(decode(store.read_blob(file.blob)))
    names = {value: name for name, value in graph.parameters.items()}
    sliced = {
        names[node.operands[0]]: Sharding(op.axis, op.sizes, op.parts)
        for node in graph.nodes
        if isinstance(op := node.op, RankSlice) and node.operands[0] in names
    }
    assert result.pieces(Role.PARAMETER) == sliced
    # Two key heads on four ranks: each has one, and two ranks have the same.
    assert result.pieces(Role.STATE)["cache.0.key"] == Sharding(1, (2,), (2,))
    assert graph.inputs["cache.0.key"].type.shape == (1, 1, 32, 8)


@pytest.mark.sample(16)
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--tp", "4"], "inf2.xlarge has no tensor-parallel degree 4; it offers 1, 2; the nearest is --tp 2"),
        (["--tp", "7", "--target", "trn2.48xlarge"], "offers 1, 2, 4, 8, 16, 32, 64; the nearest is --tp 8"),
        (
            ["--tp", "16", "--target", "trn2.48xlarge"],
            "the 2 key heads that serve them cannot be shared by 16 ranks; on trn2.48xlarge it can have 1, 2, 4, 8; "
            "the nearest is --tp 8",
        ),
    ],
)
def test_a_degree_that_cannot_be_had_is_one_sentence_with_the_nearest_that_can(
    flags: list[str], sentence: str, tmp_path: Path, llama: Path
) -> None:
    answer = build(tmp_path, llama, *flags, "--phases", "prefill")
    assert (answer.code, answer.out) == (11, "")
    assert sentence in answer.err
    assert "Traceback" not in answer.err


def test_buckets_share_one_decode_and_every_prefill_fills_its_cache(llama: Path) -> None:
    shapes = shapes_of(("prefill", "decode"), (1, 2), (16, 64, 32))
    assert [shape.name for shape in shapes if shape.phase == "decode"] == ["decode-b1-s64", "decode-b2-s64"]
    request = BuildSpec(resolve(str(llama)), RandomWeights(0), shapes, instance("inf2.xlarge"))
    captured = [request.capture_request(shape) for shape in shapes]
    assert {entry.cache_length for entry in captured if entry} == {64}


@pytest.mark.parametrize("degree", [1, 4])
def test_a_prompt_in_a_small_bucket_is_continued_as_pytorch_continues_it(degree: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {**LLAMA, "torch_dtype": "float32"})
    small, large, decode = shapes_of(("prefill", "decode"), (1,), (8, 16))
    request = BuildSpec(resolve(str(folder)), RandomWeights(0), (small, large, decode), instance("trn2.48xlarge"))
    weights = dict(Tensors(request.weights, request.parameters(small)))

    def program(shape: Shape) -> CompiledGraph:
        return compile_shape(replace(request, autocast="none", tensor_parallel=degree), shape)

    prefill, step = program(small), program(decode)
    blank = {name: value.type for name, value in prefill.graph.inputs.items() if name in prefill.graph.outputs}
    assert blank == {name: value.type for name, value in step.graph.inputs.items() if name in step.graph.outputs}
    states = [{name: np.zeros(kind.shape, np.float32) for name, kind in blank.items()} for _ in range(degree)]

    tokens = list(np.random.default_rng(0).integers(3, 128, 6))
    prompt = {"input_ids": np.zeros((1, 8), np.int64), "attention_mask": np.zeros((1, 8), np.int64)}
    prompt["input_ids"][0, :6], prompt["attention_mask"][0, :6] = tokens, 1
    outputs, states = LoadedRanks(prefill.graph, weights).run(prompt, states)
    ranks = LoadedRanks(step.graph, weights)
    while len(tokens) < 14:  # beyond the small bucket, within the cache
        _assert_as_pytorch(request, weights, tokens, outputs["logits"])
        tokens.append(outputs["logits"].argmax())
        given = {"input_ids": np.array([[tokens[-1]]]), "position": np.array([len(tokens) - 1])}
        outputs, states = ranks.run(given, states)
    _assert_as_pytorch(request, weights, tokens, outputs["logits"])


def _assert_as_pytorch(
    request: BuildSpec, weights: dict[str, np.ndarray], tokens: list[int], logits: np.ndarray
) -> None:
    whole = CaptureRequest(request.source.config, "text-generation", "forward", 1, len(tokens), "float32")
    inputs = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    expected = reference_outputs(whole, weights, inputs)["logits"][0, -1]
    np.testing.assert_allclose(logits[0, 0], expected, rtol=0, atol=3e-6 * np.abs(expected).max())
