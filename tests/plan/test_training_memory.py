"""Memory of training: Korthikanti's forms, published layouts that fit, absurd ones that do not."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.hardware.instance import INSTANCES
from nxpipe.pipeline.plan.sizes import ModelSize
from nxpipe.pipeline.plan.training_memory import (
    DecoderSizes,
    Precision,
    Recompute,
    TrainingLayout,
    TrainingMemory,
    checkpoint_bytes,
    layer_activations,
    layers_in_flight,
    layers_of_stages,
    memory,
    rank_bytes,
    stage_parameters,
)
from nxpipe.pipeline.predict.architectures import architecture
from nxpipe.pipeline.predict.work import NotPredicted

GPT = "GPT3-175B"
LLAMA = "meta-llama/Llama-2-70b-hf"


def sizes(name: str) -> DecoderSizes:
    found = architecture(name)
    assert found is not None
    return DecoderSizes.of(found)


def layout(**given: Any) -> TrainingLayout:
    usual = {"tp": 8, "pp": 1, "dp": 1, "micro": 1, "sequences": 64, "flash": False}
    return TrainingLayout(**{**usual, **given})


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("tp", [1, 8, 32])
def test_a_gpt_layer_keeps_what_korthikanti_counts(tp: int, micro: int) -> None:
    s, tokens = sizes(GPT), 2048
    sbh = tokens * micro * s.hidden
    scores = 5 * s.heads * tokens / s.hidden
    plain = layout(tp=tp, micro=micro, recompute=Recompute.NONE, sequence_parallel=False)
    assert layer_activations(s, plain, tokens) == pytest.approx(sbh * (10 + 24 / tp + scores / tp))
    sharded = replace(plain, sequence_parallel=True)
    assert layer_activations(s, sharded, tokens) == pytest.approx(sbh / tp * (34 + scores))
    selective = replace(sharded, recompute=Recompute.SELECTIVE)
    assert layer_activations(s, selective, tokens) == pytest.approx(sbh / tp * 34)
    full = replace(plain, recompute=Recompute.FULL)
    assert layer_activations(s, full, tokens) == pytest.approx(2 * sbh)


def test_attention_that_keeps_no_scores_needs_no_selective_recomputation() -> None:
    s = sizes(LLAMA)
    none, selective = (layout(recompute=each, flash=True) for each in (Recompute.NONE, Recompute.SELECTIVE))
    assert layer_activations(s, none, 4096) == layer_activations(s, selective, 4096)


@pytest.mark.parametrize(("stages", "virtual"), [(4, 1), (8, 1), (8, 2), (8, 4), (4, 3)])
def test_the_first_stage_keeps_the_micro_batches_that_1f1b_has_in_flight(stages: int, virtual: int) -> None:
    layers = stages * virtual * 2
    one = layout(pp=stages, interleave=virtual)
    expected = layers if virtual == 1 else layers * (1 + (stages - 1) / (stages * virtual))
    assert layers_in_flight(one, layers // stages, 0) == pytest.approx(expected)
    few = replace(one, sequences=2)
    assert layers_in_flight(few, layers // stages, 0) == 2 * layers // stages


@pytest.mark.parametrize("layers", [80, 126, 32, 7])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_stages_are_balanced_and_hold_all_layers(layers: int, stages: int) -> None:
    counts = layers_of_stages(layers, stages)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    if layers % stages <= stages - 2:
        assert counts[0] == min(counts), "the first stage has a table and most micro-batches in flight"


@pytest.mark.parametrize("name", [GPT, LLAMA, "meta-llama/Llama-2-7b-hf", "meta-llama/Meta-Llama-3.1-405B"])
def test_parameters_of_all_ranks_are_those_of_the_model(name: str) -> None:
    found = architecture(name)
    assert found is not None
    s, whole = sizes(name), ModelSize.of(found).parameters
    for one in (layout(tp=1), layout(tp=8, pp=4)):  # eight heads of keys and values are not replicated
        held = one.tp * sum(stage_parameters(s, one, stage) for stage in range(one.pp))
        assert held == pytest.approx(whole, rel=1e-3)
    replicated = layout(tp=32, pp=1)
    more = 32 * stage_parameters(s, replicated, 0) - whole
    extra = 2 * s.hidden * s.head_dim * (32 * s.kv_of_rank(32) - s.kv_heads) * s.layers
    assert more == pytest.approx(extra, rel=0.02, abs=whole * 2e-3)  # norms too


# AWS's tables of benchmarks (SDK 2.13 to 2.24), and the example configurations of NxD Training.
PUBLISHED = [
    ("meta-llama/Llama-3.1-70B", "trn1.32xlarge", 32, 8, 4, 8192, "mixed", "selective"),
    (GPT, "trn1.32xlarge", 32, 8, 4, 2048, "bf16-sr", "selective"),
    ("GPT3-23B", "trn1.32xlarge", 8, 4, 32, 2048, "bf16-sr", "selective"),
    ("GPT3-46B", "trn1.32xlarge", 8, 8, 16, 2048, "bf16-sr", "full"),
    ("GPT3-6.7B", "trn1.32xlarge", 8, 1, 64, 2048, "bf16-sr", "full"),
    (LLAMA, "trn1.32xlarge", 32, 4, 8, 4096, "mixed", "selective"),
    (LLAMA, "trn1.32xlarge", 32, 8, 4, 4096, "mixed", "selective"),
    ("meta-llama/Llama-2-7b-hf", "trn1.32xlarge", 8, 4, 32, 4096, "bf16-sr", "selective"),
    ("meta-llama/Llama-2-7b-hf", "trn1.32xlarge", 8, 1, 64, 4096, "mixed", "selective"),
    ("meta-llama/Llama-3.1-70B", "trn1.32xlarge", 32, 8, 2, 8192, "mixed", "selective"),
    ("meta-llama/Llama-3.1-70B", "trn2.48xlarge", 32, 4, 4, 8192, "mixed", "selective"),
]


@pytest.mark.parametrize(("name", "type_", "tp", "pp", "dp", "tokens", "precision", "recompute"), PUBLISHED)
def test_published_layouts_fit(
    name: str, type_: str, tp: int, pp: int, dp: int, tokens: int, precision: str, recompute: str
) -> None:
    one = layout(tp=tp, pp=pp, dp=dp, sequences=1024, precision=Precision(precision), recompute=Recompute(recompute))
    held, room = memory(sizes(name), one, tokens), rank_bytes(INSTANCES[type_])
    assert held.total <= room
    # Twice as much would be no finding: most of these ranks are filled to a third or more.
    assert held.total >= 0.25 * room


@pytest.mark.parametrize(
    ("name", "changes", "tokens"),
    [
        (GPT, {"tp": 32, "pp": 1, "dp": 32}, 2048),
        (LLAMA, {"tp": 8, "pp": 1, "dp": 64}, 4096),
        (LLAMA, {"tp": 32, "pp": 4, "dp": 8, "micro": 8}, 4096),
        ("GPT3-46B", {"tp": 8, "pp": 8, "dp": 16, "recompute": Recompute.NONE}, 2048),  # published with `full`
        ("meta-llama/Llama-2-7b-hf", {"tp": 8, "pp": 1, "dp": 1, "zero1": False}, 4096),
        ("meta-llama/Meta-Llama-3.1-405B", {"tp": 32, "pp": 4, "dp": 16}, 8192),
    ],
)
def test_absurd_layouts_do_not_fit(name: str, changes: dict[str, Any], tokens: int) -> None:
    precision = Precision.BF16_SR if name.startswith("GPT") else Precision.MIXED
    one = layout(**{"sequences": 1024, "precision": precision, **changes})
    assert memory(sizes(name), one, tokens).total > rank_bytes(INSTANCES["trn1.32xlarge"])


def test_a_core_of_each_generation_has_its_share_of_the_memory() -> None:
    assert rank_bytes(INSTANCES["trn1.32xlarge"]) == 16 * 2**30
    assert rank_bytes(INSTANCES["trn2.48xlarge"]) == 24 * 2**30  # a logical core of two


def test_a_checkpoint_has_each_parameter_and_its_state_once() -> None:
    found = architecture(LLAMA)
    assert found is not None
    one = layout(tp=8, pp=4, dp=16)
    expected = ModelSize.of(found).parameters * (2 + 12)
    assert checkpoint_bytes(sizes(LLAMA), one) == pytest.approx(expected, rel=1e-3)


def test_models_that_are_no_decoders_are_refused() -> None:
    found = architecture("bert-base-uncased")
    assert found is not None
    with pytest.raises(NotPredicted, match="kind encoder is not planned"):
        DecoderSizes.of(found)


LAYOUTS = st.builds(
    TrainingLayout,
    tp=st.sampled_from([1, 2, 8, 32]),
    pp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 2, 4, 16]),
    micro=st.sampled_from([1, 2]),
    sequences=st.just(1024),
    recompute=st.sampled_from(Recompute),
    precision=st.sampled_from(Precision),
    zero1=st.booleans(),
    sequence_parallel=st.booleans(),
    flash=st.booleans(),
)


def total(one: TrainingLayout, name: str = LLAMA) -> TrainingMemory:
    return memory(sizes(name), one, 2048)


@given(LAYOUTS)
def test_zero1_never_needs_more_memory(one: TrainingLayout) -> None:
    assert total(replace(one, zero1=True)).total <= total(replace(one, zero1=False)).total


@given(LAYOUTS)
def test_more_recomputation_sequence_parallelism_and_replicas_never_need_more(one: TrainingLayout) -> None:
    by_recompute = [total(replace(one, recompute=each)).total for each in Recompute]
    assert by_recompute == sorted(by_recompute, reverse=True)
    assert total(replace(one, sequence_parallel=True)).total <= total(replace(one, sequence_parallel=False)).total
    assert total(replace(one, dp=2 * one.dp)).total <= total(one).total


@given(LAYOUTS, st.sampled_from([GPT, LLAMA]))
def test_the_fullest_stage_is_that_of_all_stages(one: TrainingLayout, name: str) -> None:
    from nxpipe.pipeline.plan.training_memory import stage_memory

    each = [stage_memory(sizes(name), one, 2048, stage).total for stage in range(one.pp)]
    assert total(one, name).total == max(each)
