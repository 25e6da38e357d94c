"""Defaults of a build and a check."""

from pathlib import Path

import pytest

from nxpipe.pipeline.config import Model
from nxpipe.pipeline.models.source import PretrainedModel, longest_sequence
from nxpipe.pipeline.models.spec import ModelSpec

FLAGS = {"revision": None, "task": None, "target": "inf2.xlarge", "tp": None, "phases": None, "batches": (1,)}
FLAGS |= {"buckets": None, "autocast": "matmult", "autocast_type": "bf16", "weights": None}


def source(config: dict[str, object]) -> PretrainedModel:
    return PretrainedModel("model", None, config, "feature-extraction", None)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, 128),
        ({"max_position_embeddings": 512}, 128),
        ({"n_positions": 64}, 64),
        ({"text_config": {"max_position_embeddings": 77}}, 77),  # CLIP
        ({"n_positions": 64, "relative_attention_num_buckets": 32}, 128),  # T5, which has no table of positions
    ],
)
def test_without_a_word_a_bucket_is_no_longer_than_the_model_knows_positions(
    config: dict[str, object], tokens: int
) -> None:
    (shape,) = ModelSpec.from_options("model", FLAGS).shapes(source(config))
    assert shape.sequence == tokens


def test_a_bucket_that_was_asked_for_is_never_shortened() -> None:
    (shape,) = ModelSpec.from_options("model", FLAGS | {"buckets": (128,)}).shapes(source({"n_positions": 64}))
    assert shape.sequence == 128
    model = Model(name="m", path="./m", task="fill-mask", target="inf2.xlarge", buckets=(128,))
    assert ModelSpec.from_config(model, Path()).buckets == (128,)


def test_a_model_of_the_configuration_file_without_buckets_has_the_usual_ones() -> None:
    model = Model(name="m", path="./m", task="fill-mask", target="inf2.xlarge")
    (shape,) = ModelSpec.from_config(model, Path()).shapes(source({"max_position_embeddings": 77}))
    assert shape.sequence == longest_sequence(source({"max_position_embeddings": 77})) == 77
