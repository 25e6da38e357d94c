"""Predictions of `AWS's compiler`: what any set of constants promises."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.models import catalogue
from nxpipe.pipeline.predict import architectures, model
from nxpipe.pipeline.predict.architectures import architecture, architecture_of
from nxpipe.pipeline.predict.constants import floor_of, predict, shipped
from nxpipe.pipeline.predict.measurements import Configuration
from nxpipe.pipeline.predict.model import Cores, cores_of, duration, graphs, overlapped
from nxpipe.pipeline.predict.work import NotPredicted, decode

DECODERS = ("meta-llama/Llama-2-7b-hf", "meta-llama/Meta-Llama-3-70B", "Qwen/Qwen3-8B", "mistralai/Mixtral-8x7B-v0.1")
INSTANCES = {"inf2.48xlarge": 24, "trn1.32xlarge": 32, "trn2.48xlarge": 64}


@st.composite
def decodes(draw: st.DrawFn) -> Configuration:
    instance = draw(st.sampled_from(sorted(INSTANCES)))
    tp = draw(st.sampled_from([8, INSTANCES[instance]]))
    return Configuration(
        family=draw(st.sampled_from(["llm-decode", "llm-prefill"])),
        model=draw(st.sampled_from(DECODERS)),
        instance=instance,
        metric="tpot_ms_p50",
        cores=tp * (2 if instance.startswith("trn2") else 1),
        tp=tp,
        batch=draw(st.sampled_from([1, 2, 4, 16])),
        sequence=draw(st.sampled_from([512, 4096])),
        inputs=draw(st.integers(1, 400)),
        outputs=draw(st.integers(1, 100)),
        framework=draw(st.sampled_from(["Transformers NeuronX", "NxD Inference"])),
    )


def encoders() -> st.SearchStrategy[Configuration]:
    return st.builds(
        Configuration,
        family=st.just("encoder"),
        model=st.sampled_from(
            ["bert-base-uncased", "bert-large-uncased", "albert-base-v2", "FacebookAI/xlm-roberta-base"]
        ),
        instance=st.sampled_from(["inf2.xlarge", "trn1.2xlarge"]),
        metric=st.sampled_from(["latency_ms_p50", "throughput_per_s"]),
        batch=st.integers(1, 64),
        in_flight=st.sampled_from([1.0, 2.0]),
        sequence=st.integers(16, 512),
    )


def faster(cores: Cores, factor: float) -> Cores:
    return replace(
        cores,
        flops=cores.flops * factor,
        flops_fp32=cores.flops_fp32 * factor,
        hbm=cores.hbm * factor,
        dma=cores.dma * factor,
        vector=cores.vector * factor,
        link=cores.link * factor,
    )


@given(decodes() | encoders())
def test_no_prediction_is_below_the_floor_and_the_interval_contains_it(configuration: Configuration) -> None:
    found = predict(configuration)
    assert found.seconds >= found.floor_seconds * (1 - 1e-12)
    assert found.low <= found.value <= found.high
    assert predict(configuration) == found


@given(decodes() | encoders(), st.floats(1, 8))
def test_faster_memory_engines_and_links_never_slow_a_program(configuration: Configuration, factor: float) -> None:
    constants, before = shipped().values, duration(graphs(configuration), shipped().values).seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "cores_of", lambda instance: faster(cores_of(instance), factor))
        assert duration(graphs(configuration), constants).seconds <= before * (1 + 1e-12)


@given(encoders(), st.integers(1, 8), st.integers(0, 256))
def test_a_larger_batch_or_a_longer_sequence_never_speeds_up_an_encoder(
    configuration: Configuration, batch: int, longer: int
) -> None:
    assert configuration.sequence is not None
    more = replace(configuration, batch=configuration.batch + batch, sequence=configuration.sequence + longer)
    assert predict(more).seconds >= predict(configuration).seconds * (1 - 1e-12)


@given(decodes())
def test_a_longer_cache_and_more_sequences_never_speed_up_a_decode(configuration: Configuration) -> None:
    if configuration.model.startswith("mistralai"):
        return  # all experts may cost less than those that many rows gather one by one
    own = replace(configuration, family="llm-decode", inputs=None)
    more = replace(own, sequence=2 * (own.sequence or 1), batch=2 * own.batch)
    assert predict(more).seconds >= predict(own).seconds * (1 - 1e-12)


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(1, 20))
def test_what_overlaps_takes_at_least_the_longer_and_at_most_both(compute: float, memory: float, power: float) -> None:
    both = overlapped(compute, memory, power)
    assert max(compute, memory) * (1 - 1e-9) <= both <= (compute + memory) * (1 + 1e-9)


def test_models_instances_and_families_that_are_not_covered_are_named_not_guessed() -> None:
    known = Configuration(
        family="encoder", model="bert-base-uncased", instance="inf2.xlarge", metric="latency_ms_p50", sequence=128
    )
    for change, message in (
        ({"model": "nobody/unknown"}, "nobody/unknown: its architecture is not in the catalogue"),
        ({"instance": "p5.48xlarge"}, "p5.48xlarge: no rates of its cores are documented"),
        ({"family": "diffusion"}, "bert-base-uncased: diffusion of a model of kind encoder is not covered"),
        ({"sequence": None}, "bert-base-uncased: the row has no sequence length"),
    ):
        with pytest.raises(NotPredicted, match=message):
            predict(replace(known, **change))


def test_the_floor_of_a_decode_is_the_time_to_read_its_weights_once() -> None:
    own = Configuration(
        family="llm-decode",
        model="meta-llama/Llama-2-7b-hf",
        instance="inf2.xlarge",
        metric="tpot_ms_p50",
        sequence=128,
    )
    weights = (6_738_415_616 - 32000 * 4096) * 2  # the embedding is gathered
    assert floor_of(graphs(own)) == pytest.approx(weights / 410e9, rel=0.01)


def in_folder(folder: Path, config: object) -> Configuration:
    folder.joinpath("config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return Configuration(
        family="llm-decode", model=str(folder), instance="inf2.48xlarge", metric="tpot_ms_p50", tp=8, sequence=2048
    )


def test_a_model_in_a_folder_is_predicted_by_its_configuration(tmp_path: Path) -> None:
    config = catalogue.find("Qwen/Qwen3-8B")
    assert config is not None
    own = in_folder(tmp_path, dict(config.config))
    assert predict(own) == predict(replace(own, model="Qwen/Qwen3-8B"))


@pytest.mark.parametrize(
    "config",
    ["{", "[]", {"model_type": "unheard"}, {"model_type": "llama"}, {"model_type": "llama", "hidden_size": "x"}],
)
def test_a_folder_without_the_sizes_of_a_model_is_refused_in_a_sentence(tmp_path: Path, config: object) -> None:
    with pytest.raises(NotPredicted, match=r"config\.json"):
        predict(in_folder(tmp_path, config))


SIZES = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "vocab_size": 32000}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "model_type": "llama4",
                "text_config": SIZES
                | {"model_type": "llama4_text", "intermediate_size": 4096, "num_local_experts": 16}
                | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 8192},
            },
            {"experts": 16, "expert_intermediate": 4096, "shared_intermediate": 4096, "dense_layers": 4},
        ),
        (
            {"model_type": "dbrx", "d_model": 1024, "n_layers": 8, "n_heads": 16, "vocab_size": 32000}
            | {"attn_config": {"kv_n_heads": 8}}
            | {"ffn_config": {"ffn_hidden_size": 3584, "moe_num_experts": 16, "moe_top_k": 4}},
            {"kv_heads": 8, "experts": 16, "active_experts": 4, "expert_intermediate": 3584},
        ),
        (
            {"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8, **SIZES},
            {"kv_heads": 8, "intermediate": 4096, "gated": False},
        ),
        ({"model_type": "falcon", "multi_query": True, **SIZES}, {"kv_heads": 1}),
        ({"model_type": "mpnet", **SIZES}, {"kind": "encoder", "layers": 8}),
        ({"model_type": "resnet", "depths": [2, 2, 2, 2], "layer_type": "basic"}, {"kind": "resnet", "block": "basic"}),
        (
            {"model_type": "bart", "d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "vocab_size": 9}
            | {"encoder_ffn_dim": 2048},
            {"kind": "encoder-decoder", "layers": 6, "heads": 8, "intermediate": 2048},
        ),
    ],
)
def test_a_configuration_gives_the_sizes_of_its_model(config: dict[str, object], expected: dict[str, object]) -> None:
    found = architecture_of(config)
    assert found is not None
    assert {key: found[key] for key in expected} == expected


def test_every_architecture_has_a_closed_form_and_a_name_for_equal_sizes_is_one_of_them() -> None:
    for name in json.loads(Path(architectures.__file__).with_suffix(".json").read_text(encoding="utf-8")):
        found = architecture(name)
        assert found is not None, name
        assert "as" not in found, name
        if found["kind"] == "decoder":
            own = Configuration(
                family="llm-decode", model=name, instance="inf2.48xlarge", metric="tpot_ms", tp=2, sequence=128
            )
            assert floor_of(graphs(own)) > 0


def test_one_query_head_of_a_group_costs_no_product_of_its_own() -> None:
    grouped, single = (
        architecture_of(SIZES | {"model_type": "llama", "num_key_value_heads": heads, "intermediate_size": 4096})
        for heads in (4, 16)
    )
    assert grouped
    assert single
    assert decode(grouped, batch=2, context=128, tp=1).calls * 4 == decode(single, batch=2, context=128, tp=1).calls


def test_transformers_neuronx_before_2_19_repeats_heads_that_a_degree_does_not_divide() -> None:
    own = Configuration(
        family="llm-decode", model="mistralai/Mistral-7B-v0.1", instance="inf2.48xlarge", metric="tpot_ms", tp=24,
        sequence=8192, batch=8, framework="Transformers NeuronX", sdk="2.18.0",
    )  # fmt: skip
    assert floor_of(graphs(own)) > 1.3 * floor_of(graphs(replace(own, sdk="2.19.1")))
    assert floor_of(graphs(replace(own, tp=8))) == floor_of(graphs(replace(own, tp=8, sdk="2.19.1")))
