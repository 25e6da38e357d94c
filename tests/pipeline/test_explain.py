"""`nxpipe explain`: the compiler's passes, one at a time."""

import json
from pathlib import Path

import pytest

from emulator.passes import PASSES
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 16}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path)


def graph_after(nxpipe: InProcess, model: str, *words: str) -> str:
    answer = nxpipe("explain", "--json", "--model-id", model, "--buckets", "8", *words)
    assert answer.code == 0, answer.err
    (program,) = json.loads(answer.out)
    return str(program["graph"])


def test_the_passes_are_listed_in_order_each_under_a_name_of_its_own(nxpipe: InProcess) -> None:
    listed = nxpipe("explain", "--passes").out.split()
    assert listed[0] == "capture"
    assert len(set(listed)) == len(listed) == len(PASSES) + 1
    assert [name.partition(":")[0] for name in listed[1:]] == [step.__name__ for step in PASSES]


def test_each_pass_shows_its_work(nxpipe: InProcess, model: str) -> None:
    captured, fused = (graph_after(nxpipe, model, "--after", name) for name in ("capture", "fuse"))
    assert "rsqrt(" in captured
    assert "rms_norm(" not in captured
    assert "rms_norm(" in fused
    assert "bf16" not in fused
    assert "bf16" in graph_after(nxpipe, model, "--after", "autocast")


def test_the_program_of_a_rank_shows_its_exchanges(nxpipe: InProcess, model: str) -> None:
    assert "all_reduce(" in graph_after(nxpipe, model, "--tp", "2")
    assert "all_reduce(" not in graph_after(nxpipe, model, "--tp", "2", "--after", "autocast")


def test_a_pass_that_does_not_exist_is_refused_with_those_that_do(nxpipe: InProcess, model: str) -> None:
    answer = nxpipe("explain", "--model-id", model, "--after", "tiling")
    assert answer.code == 2
    assert "there is no pass 'tiling'; there are capture, fold_constants" in answer.err
