"""Inputs of a model, names of its weights, and models that transformers does not have."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nxpipe.emulator.capture import CaptureRequest, capture, example_inputs, parameter_specs, reference_outputs
from nxpipe.emulator.capture.export import capture_module, input_types
from nxpipe.emulator.capture.model import build_model
from nxpipe.emulator.errors import CaptureError, UnsupportedOperators
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.run.fast import execute
from tests.emulator.models import relative_error, request, weights


def described(wanted: CaptureRequest) -> dict[str, str]:
    return {name: str(type_) for name, type_ in input_types(build_model(wanted), wanted).items()}


def forward(config: dict[str, Any], task: str, sequence: int = 12) -> CaptureRequest:
    return CaptureRequest(config, task, "forward", 2, sequence, "float32")


def test_a_model_of_images_takes_them_in_its_own_size() -> None:
    assert described(request("vit", "image-classification")) == {"pixel_values": "f32[2,3,32,32]"}
    wide = request("resnet", "image-classification", num_channels=4, image_size=[16, 48])
    assert described(wide) == {"pixel_values": "f32[2,4,16,48]"}


def test_a_model_with_two_towers_takes_text_and_images() -> None:
    inputs = described(request("clip"))
    assert inputs == {"input_ids": "i64[2,12]", "pixel_values": "f32[2,3,32,32]", "attention_mask": "i64[2,12]"}


def test_an_encoder_decoder_takes_tokens_for_both() -> None:
    inputs = described(request("t5", "text2text-generation"))
    assert inputs == {"input_ids": "i64[2,12]", "attention_mask": "i64[2,12]", "decoder_input_ids": "i64[2,12]"}


def test_a_listener_is_given_as_many_frames_as_it_was_asked_to_hear() -> None:
    wanted = request("wav2vec2", "automatic-speech-recognition", sequence=20)
    assert capture(wanted).outputs["logits"].type.shape[:2] == (2, 20)
    spectrogram = described(request("whisper", "automatic-speech-recognition"))
    assert spectrogram == {"input_features": "f32[2,8,40]", "decoder_input_ids": "i64[2,12]"}


def test_floats_come_in_the_type_of_the_weights() -> None:
    assert described(request("vit", dtype="bfloat16")) == {"pixel_values": "bf16[2,3,32,32]"}


def test_an_input_that_no_configuration_describes_is_named() -> None:
    with pytest.raises(CaptureError, match="needs an input 'states', whose shape no configuration gives"):
        capture(forward({"model_type": "decision_transformer"}, "feature-extraction"))


def test_a_tied_weight_goes_by_the_name_that_others_are_tied_to_whatever_comes_first() -> None:
    specs = parameter_specs(request("xlm-roberta", "fill-mask"))
    assert "roberta.embeddings.word_embeddings.weight" in specs
    assert "lm_head.decoder.weight" not in specs


def test_experts_run_as_one_product_of_groups() -> None:
    names = [node.op.name for node in capture(request("mixtral", "text-generation", num_hidden_layers=1)).nodes]
    assert names.count("grouped_matmul") == 2


def test_random_numbers_are_a_finding_that_says_where_else_to_draw_them() -> None:
    small = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(UnsupportedOperators, match="generate them on the host"):
        capture(forward({"model_type": "vit_mae", "intermediate_size": 32, **small}, "feature-extraction"))


class Mixed(torch.nn.Module):
    """The user's own code around a layer of a library."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = transformers.pytorch_utils.Conv1D(3, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def test_a_failure_inside_a_library_is_reported_where_the_user_calls_it() -> None:
    with pytest.raises(CaptureError) as caught:
        capture_module(Mixed(), {"x": torch.ones(2, 5)})
    call = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "self.layer(x)" in line)
    assert caught.value.source == f"tests/emulator/test_sources.py:{call}"


UNET = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "layers_per_block": 1,
    "block_out_channels": [16, 32],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}
XL = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 12,
}
AUTOENCODER = {
    "_class_name": "AutoencoderKL",
    "sample_size": 16,
    "block_out_channels": [8, 16],
    "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D"],
    "up_block_types": ["UpDecoderBlock2D", "UpDecoderBlock2D"],
    "norm_num_groups": 4,
}


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("config", "task"),
    [
        (UNET, "image-denoising"),
        (UNET | XL, "image-denoising"),
        (AUTOENCODER, "image-encoding"),
        (AUTOENCODER, "image-decoding"),
    ],
)
def test_a_diffusion_model_agrees_with_pytorch(config: dict[str, Any], task: str) -> None:
    pytest.importorskip("diffusers")
    wanted = forward(config, task)
    graph, parameters = capture(wanted), weights(wanted)
    inputs = example_inputs(graph, config, seed=1)
    found = execute(run_passes(graph, PassOptions()), parameters, inputs)
    for name, expected in reference_outputs(wanted, parameters, inputs).items():
        assert relative_error(found[name], expected) < 1e-5


def test_a_diffusion_task_is_for_the_class_that_its_configuration_names() -> None:
    with pytest.raises(
        CaptureError, match="is for a UNet2DConditionModel, but the configuration is of a AutoencoderKL"
    ):
        capture(forward(AUTOENCODER, "image-denoising"))
