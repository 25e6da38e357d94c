"""Hostile weights, indexes, tokenizers and prompts (W01 to W34), and tensors of an artifact that lie."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors.numpy import save_file

from nxpipe.emulator.capture import CaptureRequest, parameter_specs
from nxpipe.pipeline.models.weights import weight_files
from nxpipe.pipeline.util.errors import ModelSourceError
from tests.pipeline.command import Answer
from tests.pipeline.in_process import InProcess, nxpipe
from tests.security.test_config import BERT, is_a_sentence, written

__all__ = ["nxpipe"]

pytestmark = pytest.mark.sample(2)

CONFIG: Final = {**BERT, "architectures": ["BertModel"], "vocab_size": 120}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path / "m", CONFIG)


def built(nxpipe: InProcess, model: Path) -> Answer:
    store = model.parent / "store"
    words = ("--model-id", str(model), "--target", "inf2.xlarge", "--buckets", "16", "--store", str(store))
    return nxpipe("build", *words)


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


FILES: Final = {
    "W01": (struct.pack("<Q", 2**63) + b"{}", "not a readable safetensors file"),
    "W02": (struct.pack("<Q", 10**6) + b"{}", "not a readable safetensors file"),
    "W03": (safetensors({"a": tensor([1000], 0, 4000)}, b"x" * 8), "not a readable safetensors file"),
    "W04": (safetensors({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, b"x" * 12), "not a readable"),
    "W05": (safetensors({"a": tensor([2**40, 2**40], 0, 8)}, b"x" * 8), "not a readable safetensors file"),
    "W06": (safetensors(b'{"__metadata__": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "not a readable"),
    "W07": (safetensors({"\x1b[31mx\n::add-mask::y": tensor([2], 0, 8)}, b"x" * 8), "no such tensor"),
    "a gap": (safetensors({"a": tensor([2], 0, 8), "b": tensor([2], 16, 24)}, b"x" * 24), "not a readable"),
    "more than it says": (safetensors({"a": tensor([2], 0, 8)}, b"x" * 80), "not a readable"),
    "nothing": (b"", "not a readable safetensors file"),
    "W21": (pickle.dumps(print), "not a readable safetensors file"),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.attempt(name)] if name[0] == "W" else []) for name in FILES]
)
def test_a_broken_weights_file_is_one_sentence(name: str, nxpipe: InProcess, model: Path) -> None:
    content, says = FILES[name]
    (model / "model.safetensors").write_bytes(content)
    answer = built(nxpipe, model)
    is_a_sentence(answer)
    assert answer.code == 10, answer.err
    assert says in answer.err
    assert not list((model.parent / "store" / "cas").rglob("*.*"))


def shards(*names: object) -> bytes:
    return json.dumps({"weight_map": {f"t{number}": name for number, name in enumerate(names)}}).encode()


INDEXES: Final = {
    "W08": (shards("../../etc/passwd"), "not a plain file name in that folder"),
    "W09": (shards("/etc/passwd"), "not a plain file name in that folder"),
    "W10": (shards(".."), "which is missing"),
    "W11": (shards("x\0y"), "which is missing"),
    "W12": (shards("x\x1b]0;title\x07"), "which is missing"),
    "W13": (shards(1, 2), "not a safetensors index|not a plain file name"),
    "W13b": (shards([1], [2]), "not a safetensors index"),
    "W14": (b"[" * 100_000 + b"]" * 100_000, "JSON nested deeper than the limit"),
    "nested below Python's limit": (
        b'{"weight_map": ' + b"[" * 900 + b"]" * 900 + b"}",
        "JSON nested deeper than the limit",
    ),
    "an integer of 5000 digits": (b'{"weight_map": ' + b"9" * 5000 + b"}", "more than 4,300 digits"),
    "bytes that are no text": (b"\x80\x81", "not a safetensors index"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.attempt(name)] if name[0] == "W" else []) for name in INDEXES]
)
def test_an_index_names_files_of_its_own_folder(name: str, nxpipe: InProcess, model: Path) -> None:
    content, says = INDEXES[name]
    (model / "model.safetensors.index.json").write_bytes(content)
    answer = built(nxpipe, model)
    is_a_sentence(answer)
    assert answer.code == 10, answer.err
    assert any(words in answer.err for words in says.split("|")), answer.err


@pytest.mark.attempt("W12")
def test_a_name_of_an_index_is_told_without_its_control_characters(model: Path) -> None:
    (model / "model.safetensors.index.json").write_bytes(shards("x\x1b]0;title\x07\n::error::y"))
    with pytest.raises(ModelSourceError) as refused:
        weight_files(model)
    assert str(refused.value).isprintable()


@pytest.mark.attempt("W15")
def test_an_index_beyond_all_published_ones_is_not_read(nxpipe: InProcess, model: Path) -> None:
    index = model / "model.safetensors.index.json"
    with index.open("wb") as file:
        file.truncate(300 << 20)
    answer = built(nxpipe, model)
    is_a_sentence(answer)
    assert answer.code == 10
    assert "more than 134,217,728 bytes" in answer.err


def shard_fifo(model: Path) -> None:
    (model / "model.safetensors.index.json").write_bytes(shards("x.safetensors"))
    os.mkfifo(model / "x.safetensors")


SPECIAL: Final = {
    "W16": (lambda model: (model / "model.safetensors").symlink_to("/etc/passwd"), "not a readable safetensors file"),
    "W17": (lambda model: (model / "model.safetensors").symlink_to("/dev/zero"), "holds no model.safetensors"),
    "W18": (lambda model: os.mkfifo(model / "model.safetensors"), "holds no model.safetensors"),
    "W19": (lambda model: (model / "pytorch_model.bin").write_bytes(pickle.dumps(print)), "never reads pickled"),
    "W20": (shard_fifo, "which is missing"),
    "a fifo as index": (lambda model: os.mkfifo(model / "model.safetensors.index.json"), "holds no model.safetensors"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.attempt(name)] if name[0] == "W" else []) for name in SPECIAL]
)
def test_only_regular_safetensors_files_are_weights(name: str, nxpipe: InProcess, model: Path) -> None:
    make: Callable[[Path], object] = SPECIAL[name][0]
    make(model)
    answer = built(nxpipe, model)
    is_a_sentence(answer)
    assert answer.code == 10, answer.err
    assert SPECIAL[name][1] in answer.err
    assert "root:" not in answer.err


@pytest.mark.parametrize(
    ("fill", "code", "says"),
    [
        pytest.param(np.nan, 12, "cosine nan", marks=pytest.mark.attempt("W22")),
        pytest.param(0.01, 0, "", marks=pytest.mark.attempt("W23")),
    ],
)
def test_weights_are_verified(fill: float, code: int, says: str, nxpipe: InProcess, model: Path) -> None:
    kinds = parameter_specs(CaptureRequest(CONFIG, "feature-extraction", "forward", 1, 16, "float32"))
    generator = np.random.default_rng(0)
    save_file(
        {
            name: (generator.standard_normal(kind.shape) * 0.02 + fill).astype(np.float32)
            for name, kind in kinds.items()
        },
        model / "model.safetensors",
    )
    answer = built(nxpipe, model)
    is_a_sentence(answer)
    assert answer.code == code, answer.err
    assert says in answer.err


VOCABULARY: Final = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "hello", "world"])
CODE: Final = "import pathlib; pathlib.Path({marker!r}).write_text('ran')\nclass Evil: ...\n"
AUTO: Final = {"AutoTokenizer": ["evil.Evil", None]}
TOKENIZERS: Final[dict[str, dict[str, object]]] = {
    "W24": {"tokenizer.json": {"model": {}}, "tokenizer_config.json": {"auto_map": AUTO}},
    "W25": {"tokenizer.json": {"model": {}}, "tokenizer_config.json": {"auto_map": AUTO, "tokenizer_class": "Evil"}},
    "W26": {"tokenizer.json": "{" * 100_000},
    "W29": {"vocab.txt": VOCABULARY, "tokenizer_config.json": {"auto_map": AUTO, "tokenizer_class": "Evil"}},
    "W30": {"vocab.txt": VOCABULARY, "tokenizer_config.json": {"auto_map": AUTO, "tokenizer_class": "EvilFast"}},
    "W31": {
        "vocab.txt": VOCABULARY,
        "tokenizer_config.json": {"auto_map": AUTO, "tokenizer_class": "Evil", "trust_remote_code": True},
    },
    "W32": {
        "vocab.txt": VOCABULARY,
        "tokenizer_config.json": {
            "auto_map": {"AutoTokenizer": ["evil/repo--evil.Evil", None]},
            "tokenizer_class": "E",
        },
    },
    "W34": {
        "config.json": {**CONFIG, "auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}},
        "vocab.txt": VOCABULARY,
        "tokenizer_config.json": {"tokenizer_class": "Evil"},
    },
}


def verified(nxpipe: InProcess, model: Path, prompts: str) -> Answer:
    (model.parent / "prompts.txt").write_text(prompts)
    words = ("--model-id", str(model), "--weights", "random:0", "--target", "inf2.xlarge", "--buckets", "16")
    return nxpipe("verify", *words, "--prompts", str(model.parent / "prompts.txt"))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.attempt(name)) for name in TOKENIZERS])
def test_code_that_comes_with_a_tokenizer_never_runs(
    name: str, nxpipe: InProcess, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = model.parent / "ran"
    (model / "evil.py").write_text(CODE.format(marker=str(marker)))
    for file, content in TOKENIZERS[name].items():
        (model / file).write_text(content if isinstance(content, str) else json.dumps(content))
    # transformers asks on the terminal whether to run it: this user always says yes.
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    answer = verified(nxpipe, model, "hello world\n")
    is_a_sentence(answer)
    assert not marker.exists()
    assert answer.code in (0, 10), answer.err


@pytest.mark.parametrize(
    ("vocabulary", "code"),
    [
        pytest.param("/dev/zero", 10, marks=pytest.mark.attempt("W27")),
        pytest.param(VOCABULARY, 0, marks=pytest.mark.attempt("W33")),
    ],
)
def test_a_vocabulary_is_a_regular_file(vocabulary: str, code: int, nxpipe: InProcess, model: Path) -> None:
    if vocabulary.startswith("/"):
        (model / "vocab.txt").symlink_to(vocabulary)
    else:
        (model / "vocab.txt").write_text(vocabulary)
    answer = verified(nxpipe, model, "hello world\n")
    is_a_sentence(answer)
    assert answer.code == code, answer.err


@pytest.mark.attempt("W28")
@pytest.mark.parametrize("line", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, "[" + "9" * 5000 + "]"])
def test_a_line_of_prompts_that_is_a_bomb_is_refused(line: str, nxpipe: InProcess, model: Path) -> None:
    answer = verified(nxpipe, model, line + "\n")
    is_a_sentence(answer)
    assert answer.code == 2, answer.err
    assert "write a JSON list of token ids" in answer.err


def test_prompts_come_from_a_regular_file(nxpipe: InProcess, model: Path) -> None:
    os.mkfifo(model.parent / "fifo")
    for path in (model.parent / "fifo", Path("/dev/zero")):
        words = ("--model-id", str(model), "--weights", "random:0", "--target", "inf2.xlarge", "--buckets", "16")
        answer = nxpipe("verify", *words, "--prompts", str(path))
        is_a_sentence(answer)
        assert answer.code == 2
        assert "Not a regular file" in answer.err
