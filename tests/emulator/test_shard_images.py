"""Convolutions across ranks: channels are divided where that is exact, and everything else is computed whole."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.capture import CaptureRequest, example_inputs
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import AllReduce, Convolution, Unary
from nxpipe.emulator.passes import PassOptions
from nxpipe.emulator.passes.shard import DegreeImpossible, divide, shard
from nxpipe.emulator.run.fast import execute
from tests.emulator.divided_models import lowered, together, worst_error
from tests.emulator.models import request, weights

F32 = DType.FLOAT32
TASKS = {
    "clip": "zero-shot-image-classification",
    "convnext": "image-classification",
    "dinov2": "image-classification",
    "resnet": "image-classification",
    "swin": "image-classification",
    "vit": "image-classification",
    "wav2vec2": "feature-extraction",
    "whisper": "automatic-speech-recognition",
}
UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "block_out_channels": [16, 32],
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}


def agree(wanted: CaptureRequest, degree: int) -> bool:
    whole, parameters = lowered(wanted), weights(wanted)
    inputs = example_inputs(whole, wanted.config, seed=3)
    expected = execute(whole, parameters, inputs)
    return worst_error(together(whole, parameters, inputs, degree), expected) < 5e-6


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", TASKS)
def test_towers_and_stems_answer_as_one_rank_does(family: str) -> None:
    assert agree(request(family, TASKS[family]), 2)


@pytest.mark.sample(4)
@pytest.mark.parametrize("degree", [2, 4])
def test_a_unet_shares_its_channels_and_heads(degree: int) -> None:
    pytest.importorskip("diffusers")
    wanted = CaptureRequest(UNET, "image-denoising", "forward", 1, 8, "float32")
    assert agree(wanted, degree)
    divided = divide(lowered(wanted)).plan(degree).parameters
    assert "mid_block.resnets.0.conv1.weight" in divided
    assert divided["mid_block.resnets.0.conv2.weight"].axis == 1


def bottleneck(channels: int, groups: int) -> Graph:
    """Widen, mix places within groups, narrow: all three convolutions have a bias."""
    builder = GraphBuilder()
    value = builder.input("x", TensorType((2, 3, 6), F32))
    window = {"up": (channels, 3, 1), "mix": (channels, channels // groups, 3), "down": (3, channels, 1)}
    for name, shape in window.items():
        pad = (shape[2] // 2,)
        op = Convolution((1,), pad, pad, (1,), groups if name == "mix" else 1, F32)
        weight = builder.parameter(f"{name}.weight", TensorType(shape, F32))
        value = builder.add(op, value, weight, builder.parameter(f"{name}.bias", TensorType(shape[:1], F32)))
        value = value if name == "down" else builder.add(Unary("tanh"), value)
    builder.output("y", value)
    return builder.build()


@given(width=st.integers(1, 4), groups=st.sampled_from([2, 3, 4, 8]), degree=st.sampled_from([2, 3, 4, 8]))
@settings(max_examples=25, deadline=None)
def test_groups_of_channels_stay_together_or_whole(width: int, groups: int, degree: int) -> None:
    graph = bottleneck(width * groups, groups)
    generator = np.random.default_rng(width)
    arrays = {
        name: generator.standard_normal(value.type.shape).astype(np.float32)
        for side in (graph.parameters, graph.inputs)
        for name, value in side.items()
    }
    inputs = {"x": arrays.pop("x")}
    if groups % degree:
        with pytest.raises(DegreeImpossible, match=f"among {degree} ranks; degrees that work: 1"):
            shard(graph, PassOptions(tensor_parallel=degree))
        return
    found = together(graph, arrays, inputs, degree)
    assert worst_error(found, execute(graph, arrays, inputs)) < 3e-6
    sharded = shard(graph, PassOptions(tensor_parallel=degree))
    assert sum(isinstance(node.op, AllReduce) for node in sharded.nodes) == 1
    assert [node.op.groups for node in sharded.nodes if isinstance(node.op, Convolution)] == [1, groups // degree, 1]
