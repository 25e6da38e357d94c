"""Writes the exported models of journeys 5 and 6 into the working directory, as their owners would."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.pipeline.saved_programs import write_onnx, write_pt2


class Nonzero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x)


class Cond(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float64) * 2


class Three(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, _, _ = torch.linalg.svd(x)
        return u + torch.linalg.eigh(x + x.T)[0] + torch.special.i0(x)


class Wide(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 3_000_000_019


class Fourier(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).abs()


def save(name: str, module: nn.Module, *inputs: torch.Tensor, **options: object) -> None:
    torch.export.save(torch.export.export(module, inputs, **options), f"{name}.pt2")


def main() -> None:
    write_pt2(Path("net.pt2"))
    write_onnx(Path("net.onnx"))
    net = nn.Sequential(nn.Linear(8, 4), nn.GELU())
    torch.save(net, "net.pt")
    save("dynamic", net, torch.zeros(2, 8), dynamic_shapes=({0: torch.export.Dim("batch")},))
    square = torch.eye(4)
    save("nonzero", Nonzero(), square)
    save("cond", Cond(), square)
    save("double", Double(), square)
    save("three", Three(), square)
    save("wide", Wide(), torch.zeros(4, dtype=torch.int64))
    save("fourier", Fourier(), torch.zeros(4, 16))


if __name__ == "__main__":
    main()
