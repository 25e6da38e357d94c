"""`nxpipe explain`: the reasons for a cache hit or miss, and the compiler's passes, one at a time."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.builds import keep_step_result
from nxpipe.emulator.lower import BACKEND
from nxpipe.emulator.passes import PASSES
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.weights import RandomWeights
from nxpipe.pipeline.util.exit_codes import OK, USAGE
from tests.pipeline.conftest import LLAMA, write_model
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.predicted import name_of, publish
from tests.pipeline.test_bench import asked

__all__ = ["nxpipe"]

DESCRIBED = """
[project]
name = "search"
[store]
url = "file://store"
[[models]]
name = "chat"
path = "models/tiny-llama"
task = "text-generation"
target = "inf2.xlarge"
phases = ["prefill", "decode"]
buckets = [16, 32]
weights = "random:0"
"""
PROGRAMS = {"decode-b1-s32", "prefill-b1-s16", "prefill-b1-s32"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 16}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path)


def graph_after(nxpipe: InProcess, model: str, *words: str) -> str:
    answer = nxpipe("explain", "--json", "--model-id", model, "--buckets", "8", "--phases", "prefill", *words)
    assert answer.code == 0, answer.err
    (program,) = json.loads(answer.out)
    return str(program["graph"])


def test_the_passes_are_listed_in_order_each_under_a_name_of_its_own(nxpipe: InProcess) -> None:
    listed = nxpipe("explain", "--passes").out.split()
    assert listed[0] == "capture"
    assert len(set(listed)) == len(listed)
    steps = [step.__name__ for step in (*PASSES, *BACKEND)]
    assert [name.partition(":")[0] for name in listed] == ["capture", *steps]


@pytest.mark.sample(4)
def test_each_pass_shows_its_work(nxpipe: InProcess, model: str) -> None:
    captured, fused = (graph_after(nxpipe, model, "--after", name) for name in ("capture", "fuse"))
    assert "rsqrt(" in captured
    assert "rms_norm(" not in captured
    assert "rms_norm(" in fused
    assert "bf16" not in fused
    assert "bf16" in graph_after(nxpipe, model, "--after", "autocast")


@pytest.mark.sample(2)
def test_the_program_of_a_rank_shows_its_exchanges(nxpipe: InProcess, model: str) -> None:
    assert "all_reduce(" in graph_after(nxpipe, model, "--tp", "2", "--after", "roll")
    assert "all_reduce(" not in graph_after(nxpipe, model, "--tp", "2", "--after", "autocast")


@pytest.mark.sample(4)
def test_each_step_of_the_back_end_shows_its_record(nxpipe: InProcess, model: str) -> None:
    def record_after(step: str) -> str:
        words = ("--model-id", model, "--buckets", "8", "--phases", "prefill", "--after", step)
        answer = nxpipe("explain", "--json", *words)
        assert answer.code == 0, answer.err
        (program,) = json.loads(answer.out)
        assert "graph" not in program
        return str(program["lowered"])

    records = {step.__name__: record_after(step.__name__) for step in BACKEND}
    assert "is written to" in records["place_interface"]
    assert "fused: " in records["emit_kernels"]
    assert "activation-stationary, " in records["emit_kernels"]
    assert "refused " in records["promote_to_sbuf"]
    assert "  after " not in records["allocate_hbm"]
    waits = [records[name].count("  after ") for name in ("insert_waits", "eliminate_redundant_waits")]
    assert waits[0] >= waits[1] > 0


def test_a_pass_that_does_not_exist_is_refused_with_those_that_do(nxpipe: InProcess, model: str) -> None:
    answer = nxpipe("explain", "--model-id", model, "--after", "tiling")
    assert answer.code == 2
    assert "unknown pass 'tiling'; the passes are capture, fold_constants" in answer.err


# Why


@pytest.fixture
def request_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildSpec:
    """The build request of the only model in this folder's nxpipe.toml."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "models" / "tiny-llama", dict(LLAMA))
    (tmp_path / "nxpipe.toml").write_text(DESCRIBED)
    return asked(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def explained(nxpipe: InProcess, *words: str) -> dict[str, Any]:
    answer = nxpipe("explain", *words, "--json")
    assert answer.code == OK.number, answer.err
    (found,) = json.loads(answer.out)
    assert isinstance(found, dict)
    return found


def states(found: Mapping[str, Any]) -> dict[str, str]:
    return {program["program"]: program["state"] for program in found["programs"]}


def test_what_is_published_is_a_hit_with_all_its_programs(
    nxpipe: InProcess, request_here: BuildSpec, store: Store
) -> None:
    built = publish(store, "built", {16: 1.0}, model="tiny-llama", inputs=request_here.key_inputs())
    found = explained(nxpipe, "chat")
    assert (found["in_store"], found["request_key"]) == (True, built.request_key)
    assert states(found) == dict.fromkeys(PROGRAMS, "published")
    assert f"{name_of(built)} is in" in nxpipe("explain").out


def test_each_program_of_a_miss_is_held_against_the_program_most_like_it(
    nxpipe: InProcess, request_here: BuildSpec, store: Store
) -> None:
    other = replace(request_here, autocast="all", shapes=request_here.shapes[:1])
    near = publish(store, "near", {16: 1.0}, inputs=other.key_inputs())
    publish(store, "far", {16: 1.0})
    found = explained(nxpipe, "chat")
    assert not found["in_store"]
    assert {difference["field"] for difference in found["nearest"][0]["differences"]} == {"options.autocast", "shapes"}
    programs = {program["program"]: program["nearest"] for program in found["programs"]}
    assert {program["request_key"] for program in programs.values()} == {near.request_key}
    result = {
        name: {difference["field"] for difference in program["differences"]} for name, program in programs.items()
    }
    (same,) = [shape.name for shape in other.shapes]
    # The only prefill had a cache as long as itself.
    assert result == {
        name: {"options.autocast", "shapes", "cache"} - ({"shapes"} if name == same else set()) for name in PROGRAMS
    }
    page = nxpipe("explain", "chat").out
    assert f"prefill-b1-s32 beside {same} differs from {name_of(near)} in" in page


def test_programs_hold_no_weights_and_are_the_same_whatever_they_are(
    nxpipe: InProcess, request_here: BuildSpec, store: Store
) -> None:
    """What is told of a program of an artifact is exactly what a build asks of it."""
    other = replace(request_here, weights=RandomWeights(1))
    near = publish(store, "other weights", {16: 1.0}, inputs=other.key_inputs())
    found = explained(nxpipe, "chat")
    assert [difference["field"] for difference in found["nearest"][0]["differences"]] == ["weights.seed"]
    assert {program["program"] for program in found["programs"] if program["nearest"]["differences"] == []} == PROGRAMS
    assert f"same key as decode-b1-s32 of {name_of(near)}, whose result was garbage-collected" in nxpipe("explain").out


def test_parts_are_hits_of_their_own(nxpipe: InProcess, request_here: BuildSpec, store: Store) -> None:
    first, second, third = sorted(request_here.shapes)
    for shape in (first, second):
        keep_step_result(store, request_here.program_key(shape), {}, {})
    keep_step_result(store, request_here.evidence_key(first), {}, {})
    found = explained(nxpipe, "chat")
    assert states(found) == {first.name: "committed", second.name: "to do", third.name: "to do"}
    why = {program["program"]: (program["in_store"], program["why"]) for program in found["programs"]}
    assert why == {
        first.name: (True, ""),
        second.name: (False, "compiled, and not yet verified with these weights"),
        third.name: (False, "cache miss"),
    }
    unverified = explained(nxpipe, "chat", "--no-verify")
    assert states(unverified) == {first.name: "committed", second.name: "committed", third.name: "to do"}


def test_one_thing_is_explained_at_a_time(nxpipe: InProcess, request_here: BuildSpec) -> None:
    for words in (("chat", "--only", "chat"), ("chat", "--model-id", "models/tiny-llama"), ("chat", "--tp", "2")):
        assert nxpipe("explain", *words).code == USAGE.number


def test_the_old_name_is_the_same_command(nxpipe: InProcess, request_here: BuildSpec) -> None:
    assert nxpipe("store", "explain", "--only", "chat").out == nxpipe("explain", "chat").out
