"""What users of the journeys bring along: their models, as tools of the field save them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import BertWordPieceTokenizer

from tests.serving import checkpoints
from tests.user import Repository


def _folder(repository: Repository, name: str, kind: str, **changes: object) -> Path:
    """A model's folder; its special tokens are texts, since transformers reads no others."""
    folder = checkpoints.write(repository.folder / name, kind, **changes)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": "</s>", "pad_token": "</s>"}))
    return folder


def classifier(repository: Repository, name: str, seed: str = "0") -> None:
    """A fine-tuned BERT with a tokenizer and two labels, as transformers saves one."""
    labels = {
        "id2label": {"0": "NEGATIVE", "1": "POSITIVE"},
        "label2id": {"NEGATIVE": 0, "POSITIVE": 1},
        "pad_token_id": 0,
    }
    folder = _folder(repository, name, "bert", **labels)
    words = BertWordPieceTokenizer()
    words.train_from_iterator(list(checkpoints.SENTENCES) * 8, vocab_size=300, show_progress=False)
    words.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "BertTokenizer", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    code = (
        "import sys, torch; from transformers import AutoConfig, BertForSequenceClassification as M;"
        "torch.manual_seed(int(sys.argv[2])); M(AutoConfig.from_pretrained(sys.argv[1])).save_pretrained(sys.argv[1])"
    )
    written = folder / "config.json"
    config = written.read_text()
    subprocess.run([sys.executable, "-c", code, str(folder), seed], capture_output=True, check=True)
    merged = {**json.loads(written.read_text()), **json.loads(config)}
    written.write_text(json.dumps(merged))


def language_model(repository: Repository, name: str) -> None:
    """A tiny Llama with grouped queries, a tokenizer and a chat template; its weights are a seed's."""
    _folder(repository, name, "llama")


def drifted(repository: Repository, name: str, other: str) -> None:
    """The same model after another epoch: one tensor differs."""
    source, folder = repository.folder / name, repository.folder / other
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["classifier.weight"] = tensors["classifier.weight"] + np.float32(0.125)
    save_file(tensors, folder / "model.safetensors")


def saved_programs(repository: Repository) -> None:
    """`net.pt2`, `net.onnx` with a dynamic axis, a pickle, and exports that cannot be compiled."""
    subprocess.run(
        [sys.executable, str(Path(__file__).parent / "exports.py")],
        cwd=repository.folder,
        capture_output=True,
        check=True,
    )


def model(repository: Repository, name: str, kind: str) -> None:
    """A folder with a tiny model's configuration and tokenizer."""
    _folder(repository, name, kind)


def line(repository: Repository, *words: str) -> None:
    """Edit `nxpipe.toml`: the one line that begins with the words before `=>`, a comment or not, becomes the others."""
    start, _, changed = " ".join(words).partition(" => ")
    repository.edit((rf"^(# )?{re.escape(start)}.*", changed))


def append(repository: Repository, *words: str) -> None:
    """Add lines to `nxpipe.toml`; a `;` ends one."""
    lines = " ".join(words).replace("; ", "\n")
    repository.configuration.write_text(f"{repository.configuration.read_text()}\n{lines}\n")


def token_ids(
    repository: Repository, file: str, rows: str, columns: str, name: str = "input_ids", highest: str = "90"
) -> None:
    """Token ids as `--input` reads them."""
    ids = np.arange(int(rows) * int(columns), dtype=np.int64).reshape(int(rows), int(columns)) % 90
    ids[0, 0] = int(highest)
    mask = {} if name != "input_ids" else {"attention_mask": np.ones_like(ids)}
    save_file({name: ids, **mask}, repository.folder / file)
