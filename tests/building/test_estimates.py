"""Estimates of a cell's size and duration, which must never stop a build."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.hardware import instance
from nxpipe.pipeline.build.cache import Timings
from nxpipe.pipeline.build.plan import cell_work, parameters_of, worker_memory
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.source import PretrainedModel
from nxpipe.pipeline.models.weights import RandomWeights
from tests.pipeline.conftest import BERT, LLAMA

SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")


def request(config: dict[str, Any], *shapes: Shape) -> BuildSpec:
    return BuildSpec(PretrainedModel("m", None, config, "fill-mask", None), RandomWeights(0), shapes, INF2)


INF2 = instance("inf2.xlarge")
FORWARD = Shape("forward", 1, 32)


@pytest.mark.parametrize("config", [BERT, LLAMA], ids=lambda config: str(config["model_type"]))
@given(name=st.sampled_from(SIZES), factor=st.integers(2, 64))
def test_a_larger_model_is_more_work_and_takes_more_memory(config: dict[str, Any], name: str, factor: int) -> None:
    small, large = (request(of, FORWARD) for of in (config, config | {name: config[name] * factor}))
    assert parameters_of(small.source.config) < parameters_of(large.source.config)
    assert cell_work(small, FORWARD) < cell_work(large, FORWARD)
    assert worker_memory(small) < worker_memory(large)


@given(st.integers(1, 64), st.integers(1, 4096), st.integers(2, 8))
def test_a_larger_batch_or_bucket_is_more_work_and_a_decode_less_than_its_prefill(
    batch: int, sequence: int, factor: int
) -> None:
    of = request(LLAMA)
    prefill = Shape("prefill", batch, sequence)
    assert cell_work(of, prefill) < cell_work(of, replace(prefill, batch=batch * factor))
    assert cell_work(of, prefill) < cell_work(of, replace(prefill, sequence=sequence * factor))
    assert cell_work(of, Shape("decode", batch, sequence)) <= cell_work(of, prefill)


@given(st.integers(1, 40))
def test_the_parts_of_a_composite_are_added_up(layers: int) -> None:
    part = BERT | {"num_hidden_layers": layers}
    assert parameters_of({"text_config": part, "vision_config": part}) == 2 * parameters_of(part)


@given(
    st.dictionaries(
        st.sampled_from((*SIZES, "d_model", "text_config")),
        st.one_of(st.none(), st.booleans(), st.text(), st.floats(), st.lists(st.integers()), st.just({})),
    )
)
def test_a_configuration_that_says_nothing_of_its_size_has_one_all_the_same(config: dict[str, Any]) -> None:
    assert cell_work(request(config), FORWARD) > 0
    assert worker_memory(request(config)) > 0


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[]", b"7", b'{"a": 1}', b'{"a": [1]}', b'{"a": ["x", "y"]}', b"\xff\xfe", b'{"a": null}'],
    ids=repr,
)
def test_a_file_of_timings_that_is_damaged_or_absent_is_an_empty_one(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "state/timings.json"
    if content is not None:
        path.parent.mkdir()
        path.write_bytes(content)
    timings = Timings(path)
    assert timings.estimate("a", 1.0) is None
    timings.note({"a": (2.0, 3.0)})
    assert Timings(path).estimate("a", 2.0) == 3.0


def test_timings_that_cannot_be_written_cost_no_build(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    Timings(tmp_path / "state/timings.json").note({"a": (2.0, 3.0)})


@given(
    made=st.dictionaries(st.text(min_size=1), st.tuples(st.floats(0, 1e15), st.floats(0, 1e5)), min_size=1, max_size=9)
)
def test_what_was_timed_is_told_again_and_what_is_larger_is_never_said_to_be_quicker(
    made: dict[str, tuple[float, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    timings = Timings(tmp_path_factory.mktemp("timings") / "timings.json")
    timings.note(made)
    for name, (work, seconds) in made.items():
        assert timings.estimate(name, work) == round(seconds, 2)
    guesses = [timings.estimate("", work) for work in (0.0, 1e9, 1e12, 1e15)]
    assert all(guess is not None and guess > 0 for guess in guesses)
    assert guesses == sorted(guess for guess in guesses if guess is not None)


def test_only_the_newest_timings_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "timings.json"
    for first in range(0, 5000, 1000):
        Timings(path).note({str(number): (1.0, 1.0) for number in range(first, first + 1000)})
    assert list(json.loads(path.read_text())) == [str(number) for number in range(3000, 5000)]
