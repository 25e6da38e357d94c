"""A build end to end: the real command, real PyTorch, a real store."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load, load_file, save_file

from nxpipe.artifact_store import Published, Store, open_store
from nxpipe.artifact_store.weights import read_weights
from nxpipe.emulator.ir.decoding import decode
from nxpipe.emulator.run.fast import execute
from nxpipe.pipeline.cli.main import cli
from nxpipe.pipeline.models.weights import numpy_dtype
from nxpipe.pipeline.util.console import Console
from tests.pipeline.command import Answer
from tests.pipeline.command import nxpipe as installed
from tests.pipeline.conftest import BERT, LLAMA, write_model
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]


def words(tmp_path: Path, model: Path, *more: str) -> list[str]:
    default = [] if "--weights" in more else ["--weights", "random:0"]
    return [
        "build",
        "--model-id",
        str(model),
        "--store",
        f"file://{tmp_path}/store",
        "--buckets",
        "32",
        *default,
        *more,
    ]


def build(tmp_path: Path, model: Path, *more: str, **environment: str) -> Answer:
    """Build in a process of its own, for exit codes, streams and imports."""
    return installed(*words(tmp_path, model, *more), cwd=tmp_path, **environment)


def built(tmp_path: Path, model: Path, *more: str) -> dict[str, object]:
    """Build in this process, which has imported torch, for the artifact."""
    answer = CliRunner().invoke(cli, [*words(tmp_path, model, *more), "--json"], obj=Console(), catch_exceptions=False)
    assert answer.exit_code == 0, answer.stderr
    (only,) = json.loads(answer.stdout)
    assert isinstance(only, dict)
    return only


def weights_of(published: Published, store: Store) -> dict[str, Any]:
    """An artifact's weights, each verified against its digest."""
    return {
        tensor.name: np.frombuffer(data, numpy_dtype(tensor.dtype)).reshape(tensor.shape).copy()
        for tensor, data in read_weights(store.blobs, published.manifest.weights)
    }


def imports(answer: Answer) -> set[str]:
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in answer.err.splitlines()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", ["bert", "llama"])
def test_a_model_is_captured_emulated_verified_and_published(
    model: str, tmp_path: Path, request: pytest.FixtureRequest, nxpipe: InProcess
) -> None:
    found = built(tmp_path, request.getfixturevalue(model))
    assert found["cache"] == "miss"
    listing = json.loads(nxpipe("store", "ls", "--json", "--store", f"file://{tmp_path}/store").out)
    assert [row["request_key"] for row in listing] == [found["request_key"]]
    programs = {"bert": ["forward-b1-s32"], "llama": ["decode-b1-s32", "prefill-b1-s32"]}
    manifest = open_store(f"file://{tmp_path}/store").resolve(str(found["request_key"])).manifest
    assert [program.name for program in manifest.executables] == programs[model]


def test_a_second_identical_build_is_a_hit_that_imports_nothing_heavy(tmp_path: Path, bert: Path) -> None:
    (bert / "tokenizer.json").write_text("{}")
    first = built(tmp_path, bert)
    second = build(tmp_path, bert, PYTHONPROFILEIMPORTTIME="1")
    assert "pydantic" in imports(second)
    assert imports(second) & {"torch", "transformers", "boto3", "numpy"} == set()
    assert str(first["request_key"])[:12] in second.out
    assert second.out.startswith("cached ")


@pytest.mark.sample(4)
def test_what_was_published_runs_again_from_the_store_alone(tmp_path: Path, llama: Path) -> None:
    """Graph, weights and the inputs of its evidence, all read back by digest, give the answers there to the bit."""
    key = str(built(tmp_path, llama, "--phases", "prefill")["request_key"])
    store = open_store(f"file://{tmp_path}/store")
    published = store.resolve(key)
    manifest = published.manifest
    (program,) = manifest.executables
    (file,) = (file for file in manifest.files if file.path == f"graphs/{program.name}")
    graph = decode(store.read_blob(file.blob))
    assert graph.key == program.graph_key
    weights = weights_of(published, store)
    (evidence,) = store.evidence(published.manifest_digest)
    (compared,) = evidence.programs
    outputs = execute(graph, weights, load(store.read_blob(compared.inputs)))
    expected = load(store.read_blob(compared.answers))
    assert sorted(expected) == list(program.outputs) == sorted(output.output for output in compared.outputs)
    assert outputs.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(outputs[name], value)


@pytest.mark.sample(4)
def test_two_builds_in_two_places_give_one_manifest_digest(tmp_path: Path) -> None:
    digests = set()
    for name in ("here", "there"):
        folder = tmp_path / name
        folder.mkdir()
        model = write_model(folder / "same-name", dict(BERT))
        digests.add(str(built(folder, model)["manifest"]))
    assert len(digests) == 1


@pytest.mark.sample(4)
def test_a_build_from_safetensors_uses_those_weights(tmp_path: Path, bert: Path) -> None:
    """Weights saved by one build's store, given back as files, compute the same answer as the seed that made them."""
    seeded = str(built(tmp_path, bert)["request_key"])
    store = open_store(f"file://{tmp_path}/store")
    save_file(weights_of(store.resolve(seeded), store), bert / "model.safetensors")
    from_files = str(built(tmp_path, bert, "--weights", str(bert))["request_key"])
    assert from_files != seeded
    weights = [store.resolve(key).manifest.weights for key in (seeded, from_files)]
    assert weights[0] == weights[1]


@pytest.mark.sample(4)
def test_a_changed_weight_file_is_a_miss(tmp_path: Path, bert: Path) -> None:
    built(tmp_path, bert)
    store = open_store(f"file://{tmp_path}/store")
    (published,) = store.list()
    tensors = weights_of(published, store)
    save_file(tensors, bert / "model.safetensors")
    before = built(tmp_path, bert, "--weights", str(bert))
    assert built(tmp_path, bert, "--weights", str(bert))["cache"] == "hit"
    next(iter(tensors.values())).flat[0] += 1
    save_file(tensors, bert / "model.safetensors")
    after = built(tmp_path, bert, "--weights", str(bert))
    assert after["cache"] == "miss"
    assert after["request_key"] != before["request_key"]


@pytest.mark.sample(6)
def test_several_buckets_and_batches_are_programs_of_one_artifact_that_share_the_weights(
    tmp_path: Path, bert: Path
) -> None:
    key = str(built(tmp_path, bert, "--buckets", "16,32", "--batches", "1,2", "--no-verify")["request_key"])
    manifest = open_store(f"file://{tmp_path}/store").resolve(key).manifest
    names = [program.name for program in manifest.executables]
    assert names == ["forward-b1-s16", "forward-b1-s32", "forward-b2-s16", "forward-b2-s32"]
    assert len({program.graph_key for program in manifest.executables}) == 4


@pytest.mark.sample(4)
def test_bf16_deviates_from_pytorch_by_a_bf16_sized_error_and_fp32_hardly(tmp_path: Path, bert: Path) -> None:
    def worst(*more: str) -> float:
        report = built(tmp_path, bert, *more)["verification"]
        assert isinstance(report, dict)
        return max(float(row["max_relative"]) for rows in report.values() for row in rows)

    assert worst("--autocast", "none") < 1e-5
    assert 1e-5 < worst("--autocast", "matmult") < 2e-2


@pytest.mark.sample(2)
def test_an_answer_too_far_from_pytorch_is_refused_and_nothing_is_published(
    tmp_path: Path, bert: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NXPIPE_VERIFY_MAX_RELATIVE_ERROR", "0.0000001")
    answer = nxpipe(*words(tmp_path, bert))
    assert answer.code == 12
    assert "the reference is PyTorch fp32" in answer.err
    assert open_store(f"file://{tmp_path}/store").list() == []


@pytest.mark.sample(4)
def test_force_builds_again_and_finds_the_same(tmp_path: Path, bert: Path) -> None:
    first = built(tmp_path, bert)
    again = built(tmp_path, bert, "--force")
    assert (again["cache"], again["manifest"]) == ("miss", first["manifest"])


REFUSED = [
    (["--tp", "3"], 11, "the nearest is --tp 2"),
    (["--buckets", "65"], 11, "at most 64"),
    (["--phases", "decode"], 11, "phase 'decode'"),
    (["--weights", "random:x"], 10, "as in random:0"),
    (["--weights", "/nowhere"], 10, "no such folder"),
    (["--target", "inf2.xlrage"], 2, "inf2.xlarge"),
    (["--buckets", "0"], 2, "buckets"),
    (["--buckets", "x"], 2, "buckets"),
    (["--autocast", "most"], 2, "matmult"),
    (["--task", "translation"], 2, "did you mean 'text2text-generation'?"),
    (["--store", "ftp://host"], 20, "file://"),
]


@pytest.mark.parametrize(("flags", "code", "sentence"), REFUSED, ids=[" ".join(flags) for flags, _, _ in REFUSED])
def test_a_wrong_request_is_one_sentence_and_its_exit_code(
    flags: list[str], code: int, sentence: str, tmp_path: Path, bert: Path, nxpipe: InProcess
) -> None:
    answer = nxpipe(*words(tmp_path, bert, *flags))
    assert (answer.code, answer.out) == (code, "")
    assert sentence in answer.err
    assert "Traceback" not in answer.err


BROKEN_CONFIGS: list[tuple[dict[str, object], str]] = [
    ({"model_type": "no-such-architecture"}, "no-such-architecture"),
    ({**BERT, "hidden_size": 33}, "33"),
    ({**BERT, "hidden_size": "wide"}, ""),
    ({**LLAMA, "architectures": ["LlamaModel"], "num_attention_heads": 7, "hidden_size": 65}, ""),
]


@pytest.mark.parametrize(("config", "sentence"), BROKEN_CONFIGS)
def test_a_configuration_that_makes_no_model_is_a_compile_error(
    config: dict[str, object], sentence: str, tmp_path: Path, nxpipe: InProcess
) -> None:
    answer = nxpipe(*words(tmp_path, write_model(tmp_path / "broken", config)))
    assert answer.code in (11, 15), answer.err  # 15: other programs of the model were not tried
    assert sentence in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.sample(4)
def test_what_was_fed_opens_with_the_public_reader(tmp_path: Path, bert: Path) -> None:
    key = str(built(tmp_path, bert)["request_key"])
    store = open_store(f"file://{tmp_path}/store")
    (evidence,) = store.evidence(store.resolve(key).manifest_digest)
    store.copy_blob_to(evidence.programs[0].inputs, tmp_path / "inputs.safetensors")
    assert {"input_ids", "attention_mask"} >= set(load_file(tmp_path / "inputs.safetensors"))
