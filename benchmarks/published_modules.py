"""Published models that no configuration of a library describes, as modules of their printed layers."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import nn

from nxpipe.emulator.capture.export import capture_module
from nxpipe.emulator.capture.model import instantiate, quiet_libraries
from nxpipe.emulator.ir.graph import Graph


def capture_of(a: Mapping[str, Any], batch: int) -> Graph:
    """The graph of an architecture of architectures.json for a batch of images."""
    width, height = a["image"]
    if a["kind"] == "perceiver":
        return capture_module(_perceiver(a), {"inputs": torch.empty(batch, 3, height, width, device="meta")})
    with torch.device("meta"):
        module = (_Vgg(a["depths"]) if a["kind"] == "vgg" else _Unet(a["widths"], a["classes"])).eval()
    return capture_module(module, {"image": torch.empty(batch, 3, height, width, device="meta")})


def _perceiver(a: Mapping[str, Any]) -> Any:
    with quiet_libraries():
        config = transformers.PerceiverConfig(
            num_latents=a["latents"], d_latents=a["hidden"], d_model=a["channels"], num_blocks=a["blocks"],
            num_self_attends_per_block=a["layers"], num_self_attention_heads=a["heads"], num_labels=a["classes"],
            num_cross_attention_heads=1, image_size=a["image"][0],
        )  # fmt: skip
    if "stem" in a:
        kind = transformers.PerceiverForImageClassificationConvProcessing
    elif "projected_from" in a:
        kind = transformers.PerceiverForImageClassificationLearned
    else:
        kind = transformers.PerceiverForImageClassificationFourier
    return instantiate(kind, config, "float32")


class _Vgg(nn.Module):
    def __init__(self, depths: list[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for depth, columns in zip(depths, (64, 128, 256, 512, 512), strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(channels, columns, 3, padding=1), nn.ReLU()]
                channels = columns
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.features(image).flatten(1))
        return scores


def _pair(inner: int, columns: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(inner, columns, 3, padding=1, bias=False), nn.BatchNorm2d(columns), nn.ReLU()),
        *(nn.Conv2d(columns, columns, 3, padding=1, bias=False), nn.BatchNorm2d(columns), nn.ReLU()),
    )


class _Unet(nn.Module):
    def __init__(self, widths: list[int], classes: int) -> None:
        super().__init__()
        self.first = _pair(3, widths[0])
        steps = list(pairwise(widths))
        self.down = nn.ModuleList(_pair(inner, columns) for inner, columns in steps)
        self.up = nn.ModuleList(nn.ConvTranspose2d(columns, inner, 2, stride=2) for inner, columns in reversed(steps))
        self.joined = nn.ModuleList(_pair(columns, inner) for inner, columns in reversed(steps))
        self.last = nn.Conv2d(widths[0], classes, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        levels = [self.first(image)]
        for down in self.down:
            levels.append(down(nn.functional.max_pool2d(levels[-1], 2)))
        found = levels.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            found = joined(torch.cat([levels.pop(), up(found)], dim=1))
        classes: torch.Tensor = self.last(found)
        return classes
