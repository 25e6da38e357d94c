"""`nxpipe generate` and `nxpipe run`: text from an artifact, a folder and a model that is not built."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.command import installed, nxpipe
from tests.serving import checkpoints
from tests.serving.server_process import build

pytestmark = pytest.mark.sample(12, "generate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generate")


@pytest.fixture(scope="module")
def artifact(folder: Path) -> tuple[str, Path]:
    return build(folder, "llama", "--buckets", "8,16,64", "--phases", "prefill,decode")


def generated(artifact: tuple[str, Path], folder: Path, *words: str, code: int = 0) -> Any:
    name, store = artifact
    answer = nxpipe("generate", name, *words, "--store", str(store), "--json", "-q", cwd=folder)
    assert answer.code == code, answer.err
    return json.loads(answer.out)[0] if code == 0 else answer.err


def test_text_and_its_token_ids_give_one_answer_on_both_executors(artifact: tuple[str, Path], folder: Path) -> None:
    ids = json.dumps(checkpoints.tokenizer().encode("the river").ids)
    runs = [("the river",), (ids,), ("the river", "--mode", "isa")]
    texts, *same = (generated(artifact, folder, *words, "--max-tokens", "5") for words in runs)
    assert [each["tokens"] for each in same] == [texts["tokens"]] * 2
    assert checkpoints.tokenizer().decode(texts["tokens"]) == texts["text"]


def test_the_answer_is_that_of_pytorch(artifact: tuple[str, Path], folder: Path) -> None:
    """Against a full forward pass in fp32 for each token: near ties may go either way, so tokens are compared by their
    logits."""
    import torch
    import transformers

    from nxpipe.pipeline.models.weights import random_tensor

    config = transformers.AutoConfig.from_pretrained(folder / "llama")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(random_tensor(0, name, tuple(parameter.shape), "float32")))
    prompt = checkpoints.tokenizer().encode("the town was dark").ids
    tokens = list(prompt)
    for token in generated(artifact, folder, json.dumps(prompt), "--max-tokens", "10")["tokens"]:
        logits = model(torch.tensor([tokens])).logits[0, -1]
        assert logits[token] >= logits.max() - 0.02
        tokens.append(token)


def test_a_chat_reads_the_template_and_stdin_a_prompt(artifact: tuple[str, Path], folder: Path) -> None:
    rendered = "<s><|system|>be brief<|user|>hello<|assistant|>"
    ids = checkpoints.tokenizer().encode(rendered, add_special_tokens=False).ids
    chat = generated(artifact, folder, "hello", "--chat", "--system", "be brief")
    assert chat["tokens"] == generated(artifact, folder, json.dumps(ids))["tokens"]
    name, store = artifact
    run = nxpipe("run", name, "--chat", "hello", "--generate", "4", "--store", str(store), "--json", "-q", cwd=folder)
    assert json.loads(run.out)[0]["prompt_tokens"] == len(ids) - len(
        checkpoints.tokenizer().encode("<|system|>be brief", add_special_tokens=False).ids
    )


def test_a_fetched_folder_and_a_model_that_is_not_built_answer_alike(artifact: tuple[str, Path], folder: Path) -> None:
    name, store = artifact
    expected = generated(artifact, folder, "the river", "--max-tokens", "6")["text"]
    assert nxpipe("store", "fetch", name, "--to", "fetched", "--store", str(store), cwd=folder).code == 0
    compiled = ("--model-id", "./llama", "--weights", "random:0", "--buckets", "8,16,64")
    for words in (
        ("generate", "--folder", "fetched", "the river", "--max-tokens", "6"),
        ("run", *compiled, "--text", "the river", "--generate", "6"),
    ):
        answer = nxpipe(*words, "--json", "-q", cwd=folder)
        assert answer.code == 0, answer.err
        assert json.loads(answer.out)[0]["text"] == expected
    damaged = folder / "fetched" / "files" / "tokenizer.json"
    damaged.chmod(0o600)
    damaged.write_bytes(damaged.read_bytes().replace(b'"version"', b'"Version"'))
    answer = nxpipe("generate", "--folder", "fetched", "the river", cwd=folder)
    assert "tokenizer.json is damaged; fetch the artifact again" in answer.err
    assert answer.code not in (0, 1)


def test_wrong_arguments_are_one_sentence(artifact: tuple[str, Path], folder: Path) -> None:
    for words, sentence in (
        (("x " * 200,), "tokens, and at most 64 are read; shorten it, or build the model with a longer bucket"),
        (("[5, 100000]",), "token 100000 is not in the vocabulary of 320"),
        (("[5, 1.5]",), "token ids are whole numbers"),
        (("hi", "--system", "x"), "--system is a message of a chat; pass --chat too"),
        (("hi", "--channel", "production"), "pass one of ARTIFACT, --channel and --folder"),
    ):
        assert sentence in generated(artifact, folder, *words, code=2)
    answer = nxpipe("run", artifact[0], "--store", str(artifact[1]), "--generate", "3", cwd=folder)
    assert (answer.code, "--generate continues a text" in answer.err) == (2, True)


def test_generating_imports_neither_torch_nor_transformers(artifact: tuple[str, Path], folder: Path) -> None:
    name, store = artifact
    script = (
        "import sys; from nxpipe.pipeline.cli.main import cli; from nxpipe.pipeline.util.console import Console; "
        f"cli(['generate', {name!r}, 'hello', '--store', {str(store)!r}, '-q'], obj=Console(), standalone_mode=False); "
        "print(sorted({'torch', 'transformers', 'boto3', 'botocore', 'starlette'} & sys.modules.keys()))"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stdout.endswith("[]\n")
    assert installed("generate", "-h", cwd=folder).code == 0
