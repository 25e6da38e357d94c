"""`nxpipe run`, in this process: outputs of programs for given inputs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]


def small(model: Path, *more: str) -> tuple[str, ...]:
    return ("--model-id", str(model), "--weights", "random:0", "--buckets", "8", *more)


def ran(nxpipe: InProcess, *words: str) -> list[dict[str, Any]]:
    answer = nxpipe("run", *words, "--json", "-q")
    assert answer.code == 0, answer.err
    found: list[dict[str, Any]] = json.loads(answer.out)
    return found


@pytest.mark.sample(6)
def test_texts_are_answered_a_row_each_alike_by_both_executors(nxpipe: InProcess, llama: Path) -> None:
    words = small(
        llama,
        "--phases",
        "prefill",
        "--autocast",
        "none",
        "--batches",
        "2",
        "--text",
        "[3, 4, 5]",
        "--text",
        "[7]",
        "--text",
        "[9]",
    )
    ((fast,), (isa,)) = (ran(nxpipe, *words, "--mode", mode) for mode in ("fast", "isa"))
    assert fast["inputs"] == isa["inputs"] == "3 texts"
    assert fast["outputs"]["logits"]["shape"] == isa["outputs"]["logits"]["shape"] == [3, 1, 128]
    chosen = [
        [[item["entry"] for item in row] for row in entry["outputs"]["logits"]["likeliest"]] for entry in (fast, isa)
    ]
    assert chosen[0] == chosen[1]
    assert len({tuple(row) for row in chosen[0]}) == 3
    assert "work" not in fast
    assert isa["work"]["by_engine"]["tensor"] > 10


@pytest.mark.sample(2)
def test_tensors_from_a_file_go_in_and_come_out(nxpipe: InProcess, bert: Path, tmp_path: Path) -> None:
    ids = np.array([[5, 6, 7, 8, 9, 10, 11, 12]])
    mask = np.array([[1, 1, 1, 1, 1, 0, 0, 0]])
    answers = []
    for padding in (0, 90):
        given, out = tmp_path / f"{padding}.safetensors", tmp_path / f"out{padding}"
        save_file({"input_ids": np.where(mask, ids, padding), "attention_mask": mask}, given)
        answer = nxpipe("run", *small(bert, "--autocast", "none"), "--input", str(given), "--output", str(out))
        assert answer.code == 0, answer.err
        assert "last_hidden_state" in answer.out
        answers.append(load_file(out / "forward-b1-s8.safetensors")["last_hidden_state"])
    np.testing.assert_array_equal(answers[0][:, :5], answers[1][:, :5])
    assert not np.array_equal(answers[0][:, 5:], answers[1][:, 5:])


@pytest.mark.sample(8)
@pytest.mark.parametrize("mode", ["fast", "isa"])
def test_an_input_that_is_missing_or_wrong_is_named(mode: str, nxpipe: InProcess, bert: Path, tmp_path: Path) -> None:
    given = tmp_path / "given.safetensors"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": np.zeros((1, 8), np.int64)}, "input 'attention_mask' is missing"),
        ({"input_ids": np.zeros((1, 7), np.int64), "attention_mask": np.ones((1, 8), np.int64)}, "'input_ids'"),
        ({"input_ids": np.zeros((1, 8), np.float32), "attention_mask": np.ones((1, 8), np.int64)}, "'input_ids'"),
        (
            {"input_ids": np.full((1, 8), 97), "attention_mask": np.ones((1, 8), np.int64)},
            "outside the lookup table of size 97",
        ),
    ]
    for tensors, complaint in cases:
        save_file(tensors, given)
        answer = nxpipe("run", *small(bert), "--input", str(given), "--mode", mode)
        assert answer.code == 2, answer.err
        assert complaint in answer.err


def test_words_that_cannot_be_meant_together_are_refused(nxpipe: InProcess, bert: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"no tensors")
    for words, complaint in [
        (("--input", str(file)), "is not a safetensors file"),
        (("--input", str(file), "--text", "[1]"), "pass one of them"),
        (("an-artifact",), "pass only --store"),
    ]:
        answer = nxpipe("run", *words, *small(bert))
        assert answer.code == 2
        assert complaint in answer.err


def test_text_without_a_tokenizer_is_refused_in_the_words_of_the_command(nxpipe: InProcess, bert: Path) -> None:
    answer = nxpipe("run", *small(bert), "--text", "hello")
    assert answer.code == 10
    assert "--text: " in answer.err
    assert "--prompts" not in answer.err


@pytest.mark.slow
def test_an_artifact_runs_on_its_stored_inputs_or_on_others(nxpipe: InProcess, llama: Path, tmp_path: Path) -> None:
    store = ("--store", str(tmp_path / "store"))
    built = nxpipe("build", *small(llama, "--tp", "2", "--phases", "prefill,decode"), *store, "-q")
    assert built.code == 0, built.err
    words = ("tiny-llama", *store, "--mode", "isa")
    assert [entry["inputs"] for entry in ran(nxpipe, *words)] == ["the stored inputs"] * 2
    out = tmp_path / "answers"
    ran(nxpipe, *words, "--output", str(out))
    assert {path.name for path in out.iterdir()} == {"decode-b1-s8.safetensors", "prefill-b1-s8.safetensors"}
    assert nxpipe("run", *words, "--output", str(out)).code == 5
