"""Broken models: each gives a finding, with file and line if known, and never a traceback."""

import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from nxpipe.pipeline.check.checker import check
from nxpipe.pipeline.check.report import Report
from nxpipe.pipeline.compile.findings import Severity, merge
from nxpipe.pipeline.models.spec import ModelSpec
from tests.pipeline.conftest import BERT, LLAMA

ORDER = ModelSpec(
    model_id="./model",
    revision=None,
    task=None,
    target="inf2.xlarge",
    tp=None,
    phases=None,
    batches=(1,),
    buckets=(16,),
    autocast="matmult",
    autocast_type="bf16",
)


@contextmanager
def silent(_: str) -> Iterator[None]:
    yield


def checked(**words: Any) -> Report:
    return check(ModelSpec(**{**ORDER.__dict__, **words}), silent)


def written(config: dict[str, object] | str) -> None:
    text = config if isinstance(config, str) else json.dumps(config, indent=2)
    Path("model").mkdir()
    Path("model/config.json").write_text(text)


@pytest.fixture(autouse=True)
def _a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@dataclass(frozen=True)
class Broken:
    """A configuration, the rule that it violates, words of the finding, and the text of the line that it names."""

    rule: str
    says: str
    config: dict[str, object] | str
    line: str = ""
    words: dict[str, Any] | None = None


CONFIGURATIONS = {
    "no JSON": Broken("NXC-101", "not valid JSON", '{\n  "model_type": "bert",\n  oops\n}', "oops"),
    "an array": Broken("NXC-101", "model_type", "[1, 2]"),
    "no model_type": Broken("NXC-101", "model_type", {"hidden_size": 8}),
    "numbers too wide": Broken("NXC-102", "2^53", {**BERT, "eos_token_id": 10**17}),
    "not a number": Broken("NXC-102", "vocab_size is nan", json.dumps(BERT).replace("97", "NaN")),
    "zero width": Broken("NXC-102", "hidden_size is 0", {**BERT, "hidden_size": 0}, "hidden_size"),
    "negative vocabulary": Broken("NXC-102", "vocab_size is -5", {**BERT, "vocab_size": -5}, "vocab_size"),
    "no layers": Broken("NXC-102", "is 0", {**BERT, "num_hidden_layers": 0}, "num_hidden_layers"),
    "less than no layers": Broken("NXC-102", "is -2", {**LLAMA, "num_hidden_layers": -2}, "num_hidden_layers"),
    "layers in words": Broken("NXC-102", "'two'", {**BERT, "num_hidden_layers": "two"}, "num_hidden_layers"),
    "a fraction of a head": Broken("NXC-102", "2.5", {**BERT, "num_attention_heads": 2.5}, "num_attention_heads"),
    "unknown model_type": Broken("NXC-201", "'berd'", {**BERT, "model_type": "berd"}, "model_type"),
    "text for a number": Broken("NXC-201", "layer_norm_eps", {**BERT, "layer_norm_eps": "small"}, "layer_norm_eps"),
    "unknown activation": Broken("NXC-201", "geluu", {**BERT, "hidden_act": "geluu"}, "hidden_act"),
    "heads that do not divide": Broken("NXC-201", "multiple", {**BERT, "num_attention_heads": 5}, "hidden_size"),
    "key heads that do not divide": Broken("NXC-201", "must match", {**LLAMA, "num_key_value_heads": 3}),
    "padding beyond the table": Broken("NXC-201", "adding_idx", {**BERT, "pad_token_id": 500}),
    "unknown rope": Broken("NXC-201", "nonsense", {**LLAMA, "rope_scaling": {"rope_type": "nonsense"}}, "nonsense"),
    "unknown element type": Broken("NXC-201", "float8", {**LLAMA, "torch_dtype": "float8"}, "torch_dtype"),
    "quantised": Broken(
        "NXC-105", "quantised", {**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "quantization_config"
    ),
    "code of its own": Broken("NXC-104", "never runs", {**LLAMA, "auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    "unknown type, with code of its own": Broken(
        "NXC-201", "'my_own'", {"model_type": "my_own", "auto_map": {"AutoModel": "modeling.Mine"}}, "model_type"
    ),
    "a bucket beyond the positions": Broken(
        "NXC-204", "has 64", BERT, "max_position_embeddings", {"buckets": (16, 128)}
    ),
    "a task of another family": Broken("NXC-201", "fill-mask", LLAMA, words={"task": "fill-mask"}),
    "a cache where there is none": Broken(
        "NXC-201", "cache", BERT, words={"task": "text-generation", "phases": ("decode",)}
    ),
    "a huge vocabulary": Broken("NXC-401", "GiB", {**LLAMA, "vocab_size": 10**9}),
    "a tensor above 4 GB": Broken("NXC-303", "lm_head", {**LLAMA, "vocab_size": 10**9}),
    "a degree that the target lacks": Broken("NXC-301", "offers degrees 1, 2", LLAMA, words={"tp": 3}),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_broken_configuration_gives_a_finding_at_its_line(name: str) -> None:
    broken = CONFIGURATIONS[name]
    written(broken.config)
    report = checked(**(broken.words or {}))
    found = [finding for finding in report.findings if finding.rule.id == broken.rule]
    assert found, report.findings
    assert any(broken.says in finding.message for finding in found)
    if broken.line:
        lines = Path("model/config.json").read_text().splitlines()
        pointed = [lines[finding.line - 1] for finding in found if finding.line]
        assert any(broken.line in line for line in pointed), found
        assert {finding.file for finding in found} == {"model/config.json"}
    if found[0].severity is Severity.ERROR:
        assert report.exit_code.number in (10, 11, 13)


def _no_zip(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}))


def _bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/models/model.json", b" " * (64 << 20))


def _cut(path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.zeros(1, 4),)), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


SAVED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a pickle": ("model.pt2", _no_zip, "was not saved by torch.export"),
    "an archive that swells": ("model.pt2", _bomb, "compressed"),
    "a program cut short": ("model.pt2", _cut, "truncated"),
    "no ONNX": ("model.onnx", _no_zip, "is not an ONNX model"),
    "an empty ONNX": ("model.onnx", lambda path: path.write_bytes(b""), "has no ONNX graph"),
    "a missing file": ("model.onnx", lambda path: None, "No such file"),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_broken_file_is_one_finding_at_the_file(name: str) -> None:
    file, make, says = SAVED[name]
    make(Path(file))
    report = check(ModelSpec(**{**ORDER.__dict__, "model_id": file}), silent)
    (finding,) = report.findings
    assert says in finding.message
    assert finding.file == file
    assert report.exit_code.number in (10, 11)


def test_a_folder_that_is_not_there_is_a_finding() -> None:
    report = checked(model_id="./nowhere")
    assert [finding.rule.id for finding in report.findings] == ["NXC-101"]
    assert report.exit_code.number == 10


def test_a_folder_without_a_configuration_is_a_finding() -> None:
    Path("model").mkdir()
    assert "config.json" in checked().findings[0].message


def test_a_gated_model_without_a_network_is_a_finding() -> None:
    report = checked(model_id="somebody/gated-model")
    assert "not in the local cache, and the hub is unreachable" in report.findings[0].message
    assert report.exit_code.number == 10


def _truncated(path: Path) -> None:
    save_file({"x": np.zeros(64, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-16])


def _no_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 64)


def _other_models(path: Path) -> None:
    save_file({"x": np.zeros(64, np.float32)}, path)


def _shard_missing(path: Path) -> None:
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    path.with_name("model.safetensors.index.json").write_text(json.dumps(index))


WEIGHTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncated, "its header declares"),
    "of random bytes": (_no_header, "too short"),
    "of another model": (_other_models, "no such tensor"),
    "of which a shard is missing": (_shard_missing, "which is missing"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_cannot_be_used_are_a_finding_beside_a_model_that_lowers(name: str) -> None:
    make, says = WEIGHTS[name]
    written(BERT)
    make(Path("model/model.safetensors"))
    report = checked()
    assert [program.name for program in report.programs] == ["forward-b1-s16"]
    assert [(finding.rule.id, says in finding.message) for finding in report.findings] == [("NXC-103", True)]
    assert report.exit_code.number == 10


class BranchesOnAValue(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 1 if x.sum() > 0 else x - 1


class TakesAnItem(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * round(x[0, 0].item())


class FindsNonzero(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x.nonzero().float()


class LoopsUntilSmall(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        while x.abs().max() > 1:
            x = x / 2
        return x


class SelectsByMask(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x[x > 0] * 2


class WritesIntoAView(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        x[0].resize_(int(x[0].sum()))
        return x


class CountsNonzero(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * len(x.nonzero())


class GoesThroughNumpy(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.from_numpy(x.numpy() + 1)


class Branching(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x if bool(x.mean() > 0) else -x


class HidesItInASubmodule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), Branching())

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class UsesAnOperatorWithoutShapes(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.ops.nxpipe_tests.shapeless(x)


class Decomposes(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.linalg.svd(x).S


class CountsUnique(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.unique(x)


class Lists(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.tensor(x[0].tolist()) + x


class MultipliesWrongly(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x @ torch.ones(3, 3)


class UsesItsOwnOperator(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.ops.nxpipe_tests.strange(x)


_LIBRARY = torch.library.Library("nxpipe_tests", "DEF")
_LIBRARY.define("strange(Tensor x) -> Tensor")
_LIBRARY.define("shapeless(Tensor x) -> Tensor")
_LIBRARY.impl("strange", lambda x: torch.empty_like(x), "Meta")

MODULES = [
    BranchesOnAValue,
    TakesAnItem,
    FindsNonzero,
    LoopsUntilSmall,
    SelectsByMask,
    WritesIntoAView,
    CountsNonzero,
    GoesThroughNumpy,
    HidesItInASubmodule,
    UsesAnOperatorWithoutShapes,
    Decomposes,
    CountsUnique,
    Lists,
    MultipliesWrongly,
    UsesItsOwnOperator,
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("module", MODULES, ids=[module.__name__ for module in MODULES])
def test_a_module_that_cannot_be_compiled_gives_a_finding_at_its_own_line(module: type[torch.nn.Module]) -> None:
    from nxpipe.emulator.capture.export import capture_module
    from nxpipe.emulator.errors import CompileError
    from nxpipe.pipeline.check.examination import findings_of

    with pytest.raises(CompileError) as caught:
        capture_module(module(), {"x": torch.zeros(4, 4)})
    findings = merge(findings_of(caught.value))
    assert findings
    body = Path(__file__).read_text().splitlines()
    for finding in findings:
        assert finding.severity is Severity.ERROR
        assert finding.file == "tests/pipeline/test_check_broken.py"
        assert finding.line
        above = [line for line in body[: finding.line] if line.startswith("class ")]
        guilty = Branching if module is HidesItInASubmodule else module
        assert above[-1] == f"class {guilty.__name__}(torch.nn.Module):"
