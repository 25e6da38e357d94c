import json
from fnmatch import fnmatch
from pathlib import Path

import pytest

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.pipeline.models.configuration import task_of
from nxpipe.pipeline.models.source import resolve
from nxpipe.pipeline.util.errors import ModelSourceError
from tests.pipeline.conftest import BERT, write_model


def test_a_folder_is_known_by_its_name_and_configuration(bert: Path) -> None:
    source = resolve(str(bert))
    assert (source.id, source.task, source.dtype) == ("tiny-bert", "feature-extraction", "float32")
    assert source.config["hidden_size"] == 32


def test_a_well_known_public_model_needs_no_network() -> None:
    source = resolve("bert-base-uncased")
    assert source.config["model_type"] == "bert"
    assert source.folder is None


def test_an_alias_of_a_well_known_model_is_that_model() -> None:
    assert resolve("google-bert/bert-base-uncased").config == resolve("bert-base-uncased").config


def test_an_unknown_id_offline_says_what_to_pass_instead() -> None:
    with pytest.raises(ModelSourceError, match=r"'bert-base-uncasd'.*pass a folder.*did you mean .*bert-base-uncased"):
        resolve("bert-base-uncasd")


def test_hub_weights_offline_say_what_to_pass_instead() -> None:
    with pytest.raises(ModelSourceError, match=r"weights of 'bert-base-uncased'.*--weights random:0"):
        resolve("bert-base-uncased", files=True)


def test_notes_of_where_a_file_came_from_are_not_relevant(tmp_path: Path) -> None:
    plain = resolve(str(write_model(tmp_path / "a", dict(BERT))))
    noted = resolve(
        str(write_model(tmp_path / "b", {**BERT, "_name_or_path": "/home/me", "transformers_version": "4.1"}))
    )
    assert plain.relevant_config() == noted.relevant_config()


BROKEN = [
    (None, "holds no config.json"),
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"\xff\xfe", "not valid JSON"),
    (b"[" * 100_000, "JSON nested deeper than the limit"),
    (b"[]", 'no "model_type"'),
    (b"{}", 'no "model_type"'),
    (b'{"model_type": 3}', 'no "model_type"'),
    (b" " * (5 << 20), "more than 4,194,304 bytes"),
]


@pytest.mark.parametrize(("content", "sentence"), BROKEN)
def test_a_broken_folder_is_refused_in_a_sentence(content: bytes | None, sentence: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelSourceError, match=sentence):
        resolve(str(tmp_path))


@pytest.mark.parametrize("text", ["", "a b", "a/b/c/d", "-x", "a/", "ä", "a" * 10 + "\0"])
def test_what_is_neither_a_folder_nor_an_id_is_refused(text: str) -> None:
    with pytest.raises(ModelSourceError):
        resolve(text)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForMaskedLM", "fill-mask"),
        ("LlamaForCausalLM", "text-generation"),
        ("GPT2LMHeadModel", "text-generation"),
        ("BertForSequenceClassification", "text-classification"),
        ("BertForTokenClassification", "token-classification"),
        ("RobertaForQuestionAnswering", "question-answering"),
        ("DetrForObjectDetection", "object-detection"),
        ("SpeechT5ForSpeechToText", "automatic-speech-recognition"),
        ("T5ForConditionalGeneration", "text2text-generation"),
        ("BertModel", "feature-extraction"),
    ],
)
def test_the_task_follows_the_class_that_the_configuration_names(architecture: str, task: str) -> None:
    assert task_of({"architectures": [architecture]}) == task


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"architectures": ["WhisperForConditionalGeneration"], "num_mel_bins": 80}, "automatic-speech-recognition"),
        (
            {"architectures": ["Wav2Vec2ForSequenceClassification"], "feat_extract_norm": "group"},
            "audio-classification",
        ),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, "feature-extraction"),
        ({"architectures": ["XForConditionalGeneration"], "is_encoder_decoder": False}, "feature-extraction"),
    ],
)
def test_a_class_that_stands_for_several_tasks_has_the_one_of_what_it_reads(
    config: dict[str, object], task: str
) -> None:
    assert task_of(config) == task


@pytest.mark.parametrize("spelling", ["Infinity", '{"__float__": "Infinity"}'])
def test_infinity_in_a_configuration_is_a_number_to_the_model_and_json_in_a_key(spelling: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "mamba2", "limits": [0.0, [{spelling}, -Infinity]]}}')
    source = resolve(str(tmp_path))
    assert source.config["limits"] == [0.0, [float("inf"), float("-inf")]]
    spelled = [0.0, [{"__float__": "Infinity"}, {"__float__": "-Infinity"}]]
    assert source.relevant_config()["limits"] == spelled
    assert canonical_json(source.relevant_config())


def test_a_configuration_that_names_no_class_is_the_bare_model() -> None:
    assert task_of(json.loads("{}")) == "feature-extraction"


def test_a_pipeline_of_several_models_is_answered_with_its_folders(tmp_path: Path) -> None:
    for name in ("unet", "vae"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ModelSourceError, match="pass one of its folders unet, vae"):
        resolve(str(tmp_path))
    assert resolve(str(tmp_path / "vae")).task == "image-decoding"


def test_a_model_in_a_folder_of_a_hub_repository_is_named_by_that_folder() -> None:
    assert resolve("stable-diffusion-v1-5/stable-diffusion-v1-5/unet").task == "image-denoising"
    assert resolve("runwayml/stable-diffusion-v1-5/vae").config["_class_name"] == "AutoencoderKL"


def test_a_configuration_that_may_not_be_read_is_one_sentence(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *, limit: int) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("nxpipe.pipeline.models.source.read_file", refused)  # the superuser may read everything
    with pytest.raises(ModelSourceError, match=r"config.json: cannot be read \(Permission denied\); correct its"):
        resolve(str(bert))


def test_a_snapshot_of_the_hub_comes_with_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub has more than a build needs; what is fetched is chosen by name."""
    offered = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "model.bin"]
    fetched: list[str] = []

    def snapshot_download(_: str, *, allow_patterns: list[str], local_files_only: bool, **more: object) -> str:
        if local_files_only:
            raise FileNotFoundError
        fetched.extend(name for name in offered if any(fnmatch(name, pattern) for pattern in allow_patterns))
        write_model(tmp_path / "snapshot", dict(BERT))
        (tmp_path / "snapshot" / "model.safetensors").touch()
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("acme/tiny", files=True).folder == tmp_path / "snapshot"
    assert fetched == offered[:-1]
