"""Small models in Hugging Face layout, artifacts of them for devices, and a machine with a stand-in device."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from nxpipe.artifact_store import Published, Store, open_store
from tests.runtime.devices.conftest import stand_in

__all__ = ["stand_in"]

BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models" / "tiny-bert", dict(BERT))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models" / "tiny-llama", dict(LLAMA))


_FOR_DEVICES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "encoder": (BERT, ()),
    "decoder": (LLAMA, ("--phases", "prefill,decode")),
}

Artifacts = Callable[[str, int], Path]
World = tuple[Store, Published]


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """A function that builds a model for devices once, in a folder with a store and the artifact's name."""

    from tests.pipeline.device_artifacts import build_for_devices

    @cache
    def artifact(kind: str, degree: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{kind}-{degree}")
        config, options = _FOR_DEVICES[kind]
        made = build_for_devices(folder, config, "--tp", str(degree), *options, drops_unused=degree > 1)
        (folder / "name").write_text(made.name)
        return folder

    return artifact


@pytest.fixture
def world(artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """A function that puts a copy of the store with such an artifact into the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nxpipe.toml").write_text('[project]\nname = "search"\n[store]\nurl = "file://store"\n')

    def copied(kind: str = "encoder", degree: int = 1) -> World:
        folder = artifacts(kind, degree)
        shutil.copytree(folder / "store", tmp_path / "store", symlinks=True)
        store = open_store(str(tmp_path / "store"))
        return store, store.resolve((folder / "name").read_text())

    return copied


@pytest.fixture
def device(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that makes this machine one with the stand-in device."""
    from tests.pipeline.device_artifacts import install_device

    return lambda **settings: install_device(stand_in, tmp_path, monkeypatch, **settings)
