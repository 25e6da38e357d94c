"""Features of models beside layers: complex positions, tables in wide types, image grids, rewritten weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nxpipe.emulator.capture import CaptureRequest, capture, reference_outputs
from nxpipe.emulator.capture.export import capture_module
from nxpipe.emulator.capture.model import build_model
from nxpipe.emulator.errors import CaptureError, GraphBreak, UnsupportedOperators
from nxpipe.emulator.ops import Binary, Linear
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.run.fast import execute
from nxpipe.emulator.run.inputs import example_inputs
from tests.emulator.models import weights

pytestmark = pytest.mark.sample(12)

HERE = "tests/emulator/test_breadth.py"


class Of(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def rotated(x: Any) -> Any:
    angles = torch.outer(torch.arange(6.0), 1 / 100 ** (torch.arange(0, 8, 2) / 8))
    turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns * 0.5).flatten(3)


def filtered(x: Any) -> Any:
    spectrum = torch.fft.rfft(x, dim=1)
    kept = torch.cat([spectrum[:, :2].conj(), spectrum[:, 2:]], dim=1)
    return torch.fft.irfft(kept / 2 + kept.roll(1, 1), n=6, dim=1)


def sinusoids(x: Any) -> Any:
    places = torch.arange(8, dtype=torch.float64)
    return x * (1 / 10000 ** (places / 8)).sin().to(torch.float32)


SPECTRA = {
    "rotary positions": rotated,
    "both axes, the real part": lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real,
    "there and back, of an odd length": lambda x: torch.fft.ifft(torch.fft.fft(x[:, :5], dim=1) * 2j, dim=1).imag,
    "orthogonal, in two axes": lambda x: torch.fft.rfft2(x, dim=(1, 2), norm="ortho").abs(),
    "a filter of real signals": filtered,
    "back to an odd length": lambda x: torch.fft.irfft(torch.fft.rfft(x[:, :5], dim=1), n=5, dim=1),
    "a table in float64": sinusoids,
}


@pytest.mark.parametrize("kind", SPECTRA)
def test_complex_numbers_and_wide_tables_give_what_they_give_in_pytorch(kind: str) -> None:
    x = np.random.default_rng(1).standard_normal((2, 6, 3, 8)).astype(np.float32)
    graph = run_passes(capture_module(Of(SPECTRA[kind]), {"x": torch.from_numpy(x)}), PassOptions())
    expected = SPECTRA[kind](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(execute(graph, {}, {"x": x})["output"], expected, rtol=1e-5, atol=1e-5)


WRITES = {
    "a row": lambda x, mask, row: x.clone().index_put_((mask,), row),
    "a row for each of none but one": lambda x, mask, row: x.clone().index_put_((mask,), row[None] * 2),
    "a number": lambda x, mask, row: x.clone().index_put_((mask,), row[:1]),
    "a row, added": lambda x, mask, row: x.clone().index_put_((mask,), row, accumulate=True),
}


@pytest.mark.parametrize("kind", WRITES)
def test_the_same_written_to_all_places_of_a_mask_has_a_fixed_size(kind: str) -> None:
    class Writes(torch.nn.Module):
        def forward(self, x: Any, row: Any) -> Any:
            return WRITES[kind](x, x[..., 0] > 0, row)

    random = np.random.default_rng(2)
    inputs = {name: random.standard_normal(shape).astype(np.float32) for name, shape in (("x", (2, 3, 4)), ("row", 4))}
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    found = execute(capture_module(Writes(), tensors), {}, inputs)["output"]
    np.testing.assert_allclose(found, WRITES[kind](tensors["x"], tensors["x"][..., 0] > 0, tensors["row"]).numpy())


def test_a_table_in_a_wide_type_is_rounded_once() -> None:
    graph = capture_module(Of(sinusoids), {"x": torch.ones(8)})
    assert [node.op for node in graph.nodes] == [Binary("multiply")]
    (table,) = graph.constants.values()
    np.testing.assert_array_equal(table, np.sin(1 / 10000 ** (np.arange(8) / 8)).astype(np.float32))


def test_an_input_in_a_wide_type_stays_a_finding() -> None:
    with pytest.raises(UnsupportedOperators, match="no such element type"):
        capture_module(Of(lambda x: (x.double() * torch.arange(8).double()).float()), {"x": torch.ones(8)})


def head_of_own_table(x: Any) -> Any:
    sizes = torch.zeros(4)
    sizes[1:3] = 2
    return x[: int(sizes.sum())]


def written_by_an_input(x: Any) -> Any:
    sizes = torch.zeros(4)
    sizes[1:].copy_(x[:3])
    return x[: int(sizes.sum())]  # LINE: written


def made_from_an_input(x: Any) -> Any:
    sizes = torch.ones(4)
    torch.add(x[:4], 1, out=sizes)
    return x if sizes.sum() > 0 else -x  # LINE: made


def test_a_size_that_follows_from_constants_is_known_while_compiling() -> None:
    graph = capture_module(Of(head_of_own_table), {"x": torch.ones(8)})
    assert graph.outputs["output"].type.shape == (4,)


@pytest.mark.parametrize(("function", "label"), [(written_by_an_input, "written"), (made_from_an_input, "made")])
def test_a_table_that_an_input_was_written_to_is_no_constant(function: Any, label: str) -> None:
    with pytest.raises(GraphBreak) as caught:
        capture_module(Of(function), {"x": torch.ones(8)})
    lines = Path(HERE).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# LINE: {label}"))
    assert caught.value.source == f"{HERE}:{number}"


def test_a_value_that_only_an_assertion_reads_is_no_obstacle() -> None:
    def checked(x: Any) -> Any:
        torch._check((x > 0).sum().item() >= 0)
        return x + 1

    assert [node.op for node in capture_module(Of(checked), {"x": torch.ones(8)}).nodes] == [Binary("add")]


class Rescales(torch.nn.Linear):
    """Divides its weights before it first uses them."""

    def forward(self, x: Any) -> Any:
        self.weight.div_(4)
        return super().forward(x)


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x * self.calls


def test_a_weight_rewritten_from_weights_is_what_a_call_on_the_checkpoint_sees() -> None:
    graph = capture_module(Rescales(8, 2, bias=False), {"x": torch.ones(1, 8)})
    assert isinstance(graph.nodes[-1].op, Linear)
    found = execute(graph, {"weight": np.ones((2, 8), np.float32)}, {"x": np.ones((1, 8), np.float32)})
    np.testing.assert_array_equal(found["output"], np.full((1, 2), 2.0))


def test_a_buffer_that_counts_calls_stays_a_finding() -> None:
    with pytest.raises(UnsupportedOperators, match="keep state"):
        capture_module(Counts(), {"x": torch.ones(8)})


_TOKENS: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
}
_TOKENS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_SMALL: dict[str, dict[str, Any]] = {
    "llama4_text": _TOKENS
    | {"intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 8, "no_rope_layers": [1, 0]},
    "deepseek_v2": _TOKENS
    | _EXPERTS
    | _LATENT
    | {"num_key_value_heads": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "fnet": _TOKENS | {"type_vocab_size": 2, "tpu_short_seq_length": 12},
    "siglip2_vision_model": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "patch_size": 4}
    | {"num_hidden_layers": 2, "num_patches": 16},
    "qwen2_5_vl_vision": {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32}
    | {"patch_size": 28, "fullatt_block_indexes": [1], "window_size": 112},
}


def small(family: str, **changes: Any) -> CaptureRequest:
    config = {"model_type": family, **_SMALL[family], **changes}
    return CaptureRequest(config, "feature-extraction", "forward", 1, 12, "float32")


@pytest.mark.sample(12)
@pytest.mark.parametrize("family", _SMALL)
def test_a_model_with_such_means_agrees_with_pytorch(family: str) -> None:
    wanted = small(family)
    graph = capture(wanted)
    parameters, inputs = weights(wanted), example_inputs(graph, wanted.config, seed=3)
    found = execute(run_passes(graph, PassOptions()), parameters, inputs)
    for name, expected in reference_outputs(wanted, parameters, inputs).items():
        assert np.abs(found[name] - expected).max() < 1e-4 * np.abs(expected).max(), name


def test_a_tower_of_patches_reads_them_for_a_grid_of_the_configured_size() -> None:
    graph = capture(small("qwen2_5_vl_vision"))
    assert {name: value.type.shape for name, value in graph.inputs.items()} == {"pixel_patches": (64, 3 * 2 * 28 * 28)}


def test_the_setting_that_a_configuration_leaves_unset_is_named() -> None:
    with pytest.raises(CaptureError, match=r"modeling_deepseek_v2\.py:\d+.*leaves num_experts_per_tok unset"):
        capture(small("deepseek_v2", num_experts_per_tok=None))


def test_a_part_that_would_return_a_cache_does_not() -> None:
    vision = _SMALL["qwen2_5_vl_vision"] | {"in_channels": 3}
    text = _TOKENS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    config = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision}
    graph = capture(CaptureRequest(config, "feature-extraction", "forward", 1, 12, "float32"))
    assert set(graph.outputs) == {"last_hidden_state"}


def test_a_model_of_one_part_is_built_from_that_part_of_the_configuration() -> None:
    part = _TOKENS | {"head_dim": 8, "layer_types": ["full_attention", "linear_attention"]}
    wanted = CaptureRequest(
        {"model_type": "qwen3_5", "text_config": part}, "text-generation", "forward", 1, 12, "float32"
    )
    assert build_model(wanted).config.hidden_size == 32
