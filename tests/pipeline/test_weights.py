import hashlib
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.pipeline.models.weights import RandomWeights, SafetensorsWeights, WeightsSource, random_tensor
from nxpipe.pipeline.util.errors import ModelSourceError


def kind(*shape: int) -> TensorType:
    return TensorType(shape, DType.FLOAT32)


def test_a_seed_gives_the_same_bits_in_another_process() -> None:
    code = (
        "import hashlib; from nxpipe.pipeline.models.weights import random_tensor;"
        "print(hashlib.sha256(random_tensor(7, 'a.weight', (33, 5), 'float32').tobytes()).hexdigest())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    here = hashlib.sha256(random_tensor(7, "a.weight", (33, 5), "float32").tobytes()).hexdigest()
    assert there == here == "be3c1eb3a530604c7dedaea99d164d891e1b8d3bd7f79b84257fb31470fdddd8"


@given(seed=st.integers(0, 2**59), other=st.integers(0, 2**59))
def test_another_seed_or_name_gives_another_tensor(seed: int, other: int) -> None:
    first = random_tensor(seed, "w", (16,), "float32")
    assert not np.array_equal(first, random_tensor(seed, "v", (16,), "float32"))
    if other != seed:
        assert not np.array_equal(first, random_tensor(other, "w", (16,), "float32"))


def test_the_spread_is_that_of_an_untrained_transformer() -> None:
    tensor = random_tensor(0, "w", (1000, 1000), "float32")
    assert abs(float(tensor.mean())) < 1e-4
    assert float(tensor.std()) == pytest.approx(0.02, rel=0.01)
    assert float(random_tensor(0, "norm.weight", (4096,), "float32").mean()) == pytest.approx(1.0, abs=0.01)
    assert float(random_tensor(0, "norm.bias", (4096,), "float32").mean()) == pytest.approx(0.0, abs=0.01)


def test_a_tensor_comes_in_the_type_that_the_model_asks_for() -> None:
    wide, narrow = (random_tensor(0, "w", (8, 8), name) for name in ("float32", "bfloat16"))
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(narrow, wide.astype(ml_dtypes.bfloat16))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(
        {
            "bert.encoder.weight": np.ones((2, 3), np.float32),
            "bert.norm.gamma": np.full(3, 2, np.float32),
            "head.bias": np.zeros(4, np.float32),
            "narrow": np.ones(2, ml_dtypes.bfloat16),
        },
        tmp_path / "model.safetensors",
    )
    return tmp_path


def test_a_head_models_checkpoint_serves_the_base_model_and_its_old_names(folder: Path) -> None:
    weights = SafetensorsWeights(folder)
    assert weights.load("encoder.weight", kind(2, 3)).sum() == 6
    assert weights.load("norm.weight", kind(3)).sum() == 6
    assert weights.load("cls.head.bias", kind(4)).sum() == 0
    assert weights.load("narrow", kind(2)).dtype == np.float32


def test_a_missing_tensor_and_a_wrong_shape_name_the_tensor(folder: Path) -> None:
    weights = SafetensorsWeights(folder)
    with pytest.raises(ModelSourceError, match=r"needs tensor 'decoder\.weight'"):
        weights.load("decoder.weight", kind(1))
    with pytest.raises(ModelSourceError, match=r"'bert\.encoder\.weight' has shape \[2, 3\].*needs \[2, 4\]"):
        weights.load("encoder.weight", kind(2, 4))


@given(cut=st.integers(0, 300))
def test_a_truncated_file_is_refused_in_a_sentence(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut")
    path = folder / "model.safetensors"
    save_file({"w": np.ones(64, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelSourceError, match="not a readable safetensors file"):
        SafetensorsWeights(folder).load("w", kind(64))


def test_identity_follows_the_bytes_and_not_the_place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    copy = elsewhere / "model.safetensors"
    copy.write_bytes((folder / "model.safetensors").read_bytes())
    before = SafetensorsWeights(folder).identity()
    assert SafetensorsWeights(elsewhere).identity() == before
    raw = bytearray(copy.read_bytes())
    raw[-1] ^= 1
    copy.write_bytes(raw)
    assert SafetensorsWeights(elsewhere).identity() != before


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("pytorch_model.bin", b"\x80", "never reads pickled weights"),
        ("README.md", b"", "holds no model.safetensors"),
        ("model.safetensors.index.json", b"{", "not a safetensors index"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../b.safetensors"}}', "not a plain file name"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}', "which is missing"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 3}}', "not a"),
    ],
)
def test_a_folder_without_usable_weights_says_why(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelSourceError, match=sentence):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("random", "as in random:0"),
        ("random:x", "as in random:0"),
        ("random:-1", "as in random:0"),
        ("/nowhere", "no such folder"),
    ],
)
def test_a_wrong_weights_option_says_what_is_allowed(text: str, sentence: str) -> None:
    with pytest.raises(ModelSourceError, match=sentence):
        WeightsSource.parse(text).open(None)


def test_random_weights_are_named_by_their_seed() -> None:
    assert WeightsSource.parse("random:42").open(None) == RandomWeights(42)
