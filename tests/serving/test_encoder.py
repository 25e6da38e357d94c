"""Encoders behind HTTP: embeddings and classes are those of the model, in batches and alone."""

import base64
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import load_file

from nxpipe.emulator.numerics import Array
from tests.pipeline.command import nxpipe
from tests.serving import checkpoints
from tests.serving.server_process import Running, build, serving

pytestmark = pytest.mark.sample(8, "encoder")

TEXTS = ("the river rose", "hello world, how are you today?", "dark", "the town was dark and the night and the river")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


def outputs_of(artifact: tuple[str, Path], folder: Path, text: str) -> dict[str, Array]:
    """The outputs of `nxpipe run` for a text, in the smallest bucket that holds it."""
    name, store = artifact
    tokens = json.dumps(checkpoints.tokenizer().encode(text).ids)
    out = Path(tempfile.mkdtemp(dir=folder)) / "out"
    answer = nxpipe("run", name, "--store", str(store), "--text", tokens, "--output", str(out), cwd=folder)
    assert answer.code == 0, answer.err
    fitting = min(out.glob("forward-b1-*.safetensors"), key=lambda path: int(path.stem.rpartition("-s")[2]))
    outputs: dict[str, Array] = load_file(fitting)
    return outputs


@pytest.fixture(scope="module")
def classifier(folder: Path) -> tuple[str, Path]:
    labels = {"0": "bad", "1": "good", "2": "neither"}
    changes: dict[str, Any] = {"id2label": labels, "label2id": {name: int(number) for number, name in labels.items()}}
    return build(folder / "classifier", "bert", "--batches", "1,4", "--buckets", "8,24", **changes)


@pytest.fixture(scope="module")
def classifying(classifier: tuple[str, Path]) -> Iterator[Running]:
    with serving(*classifier, "--max-waiting", "64") as running:
        yield running


def test_classes_have_the_checkpoint_s_names_and_the_model_s_shares(
    classifying: Running, classifier: tuple[str, Path], folder: Path
) -> None:
    found = classifying.post("/v1/classify", input=list(TEXTS))["data"]
    for text, entry in zip(TEXTS, found, strict=True):
        logits = outputs_of(classifier, folder, text)["logits"][0].astype(np.float64)
        shares = np.exp(logits) / np.exp(logits).sum()
        assert np.allclose(entry["probs"], shares, atol=1e-5)
        assert entry["label"] == ["bad", "good", "neither"][int(shares.argmax())]


def test_texts_that_come_together_are_classified_as_alone(classifying: Running) -> None:
    def classified(text: str) -> list[float]:
        shares: list[float] = classifying.post("/v1/classify", input=text)["data"][0]["probs"]
        return shares

    alone = [classified(text) for text in TEXTS]
    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(classified, TEXTS * 4))
    assert np.allclose(together, alone * 4, atol=1e-5)


def test_the_wrong_endpoint_and_a_text_that_is_too_long_are_refused(classifying: Running) -> None:
    status, document, _ = classifying.request("POST", "/v1/embeddings", {"input": "dark"})
    assert (status, "served at classify" in document["error"]["message"]) == (400, True)
    status, document, _ = classifying.request("POST", "/v1/completions", {"prompt": "dark"})
    assert (status, "does not generate text" in document["error"]["message"]) == (400, True)
    status, document, _ = classifying.request("POST", "/v1/classify", {"input": "dark " * 40})
    assert (status, "largest bucket 24" in document["error"]["message"]) == (400, True)
    assert classifying.post("/invocations", inputs="dark")["data"][0]["label"] in ("bad", "good", "neither")


def test_openai_s_client_gets_the_embeddings_of_the_model(folder: Path) -> None:
    artifact = build(folder / "embedder", "bert", "--batches", "1,4", "--buckets", "8,24", architectures=["BertModel"])
    with serving(*artifact) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        found = client.embeddings.create(model="bert", input=list(TEXTS))  # the client asks for base64
        for text, entry in zip(TEXTS, found.data, strict=True):
            length = len(checkpoints.tokenizer().encode(text).ids)
            pooled = outputs_of(artifact, folder, text)["last_hidden_state"][0, :length].mean(axis=0)
            assert np.allclose(entry.embedding, pooled / np.linalg.norm(pooled), atol=1e-5)
        raw: Any = server.post("/v1/embeddings", input="dark", encoding_format="base64")["data"][0]["embedding"]
        assert np.allclose(np.frombuffer(base64.b64decode(raw), "<f4"), found.data[2].embedding, atol=1e-6)
