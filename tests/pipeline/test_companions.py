"""Files that travel with a model to its server: part of the artifact and its request key, and of no program."""

import json
import os
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.fetch.folder import fetch
from nxpipe.emulator.hardware import instance
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.source import Companions, resolve
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.weights import RandomWeights, WeightsSource
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.util.exit_codes import MODEL, OK
from tests.pipeline.conftest import BERT, write_model
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.predicted import name_of, publish
from tests.pipeline.test_build_again import ALLOWED, Steps, done, nobody
from tests.pipeline.walk import build

__all__ = ["nxpipe"]

pytestmark = pytest.mark.sample(4, "companions")

JSON = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("generation_config.json", "preprocessor_config.json", "processor_config.json", "chat_template.json"),
    "tekken.json",
)
OTHERS = (
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
)
FILES = {name: b'{ "of": "%s" }\n' % name.encode() for name in JSON} | dict.fromkeys(OTHERS, b"\xff\x00 any bytes\r\n")
NOT_COMPANIONS = (
    "README.md",
    "tokenizer.py",
    "modeling_bert.py",
    "pytorch_model.bin",
    "additional_chat_templates/x.py",
)
LABELS = {"0": "calm", "1": "storm"}


def add(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def specified(model: Path | str, weights: str = "random:0") -> ModelSpec:
    source = WeightsSource.parse(weights)
    return ModelSpec(str(model), None, None, "inf2.xlarge", 1, None, (1,), (8,), "none", "bf16", source)


def companions_of(model: Path | str, weights: str = "random:0") -> Companions:
    spec = specified(model, weights)
    return spec.companions(spec.look_up(weights=False))


def spec_of(folder: Path) -> BuildSpec:
    source, shapes = resolve(str(folder)), (Shape("forward", 1, 8),)
    return BuildSpec(source, RandomWeights(0), shapes, instance("inf2.xlarge"), companions=Companions((folder,)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def test_every_file_that_a_server_reads_is_known_by_its_digest_and_nothing_else_is(bert: Path) -> None:
    add(bert, FILES | dict.fromkeys(NOT_COMPANIONS, b"{}"))
    digests = {name: sha256(data).hexdigest() for name, data in FILES.items()}
    assert companions_of(bert).digests() == digests
    assert dict(companions_of(bert).contents()) == FILES
    assert spec_of(bert).key_inputs()["files"] == digests


def test_a_model_without_such_files_has_the_key_that_it_always_had(bert: Path) -> None:
    without = spec_of(bert)
    add(bert, dict.fromkeys(NOT_COMPANIONS, b""))
    assert "files" not in without.key_inputs()
    assert without.request_key == BuildSpec(without.source, without.weights, without.shapes, without.target).request_key


@given(st.dictionaries(st.sampled_from(sorted(FILES)), st.binary(max_size=20), min_size=1))
def test_each_byte_of_a_file_flips_the_artifacts_key_and_no_key_of_a_program(files: dict[str, bytes]) -> None:
    with TemporaryDirectory() as name:
        folder = write_model(Path(name) / "m", dict(BERT))
        spec = spec_of(folder)
        keys = [(spec.request_key, spec.cell_keys(spec.shapes[0]))]
        for path, data in files.items():
            for content in (data, data + b"\0"):
                add(folder, {path: content})
                keys.append((spec.request_key, spec.cell_keys(spec.shapes[0])))
    assert len({request for request, _ in keys}) == len(keys)
    assert len({cells for _, cells in keys}) == 1


def test_the_files_are_the_models_own_or_else_those_beside_its_weights(tmp_path: Path, bert: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    add(weights, {"vocab.txt": b"beside the weights"})
    assert dict(companions_of(bert, str(weights)).contents()) == {"vocab.txt": b"beside the weights"}
    assert dict(companions_of("bert-base-uncased", str(weights)).contents()) == {"vocab.txt": b"beside the weights"}
    add(bert, {"tokenizer.json": b"{}"})
    assert dict(companions_of(bert, str(weights)).contents()) == {"tokenizer.json": b"{}"}
    assert companions_of("bert-base-uncased").digests() == {}


def test_what_the_hubs_cache_happens_to_have_is_no_part_of_a_model_with_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = add(write_model(tmp_path / "snapshot", dict(BERT)), {"tokenizer.json": b"{}", "model.safetensors": b""})
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    assert companions_of("acme/tiny").digests() == {}
    assert list(companions_of("acme/tiny", "hub").digests()) == ["tokenizer.json"]


def test_a_snapshot_of_weights_alone_is_completed_if_the_hub_is_reachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = add(write_model(tmp_path / "snapshot", dict(BERT)), {"model.safetensors": b""})
    is_reachable = False

    def snapshot_download(*_: object, local_files_only: bool, **more: object) -> str:
        if not local_files_only:
            if not is_reachable:
                raise ConnectionError
            add(snapshot, {"tokenizer.json": b"{}"})
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("acme/tiny", files=True).folder == snapshot
    assert companions_of("acme/tiny", "hub").digests() == {}
    is_reachable = True
    resolve("acme/tiny", files=True)
    assert list(companions_of("acme/tiny", "hub").digests()) == ["tokenizer.json"]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("generation_config.json", b"[1]", "generation_config.json: not a JSON object; save the file again"),
        ("tokenizer_config.json", b'"gpt2"', "tokenizer_config.json: not a JSON object; save the file again"),
        ("tokenizer.json", b"{", "tokenizer.json: not valid JSON"),
        ("vocab.json", b"[" * 200 + b"]" * 200, "vocab.json: JSON nested deeper than the limit"),
        ("processor_config.json", b"\xff{}", "processor_config.json: not valid JSON"),
        ("additional_chat_templates/a b.jinja", b"", "has characters other than A-Z"),
        ("additional_chat_templates/.jinja", b"", "has characters other than A-Z"),
    ],
)
def test_a_malformed_file_is_refused_in_a_sentence_before_any_work(
    name: str, content: bytes, complaint: str, bert: Path, tmp_path: Path, nxpipe: InProcess
) -> None:
    add(bert, {name: content})
    words = ("--model-id", str(bert), "--weights", "random:0", "--buckets", "8", "--store", str(tmp_path / "store"))
    answer = nxpipe("build", *words, "--dry-run")
    assert answer.code == MODEL.number
    assert complaint in answer.out + answer.err
    with pytest.raises(ModelSourceError, match=r"; (save the file again, or remove it|rename it)$"):
        Companions((bert,)).check()


def test_no_file_but_a_regular_one_of_limited_size_is_read(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(bert / "tokenizer.json")
    with pytest.raises(ModelSourceError, match=r"tokenizer.json: cannot be read \(Not a regular file\)"):
        Companions((bert,)).digests()
    (bert / "tokenizer.json").unlink()
    (bert / "tokenizer.json").symlink_to("gone.json")
    with pytest.raises(ModelSourceError, match=r"tokenizer.json: cannot be read \(No such file or directory\)"):
        Companions((bert,)).digests()
    (bert / "tokenizer.json").unlink()
    with (bert / "tokenizer.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ModelSourceError, match=r"tokenizer.json: has 67,108,865 bytes; the limit is 67,108,864"):
        Companions((bert,)).digests()


def test_templates_are_few_and_their_names_differ_on_every_file_system(bert: Path) -> None:
    add(bert, {"additional_chat_templates/Tools.jinja": b"", "additional_chat_templates/tools.jinja": b""})
    with pytest.raises(ModelSourceError, match=r"Tools.jinja and tools.jinja differ in case only; rename one"):
        Companions((bert,)).digests()
    add(bert, {f"additional_chat_templates/{number}.jinja": b"" for number in range(63)})
    with pytest.raises(ModelSourceError, match="holds 65 templates; the limit is 64"):
        Companions((bert,)).digests()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store]:
    """The folder of a model with all companion files, and a store that has its artifact."""
    here = tmp_path_factory.mktemp("companions")
    folder = add(write_model(here / "tiny-bert", BERT | {"id2label": LABELS}), FILES)
    store, steps = open_store(str(here / "store")), Steps()
    build(spec_of(folder), store, steps, nobody, thresholds=ALLOWED)
    assert done(steps) == ["compile", "emit", "emulate"]
    return folder, store


def test_a_new_tokenizer_gives_a_new_artifact_without_a_compile(published: tuple[Path, Store]) -> None:
    folder, store = published
    before = store.resolve(spec_of(folder).request_key)
    add(folder, {"tokenizer.json": b'{"new": true}'})
    steps = Steps()
    build(spec_of(folder), store, steps, nobody, thresholds=ALLOWED)
    after = store.resolve(spec_of(folder).request_key)
    assert done(steps) == []
    assert before.request_key != after.request_key
    assert before.manifest.executables == after.manifest.executables
    assert before.manifest.weights == after.manifest.weights
    assert store.evidence(after.manifest_digest)


def test_a_fetched_folder_holds_the_files_of_the_models_folder_byte_for_byte(
    published: tuple[Path, Store], tmp_path: Path
) -> None:
    folder, store = published
    fetch(store.blobs, store.resolve(spec_of(folder).request_key).manifest, tmp_path / "fetched")
    for name in FILES:
        assert (tmp_path / "fetched" / "files" / name).read_bytes() == (folder / name).read_bytes(), name
    assert json.loads((tmp_path / "fetched" / "files" / "config.json").read_text())["id2label"] == LABELS


def test_a_file_that_changes_while_it_is_published_is_an_error(
    published: tuple[Path, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = published
    add(folder, {"merges.txt": b"a b\n"})
    monkeypatch.setattr(Companions, "contents", lambda _: iter([("merges.txt", b"b a\n")]))
    with pytest.raises(ModelSourceError, match="changed while it was published; build again"):
        build(spec_of(folder), store, Steps(), nobody, thresholds=ALLOWED)
    assert store.find(spec_of(folder).request_key) is None
    add(folder, {"merges.txt": FILES["merges.txt"]})


def test_a_changed_tokenizer_is_named_as_the_reason_of_a_cache_miss(
    bert: Path, tmp_path: Path, store: Store, nxpipe: InProcess
) -> None:
    add(bert, {"tokenizer.json": b"{}", "merges.txt": b"a b\n"})
    words = ("--model-id", str(bert), "--weights", "random:0", "--buckets", "8", "--store", str(tmp_path / "store"))
    spec = BuildSpec.of(specified(bert))
    spec = BuildSpec(
        spec.source, spec.weights, spec.shapes, spec.target, autocast="matmult", companions=spec.companions
    )
    old = publish(store, "old", {8: 1.0}, inputs=spec.key_inputs())
    assert nxpipe("explain", *words).out.startswith(f"tiny-bert@{old.request_key[:12]} is in ")
    add(bert, {"tokenizer.json": b'{"new": true}'})
    new = publish(store, "old", {8: 1.0}, inputs=spec.key_inputs(), model="acme/new")

    answer = nxpipe("diff", name_of(old), name_of(new), "--store", str(tmp_path / "store"))
    assert answer.code == OK.number, answer.err
    assert 'files."tokenizer.json"' in answer.out
    assert "merges.txt" not in answer.out
    add(bert, {"tokenizer.json": b'{"newer": true}'})
    (found,) = json.loads(nxpipe("explain", *words, "--json").out)
    assert [difference["field"] for difference in found["nearest"][0]["differences"]] == ['files."tokenizer.json"']
    assert all(program["nearest"]["differences"] == [] for program in found["programs"])
