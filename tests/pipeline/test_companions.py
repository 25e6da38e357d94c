"""Files that an artifact takes along: the tokenizer, the chat template, the generation configuration."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nxpipe.artifact_store import open_store
from tests.pipeline.command import nxpipe
from tests.serving import checkpoints

pytestmark = pytest.mark.sample(4, "companions")


def built(model: Path, store: Path, *words: str, code: int = 0) -> Any:
    phases = () if "--phases" in words else ("--phases", "prefill")
    arguments = ("--model-id", str(model), "--buckets", "8", "--no-verify", "--store", str(store), *phases)
    weights = () if "--weights" in words else ("--weights", "random:0")
    answer = nxpipe("build", *arguments, *weights, *words, "--json", cwd=store.parent)
    assert answer.code == code, answer.err
    return (json.loads(answer.out)[0], answer.err) if code == 0 else answer.err


def test_a_new_tokenizer_is_a_new_artifact_that_compiles_nothing(tmp_path: Path) -> None:
    model, store = checkpoints.write(tmp_path / "tiny", "llama"), tmp_path / "store"
    first, _ = built(model, store)
    files = {file.path: file.blob for file in open_store(str(store)).resolve(first["request_key"]).manifest.files}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert open_store(str(store)).read_blob(files[name]) == (model / name).read_bytes()
    (model / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.6}')
    order = ("--model-id", str(model), "--weights", "random:0", "--buckets", "8", "--phases", "prefill")
    why = nxpipe("explain", *order, "--store", str(store), cwd=tmp_path)
    assert 'files."generation_config.json"' in why.out
    second, err = built(model, store)
    assert second["request_key"] != first["request_key"]
    assert "1 cached" in err
    again, _ = built(model, store)
    assert again["request_key"] == second["request_key"]


def test_a_renamed_folder_and_other_times_are_a_cache_hit(tmp_path: Path) -> None:
    store, keys = tmp_path / "store", set()
    for place in ("here", "there"):
        model = checkpoints.write(tmp_path / place / "tiny", "llama")
        os.utime(model / "tokenizer.json", (1e9, 1e9))
        keys.add(built(model, store)[0]["request_key"])
    assert len(keys) == 1


def test_a_model_without_such_files_takes_those_of_its_weights(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from nxpipe.emulator.capture import CaptureRequest, parameter_specs
    from nxpipe.pipeline.models.weights import random_tensor

    weights, model = checkpoints.write(tmp_path / "weights", "llama"), tmp_path / "model"
    model.mkdir()
    config = json.loads((weights / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config))
    kinds = parameter_specs(CaptureRequest(config, "text-generation", "prefill", 1, 8, "float32"))
    tensors = {name: random_tensor(1, name, kind.shape, "float32") for name, kind in kinds.items()}
    save_file(tensors, weights / "model.safetensors")
    found, _ = built(model, tmp_path / "store", "--weights", str(weights))
    manifest = open_store(str(tmp_path / "store")).resolve(found["request_key"]).manifest
    assert "tokenizer.json" in {file.path for file in manifest.files}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", "{", "tokenizer.json: Expecting property name"),
        ("generation_config.json", "\udcff", "generation_config.json: 'utf-8' codec can't decode"),
    ],
)
def test_a_broken_file_is_one_sentence_before_any_work(name: str, content: str, sentence: str, tmp_path: Path) -> None:
    model, store = checkpoints.write(tmp_path / "tiny", "llama"), tmp_path / "store"
    (model / name).write_bytes(content.encode(errors="surrogateescape"))
    err = built(model, store, code=10)
    assert sentence in err
    assert "save the file again, or move it away" in err
    assert not list(store.glob("cas/**/*.*"))


def test_text_generation_builds_prefill_and_decode_unless_told_otherwise(tmp_path: Path) -> None:
    model, store = checkpoints.write(tmp_path / "tiny", "llama"), tmp_path / "store"
    arguments = (
        "--model-id",
        str(model),
        "--buckets",
        "8",
        "--no-verify",
        "--weights",
        "random:0",
        "--store",
        str(store),
    )
    answer = nxpipe("build", *arguments, "--json", "-q", cwd=tmp_path)
    assert answer.code == 0, answer.err
    manifest = open_store(str(store)).resolve(json.loads(answer.out)[0]["request_key"]).manifest
    assert [each.name for each in manifest.executables] == ["decode-b1-s8", "prefill-b1-s8"]
