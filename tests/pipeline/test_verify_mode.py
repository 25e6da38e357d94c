"""`nxpipe verify --mode isa`: the compiler's programs on emulated cores, held against PyTorch as the graphs are."""

import json
from pathlib import Path
from typing import Any

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.evidence import DEVICE, EMULATED, INSTRUCTIONS, KINDS, XLA, missing_kinds
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]


def verified(nxpipe: InProcess, *more: str) -> list[dict[str, Any]]:
    answer = nxpipe("verify", *more, "--json", "-q")
    assert answer.code == 0, answer.err
    found: list[dict[str, Any]] = json.loads(answer.out)
    assert all(entry["passed"] for entry in found)
    return found


def small(model: Path, *more: str) -> tuple[str, ...]:
    return ("--model-id", str(model), "--weights", "random:0", "--buckets", "16", *more)


def test_both_executors_agree_and_instructions_are_counted_where_there_are_any(nxpipe: InProcess, bert: Path) -> None:
    fast, isa = (verified(nxpipe, *small(bert, "--autocast", "none", "--mode", mode))[0] for mode in ("fast", "isa"))
    assert (fast["mode"], isa["mode"]) == ("fast", "isa")
    by_graph, on_cores = (entry["emulated"]["none"] for entry in (fast, isa))
    for output, other in zip(by_graph["outputs"], on_cores["outputs"], strict=True):
        assert output["output"] == other["output"]
        assert abs(output["max_relative"] - other["max_relative"]) < 1e-5
    assert "work" not in by_graph
    work = on_cores["work"]
    assert work["instructions"] == sum(work["by_engine"].values()) == sum(work["by_kind"].values())
    assert {"tensor", "vector", "scalar", "dma0"} <= work["by_engine"].keys()
    # Every weight that is read crosses from HBM, in fp32.
    assert work["bytes_read"]["hbm"] > 4 * 2 * (4 * 32 * 32 + 2 * 32 * 64)
    assert work["bytes_written"].keys() == {"hbm", "sbuf", "psum"}


@pytest.mark.sample(6)
def test_a_decoder_s_layers_and_steps_are_followed_on_the_cores_of_two_ranks(nxpipe: InProcess, llama: Path) -> None:
    words = small(llama, "--tp", "2", "--phases", "prefill", "--mode", "isa", "--layers", "--steps", "3")
    prefill, steps = verified(nxpipe, *words)
    layers = prefill["emulated"]["matmult"]["layers"]
    assert [layer["output"] for layer in layers] == ["model.layers.0", "model.layers.1"]
    assert [output["output"] for output in steps["emulated"]["matmult"]["outputs"]] == [
        f"token {number}.logits" for number in range(4)
    ]
    assert steps["emulated"]["matmult"]["work"]["by_engine"]["collective"] > 4


@pytest.mark.slow
def test_an_artifact_s_programs_answer_on_cores_as_they_did_when_it_was_built(
    nxpipe: InProcess, llama: Path, tmp_path: Path
) -> None:
    store = ("--store", str(tmp_path / "store"))
    built = nxpipe("build", *small(llama, "--tp", "2", "--phases", "prefill,decode"), *store, "-q")
    assert built.code == 0, built.err
    found = verified(nxpipe, "tiny-llama", *store, "--mode", "isa")
    assert len(found) == 4
    for entry in found:
        assert entry["emulated"]["as stored"]["work"]["instructions"] > 100


@pytest.mark.sample(12)
def test_a_run_of_an_artifact_s_instructions_becomes_evidence_of_that_kind(
    nxpipe: InProcess, bert: Path, tmp_path: Path
) -> None:
    store = ("--store", str(tmp_path / "store"))
    built = nxpipe("build", *small(bert), *store, "-q")
    assert built.code == 0, built.err
    (artifact,) = open_store(str(tmp_path / "store")).list()
    refused = nxpipe("verify", artifact.name, *store, "--attest")
    assert (refused.code, "--mode isa" in refused.err) == (2, True)
    answer = nxpipe("verify", artifact.name, *store, "--mode", "isa", "--attest")
    assert answer.code == 0, answer.err
    assert f"nxpipe store sign {artifact.name}" in answer.err
    found = open_store(str(tmp_path / "store")).evidence(artifact.manifest_digest)
    assert {document.kind for document in found} == {EMULATED, INSTRUCTIONS}
    assert missing_kinds(artifact.manifest, found, (EMULATED, INSTRUCTIONS)) == {}
    assert list(missing_kinds(artifact.manifest, found, KINDS)) == [XLA, DEVICE]
