"""A degree that does not divide a model: checked, built and verified like any other, and what it costs is told."""

import json
from pathlib import Path

import pytest

from nxpipe.artifact_store import open_store
from tests.pipeline.conftest import LLAMA, write_model
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.test_build import build, built

pytestmark = pytest.mark.sample(12)

__all__ = ["nxpipe"]

# 6 heads, of which each 2 share a key head, on 4 ranks: two heads each, of which 2 of 8 are zeros.
ODD = {**LLAMA, "vocab_size": 120, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
TARGET = ("--target", "trn2.48xlarge")


def test_a_check_says_what_padding_costs_and_which_degrees_go_without(nxpipe: InProcess, tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "odd", ODD))
    answer = nxpipe("check", "--model-id", model, *TARGET, "--tp", "4", "--buckets", "16", "--json")
    assert answer.code == 0, answer.err
    (report,) = json.loads(answer.out)
    (note,) = [finding for finding in report["findings"] if finding["rule"] == "NXC-310"]
    assert (note["severity"], note["kind"]) == ("note", "padding")
    assert note["message"].startswith("tp 4 pads with zeros: ")
    rows = {row["degree"]: row["footprint"] for row in report["targets"][0]["rows"]}
    assert rows[1]["padding"] == {"held": 0.0, "work": 0.0}
    assert 0 < rows[4]["padding"]["work"] < 0.5
    assert f"{rows[4]['padding']['work']:.1%} more multiply-adds" in note["message"]
    assert rows[8] is None  # there are only six heads


def test_a_check_of_a_degree_that_divides_says_nothing_of_padding(nxpipe: InProcess, tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "even", dict(LLAMA)))
    answer = nxpipe("check", "--model-id", model, *TARGET, "--tp", "4", "--buckets", "16")
    assert answer.code == 0
    assert "NXC-310" not in answer.out
    assert "padding" not in answer.out


def test_a_padded_artifact_holds_whole_weights_and_answers_as_it_was_built(nxpipe: InProcess, tmp_path: Path) -> None:
    model, shapes = write_model(tmp_path / "odd", ODD), ("--phases", "prefill,decode", "--buckets", "16")
    padded = built(tmp_path, model, *TARGET, *shapes, "--tp", "4")
    alone = built(tmp_path, model, *TARGET, *shapes)
    store = open_store(f"file://{tmp_path}/store")
    one, other = (store.resolve(str(answer["request_key"])).manifest for answer in (padded, alone))
    assert one.weights == other.weights
    used = padded["utilisation"]
    assert isinstance(used, dict)
    assert all("padded with zeros: " in program["in_short"] for program in used.values())
    address = f"{padded['model']}@{padded['request_key']}"
    for mode in ("fast", "isa"):
        answer = nxpipe("verify", address, "--store", f"file://{tmp_path}/store", "--mode", mode, "-q")
        assert answer.code == 0, answer.err


def test_an_explained_program_says_what_of_it_is_padding(nxpipe: InProcess, tmp_path: Path) -> None:
    words = ("explain", "--model-id", str(write_model(tmp_path / "odd", ODD)), *TARGET, "--buckets", "16")
    after = ("--phases", "prefill", "--after", "roll", "--json")
    for degree, padded in (("3", False), ("4", True)):
        answer = nxpipe(*words, *after, "--tp", degree)
        assert answer.code == 0, answer.err
        assert all((program["padding"]["work"] > 0) is padded for program in json.loads(answer.out))


def test_more_ranks_than_heads_are_refused_with_what_can_be_had(tmp_path: Path) -> None:
    words = (*TARGET, "--phases", "prefill", "--tp", "8")
    answer = build(tmp_path, write_model(tmp_path / "odd", ODD), *words)
    assert answer.code == 11
    assert "cannot be shared by 8 ranks; on trn2.48xlarge it can have 1, 2, 4; the nearest is --tp 4" in answer.err
