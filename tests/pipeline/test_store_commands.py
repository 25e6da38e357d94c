import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from nxpipe.artifact_store import Published, open_store
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.manifest import Executable, File, Manifest, ModelRef, Tensor
from nxpipe.pipeline.artifacts.store_url import store_url
from nxpipe.pipeline.cli.main import cli
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.exit_codes import CONFIGURATION, CORRUPT, NOT_FOUND, OK, STORE, ExitCode, exit_code_of
from tests.artifact_store.samples import publish_verified
from tests.conftest import ROOT

MODEL = "acme/tiny-bert"


def publish(folder: Path, *, model: str = MODEL, note: str = "plain") -> Published:
    store = open_store(str(folder))
    inputs: dict[str, object] = {
        "model": model,
        "options": {"autocast": "matmult", "note": note},
        "shapes": [["forward", 1]],
    }
    weight = store.put_blob(bytes(1000))
    return publish_verified(
        store,
        Manifest(
            model=ModelRef(id=model, revision="abc123", task="fill-mask"),
            target="inf2",
            backend="emulator",
            key_inputs=store.put_blob(canonical_json(inputs)),
            executables=(
                Executable(
                    name="forward-b1-s128",
                    phase="forward",
                    batch=1,
                    sequence=128,
                    tensor_parallel=2,
                    graph_key=sha256_hex(b"graph"),
                    outputs=("logits",),
                    blob=store.put_blob(b"program"),
                ),
            ),
            weights=tuple(
                Tensor(name=name, dtype="uint8", shape=(1000,), blob=weight, pack=None) for name in ("a", "b")
            ),
            files=(File(path="tokenizer/vocab.txt", blob=store.put_blob(b"golden")),),
        ),
    )


@dataclass(frozen=True)
class Answer:
    code: ExitCode | None
    out: str
    err: str
    error: str


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def nxpipe(*words: str) -> Answer:
    done = CliRunner().invoke(cli, words, obj=Console(), standalone_mode=False)
    code = OK if done.exception is None else exit_code_of(done.exception)
    return Answer(code, done.stdout, done.stderr, str(done.exception or ""))


def test_an_empty_store_is_an_empty_result_and_a_word_on_how_to_fill_it(here: Path) -> None:
    answer = nxpipe("store", "ls")
    assert (answer.code, answer.out) == (OK, "")
    assert "nxpipe build --model-id" in answer.err
    assert f"file://{here}/.nxpipe/store" in answer.err
    answer = nxpipe("store", "ls", "--json")
    assert json.loads(answer.out) == []
    assert nxpipe("store", "ls", "--quiet").err == ""
    assert list(here.iterdir()) == []


def test_the_list_has_a_line_for_each_artifact_newest_first(here: Path) -> None:
    first, second = publish(here / "s"), publish(here / "s", model="llama")
    answer = nxpipe("store", "ls", "--store", "s")
    header, *lines = answer.out.splitlines()
    titles = ("ARTIFACT", "TARGET", "TP", "BATCHES", "BUCKETS", "DIFFERS IN", "CHANNELS", "SIZE", "PUBLISHED")
    assert header.split() == " ".join(titles).split()
    assert [line.split()[:8] for line in lines] == [
        [entry.name, "inf2", "2", "1", "128", "-", "1.1", "kB"] for entry in (second, first)
    ]
    assert answer.err == ""


def test_the_list_as_json_tells_full_digests_and_bytes(here: Path) -> None:
    published = publish(here / "s")
    (row,) = json.loads(nxpipe("store", "ls", "--store", "s", "--json").out)
    assert row == {
        "request_key": published.request_key,
        "manifest_digest": published.manifest_digest,
        "model": MODEL,
        "target": "inf2",
        "programs": 1,
        "size_bytes": 1000 + len("program") + len("golden") + published.manifest.key_inputs.size,
        "published_at": published.published_at,
        "degrees": [2],
        "batches": [1],
        "buckets": [128],
        "differs_in": {},
        "channels": [],
    }


@pytest.mark.parametrize("form", ["{model}", "{model}@{key:.6}", "{key:.8}", "{key}"])
def test_show_takes_every_form_of_a_name(here: Path, form: str) -> None:
    published = publish(here / "s")
    answer = nxpipe("store", "show", form.format(model=MODEL, key=published.request_key), "--store", "s")
    assert answer.code is OK
    assert published.manifest_digest in answer.out


def test_show_tells_all_that_a_manifest_says(here: Path) -> None:
    published = publish(here / "s")
    page = " ".join(nxpipe("store", "show", MODEL, "--store", "s").out.split())
    for words in (
        f"model {MODEL}",
        "revision abc123",
        "task fill-mask",
        "target inf2",
        "backend emulator",
        f"key {published.request_key}",
        f"manifest {published.manifest_digest}",
        "size 1.1 kB in 4 blobs",
        "weights 2.0 kB, 1.0 kB stored, in 2 tensors",
        "forward-b1-s128 forward 1 128 2 7 B",
        "tokenizer/vocab.txt 6 B",
        "forward-b1-s128 logits 0.001 0.0001 0.001 0.9999999",
        "PyTorch fp32",
        "options.autocast matmult",
        'shapes [["forward", 1]]',
    ):
        assert words in page


def test_show_as_json_holds_the_whole_manifest(here: Path) -> None:
    published = publish(here / "s")
    shown = json.loads(nxpipe("store", "show", MODEL, "--store", "s", "--json").out)
    assert Manifest.model_validate(shown["manifest"]) == published.manifest
    assert shown["manifest_digest"] == published.manifest_digest


def test_text_of_an_artifact_cannot_drive_the_terminal(here: Path) -> None:
    publish(here / "s", note="\x1b[2J\x9b31m\nkey forged")
    page = nxpipe("store", "show", MODEL, "--store", "s").out
    assert "\x1b" not in page
    assert "\x9b" not in page
    assert r'"\u001b[2J\u009b31m\nkey forged"' in page


def test_a_name_that_is_not_there_is_answered_with_the_nearest(here: Path) -> None:
    published = publish(here / "s")
    answer = nxpipe("store", "show", "acme/tiny-brt", "--store", "s")
    assert answer.code is NOT_FOUND
    assert f"{MODEL}@{published.request_key[:12]}" in answer.error
    assert answer.out == ""


def test_a_damaged_artifact_is_not_shown(here: Path) -> None:
    published = publish(here / "s")
    digest = published.manifest_digest
    (here / "s" / "cas" / "sha256" / digest[:2] / digest).write_bytes(b"{}")
    answer = nxpipe("store", "show", MODEL, "--store", "s")
    assert (answer.code, answer.out) == (CORRUPT, "")
    assert digest in answer.error


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://UPPER"])
def test_a_url_of_no_store_is_a_store_error(url: str) -> None:
    answer = nxpipe("store", "ls", "--store", url)
    assert answer.code is STORE
    assert "allowed are" in answer.error


# Which store


def configure(folder: Path, url: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "nxpipe.toml").write_text(f'[project]\nname = "test"\n\n[store]\nurl = "{url}"\n')
    return folder / "nxpipe.toml"


def test_the_option_comes_before_the_environment_and_that_before_the_file(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = configure(here / "project", "s3://from-file/p")
    assert store_url(None, file) == "s3://from-file/p"
    monkeypatch.setenv("NXPIPE_STORE_URL", "s3://from-environment/p")
    assert store_url(None, file) == "s3://from-environment/p"
    assert store_url("s3://from-option/p", file) == "s3://from-option/p"


def test_a_relative_folder_of_the_file_starts_at_the_file(here: Path) -> None:
    published = publish(here / "project" / "artifacts")
    file = configure(here / "project", "file://artifacts")
    assert store_url(None, file) == f"file://{here}/project/artifacts"
    assert store_url(None, Path("project/nxpipe.toml")) == f"file://{here}/project/artifacts"
    answer = nxpipe("store", "ls", "--config", "project/nxpipe.toml", "--json")
    assert [row["request_key"] for row in json.loads(answer.out)] == [published.request_key]


def test_a_relative_folder_that_was_typed_starts_here(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = publish(here / "artifacts")
    file = configure(here / "project", "s3://from-file/p")
    monkeypatch.setenv("NXPIPE_STORE_URL", "file://artifacts")
    answer = nxpipe("store", "show", MODEL, "--config", str(file), "--json")
    assert json.loads(answer.out)["request_key"] == published.request_key


def test_without_any_word_the_store_is_a_folder_here(here: Path) -> None:
    assert store_url(None, Path("nxpipe.toml")) == f"file://{here}/.nxpipe/store"


def test_a_broken_file_is_told_unless_the_store_was_named(here: Path) -> None:
    (here / "nxpipe.toml").write_text("[store\n")
    assert nxpipe("store", "ls").code is CONFIGURATION
    assert nxpipe("store", "ls", "--store", "s").code is OK


def test_listing_a_folder_imports_neither_boto3_nor_torch(here: Path) -> None:
    publish(here / "s")
    code = (
        "import sys; from nxpipe.pipeline.cli.main import cli; from nxpipe.pipeline.util.console import Console; "
        f"cli.main(['store', 'ls', '--store', {str(here / 's')!r}, '--json'], obj=Console(), standalone_mode=False); "
        "print({'boto3', 'botocore', 'torch', 'transformers', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)) == 1
    assert done.stderr == "set()\n"
