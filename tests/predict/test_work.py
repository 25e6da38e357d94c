"""Counts of work against PyTorch's own count of the operations of each model."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

from nxpipe.pipeline.models import catalogue
from nxpipe.pipeline.predict import work
from nxpipe.pipeline.predict.architectures import architecture, architecture_of


def counted(model: Any, **inputs: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    return int(counter.get_total_flops())


def configuration(name: str, **changes: Any) -> Any:
    known = catalogue.find(name)
    assert known is not None
    return AutoConfig.for_model(**(dict(known.config) | changes), attn_implementation="eager")


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


@pytest.mark.parametrize("name", ["bert-base-uncased", "distilbert-base-uncased", "roberta-large", "gpt2"])
def test_an_encoder_does_the_operations_that_pytorch_counts(name: str) -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(configuration(name)).eval()
    found = architecture(name)
    assert found is not None
    expected = counted(model, input_ids=tokens(2, 128))
    assert work.encoder(found, batch=2, tokens=128).flops == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-7b-hf", "meta-llama/Meta-Llama-3-70B", "Qwen/Qwen2.5-0.5B"])
def test_a_prompt_takes_the_operations_that_pytorch_counts(name: str) -> None:
    config = configuration(name, num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    known = catalogue.find(name)
    assert known is not None
    found = architecture_of(dict(known.config) | {"num_hidden_layers": 2})
    assert found is not None
    expected = counted(model, input_ids=tokens(2, 256), logits_to_keep=1)
    assert work.prefill(found, batch=2, tokens=256, tp=1).flops == pytest.approx(expected, rel=0.01)


def test_an_image_encoder_and_a_residual_network_do_the_operations_that_pytorch_counts() -> None:
    pixels = torch.zeros(2, 3, 224, 224, device="meta")
    for name, found, count in (
        ("google/vit-base-patch16-224", architecture("google/vit-base-patch16-224"), work.vision_transformer),
        ("microsoft/resnet-50", architecture("torchvision/resnet50"), work.resnet),
    ):
        with torch.device("meta"):
            model = AutoModelForImageClassification.from_config(configuration(name)).eval()
        assert found is not None
        counts = count(found, batch=2, width=224, height=224)
        assert counts.flops == pytest.approx(counted(model, pixel_values=pixels), rel=0.02)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("torchvision/resnet18", 11_689_512),
        ("torchvision/resnet152", 60_192_808),
        ("torchvision/vgg16", 138_357_544),
        ("UNet", 31_037_698),
    ],
)
def test_a_convolutional_network_reads_its_parameters_once(name: str, parameters: int) -> None:
    found = architecture(name)
    assert found is not None
    count = {"resnet": work.resnet, "vgg": work.vgg, "segmentation-unet": work.segmentation_unet}[found["kind"]]
    assert count(found, batch=1, width=224, height=224).weights / 2 == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("runwayml/stable-diffusion-v1-5", 859_520_964), ("stabilityai/stable-diffusion-xl-base-1.0", 2_567_463_684)],
)
def test_a_denoising_step_reads_the_parameters_of_the_u_net_once(name: str, parameters: int) -> None:
    found = architecture(name)
    assert found is not None
    steps = [each for each in work.diffusion(found, width=512, height=512) if each.times == found["steps"]]
    assert steps[0].work.weights / 2 == pytest.approx(parameters, rel=0.05)


def test_tensor_parallel_ranks_share_the_work_and_exchange_twice_a_layer() -> None:
    found = architecture("meta-llama/Llama-2-13b-hf")
    assert found is not None
    one, rank = (work.decode(found, batch=4, context=1024, tp=tp) for tp in (1, 8))
    assert rank.weights == pytest.approx(one.weights / 8, rel=0.01)
    assert rank.cache == one.cache / 8
    assert one.collectives == 0
    assert rank.collectives == 2 * found["layers"] + 2
