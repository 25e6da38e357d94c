"""Saved torch.export programs: their graphs, and the harmlessness of files that only resemble one."""

import contextlib
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nxpipe.emulator.capture.export import capture_module
from nxpipe.emulator.capture.pt2 import capture_exported, exported_parameters
from nxpipe.emulator.errors import CaptureError, CompileError, UnsupportedOperators
from nxpipe.emulator.run.fast import execute


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(4, 4)
        self.outer = torch.nn.Linear(4, 4)
        self.outer.weight = self.inner.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.arange(4.0))
        self.table = torch.ones(4)

    def forward(self, x: Any, y: Any) -> Any:
        hidden = torch.nn.functional.gelu(self.inner(x)) + self.table
        hidden = self.norm(hidden).clone()
        hidden.add_(y)  # a write in place, which takes a lowering
        return {"result": self.outer(hidden) * self.scale, "pair": (hidden, x.sum())}


def inputs() -> dict[str, Any]:
    return {"x": torch.linspace(-2, 2, 12).reshape(3, 4), "y": torch.ones(3, 4)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    program = torch.export.export(Block().eval(), (), inputs())
    torch.export.save(program, tmp_path / "block.pt2")
    return tmp_path / "block.pt2"


def test_a_saved_program_computes_what_its_module_computes(saved: Path) -> None:
    given = {name: tensor.numpy() for name, tensor in inputs().items()}
    found = execute(capture_exported(saved), exported_parameters(saved), given)
    expected = Block().eval()(**inputs())
    assert found.keys() == {"result", "pair.0", "pair.1"}
    np.testing.assert_allclose(found["result"], expected["result"].detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["pair.0"], expected["pair"][0].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_weights_stay_parameters_and_keep_their_names(saved: Path) -> None:
    graph = capture_exported(saved)
    weights = exported_parameters(saved)
    assert {"inner.bias", "outer.bias", "norm.running_mean", "scale"} <= set(graph.parameters) <= set(weights)
    for name, value in graph.parameters.items():
        assert weights[name].shape == value.type.shape
    assert [data.shape for data in graph.constants.values() if data.ndim] == [(4,)]  # the table


def test_a_program_in_bfloat16_keeps_its_type(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 2).bfloat16()
    program = torch.export.export(module, (torch.ones(3, 4, dtype=torch.bfloat16),))
    torch.export.save(program, tmp_path / "half.pt2")
    graph = capture_exported(tmp_path / "half.pt2")
    assert str(graph.parameters["weight"].type) == "bf16[2,4]"
    weights = exported_parameters(tmp_path / "half.pt2")
    assert np.array_equal(weights["weight"], module.weight.detach().float().numpy())


def test_the_graph_is_that_of_the_module_itself(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4)).eval()
    program = torch.export.export(module, (), {"input": torch.ones(2, 4)})
    torch.export.save(program, tmp_path / "m.pt2")
    assert capture_exported(tmp_path / "m.pt2").key == capture_module(module, {"input": torch.ones(2, 4)}).key


def test_operators_without_counterpart_are_listed(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.special.airy_ai(x)

    torch.export.save(torch.export.export(Odd(), (torch.ones(2),)), tmp_path / "odd.pt2")
    with pytest.raises(UnsupportedOperators, match=r"aten\.special_airy_ai.*test_exported\.py:"):
        capture_exported(tmp_path / "odd.pt2")


def test_dynamic_sizes_are_refused_with_the_way_out(tmp_path: Path) -> None:
    sizes = {"x": {0: torch.export.Dim("rows", min=2, max=9)}, "y": {0: torch.export.Dim("rows", min=2, max=9)}}
    program = torch.export.export(Block().eval(), (), inputs(), dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "dynamic.pt2")
    with pytest.raises(CaptureError, match=r"dynamic\.pt2 has dynamic sizes; export it again without dynamic_shapes"):
        capture_exported(tmp_path / "dynamic.pt2")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_a_sentence(saved: Path, share: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CaptureError, match=r"block\.pt2") as caught:
        capture_exported(saved)
    assert "\n" not in str(caught.value)


def test_no_single_flipped_byte_leads_to_a_traceback(saved: Path) -> None:
    data = saved.read_bytes()
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(data), 200):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        saved.write_bytes(bytes(damaged))
        with contextlib.suppress(CompileError):  # or it is read as it was: some bytes only pad
            capture_exported(saved)


def test_foreign_and_missing_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="cannot be read: No such file"):
        capture_exported(tmp_path / "missing.pt2")
    with zipfile.ZipFile(tmp_path / "foreign.pt2", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(CaptureError, match="has 0 programs"):
        capture_exported(tmp_path / "foreign.pt2")
    torch.save({"a": torch.ones(2)}, tmp_path / "checkpoint.pt2")
    with pytest.raises(CaptureError, match="has 0 programs"):
        capture_exported(tmp_path / "checkpoint.pt2")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return Path.write_text, (self.witness, "sprung")


def rewritten(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, change(name.partition("/")[2], data))


def test_pickles_in_a_program_are_never_opened(saved: Path, tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "witness"))

    def poison(name: str, data: bytes) -> bytes:
        if name.endswith("weights_config.json"):
            listing = json.loads(data)
            listing["config"]["scale"]["use_pickle"] = True
            return json.dumps(listing).encode()
        return trap if "sample_inputs" in name else data

    rewritten(saved, lambda name, data: trap if "sample_inputs" in name else data)
    capture_exported(saved)
    rewritten(saved, poison)
    with pytest.raises(CaptureError, match="has 'scale' as pickled Python, which could run any code"):
        capture_exported(saved)
    assert not (tmp_path / "witness").exists()


@pytest.mark.parametrize("target", ["torch.os.system", "math.sqrt", "torch.load"])
def test_a_call_of_anything_but_an_operator_is_refused(saved: Path, target: str) -> None:
    rewritten(saved, lambda _, data: data.replace(b"torch.ops.aten.gelu.default", target.encode()))
    with pytest.raises(CaptureError, match=f"calls '{target}', which is not an operator"):
        capture_exported(saved)
