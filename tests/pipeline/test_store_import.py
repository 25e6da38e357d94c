"""`nxpipe store import --runtime`: folders of serving runtimes become artifacts, or are refused in one sentence."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.artifact_store.fetch.folder import fetch
from nxpipe.artifact_store.maintenance.reachability import usage
from nxpipe.pipeline.artifacts import recipes
from nxpipe.pipeline.artifacts.contract import (
    MAX_CONTRACT_BYTES,
    FileTree,
    ServingContract,
    TreeFile,
    contract_of_folder,
    contracts_of,
)
from nxpipe.pipeline.artifacts.contract import RUNTIMES as OF_THE_CONTRACT
from nxpipe.pipeline.artifacts.payload import publish_draft
from nxpipe.pipeline.artifacts.recipes import ImportRequest, draft
from nxpipe.pipeline.cli.store.bundle import RUNTIMES as OF_THE_COMMAND
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.errors import ModelSourceError
from tests.artifact_store.samples import folder, put
from tests.conftest import ROOT
from tests.pipeline.in_process import InProcess, nxpipe
from tests.serving import standins
from tests.serving.standins import NEURON_FLAGS, PINS, RUNTIMES, Compiled, compiled

__all__ = ["nxpipe"]

Change = Callable[[Compiled], object]


@pytest.fixture
def nki(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = str(tmp_path / "var/tmp/nki-intermediate-cache")
    monkeypatch.setattr(recipes, "NKI_BINARIES", path)
    return path


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_folder_of_each_runtime_is_imported_signed_and_fetched(
    runtime: str, nki: str, nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = compiled(runtime, tmp_path / "built", nki_root=nki if runtime == "vllm-neuron" else "")
    assert nxpipe("store", "keygen", "release.key").code == 0
    answer = nxpipe("store", "import", *source.arguments(), "--store", "store", "--key", "file:release.key", "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert document["contract"]["runtime"] == runtime
    assert document["contract"]["pins"].items() >= source.pins.items()
    again = nxpipe("store", "import", *source.arguments(), "--store", "store", "--json")
    assert json.loads(again.out)["manifest_digest"] == document["manifest_digest"]
    for words in (("fetch", "acme/tiny", "--to", "served"), ("show", "acme/tiny"), ("fsck",)):
        assert nxpipe("store", *words, "--store", "store").code == 0
    checked = nxpipe("store", "verify-signature", "acme/tiny", "--public-key", "release.key.pub", "--store", "store")
    assert checked.code == 0, checked.err
    contract = contract_of_folder(tmp_path / "served")
    assert contract is not None
    assert contract.required
    assert all((tmp_path / "served/serving" / runtime / path).is_file() for path in contract.required)


def test_every_file_arrives_as_it_was_but_paths_of_the_machine_that_compiled(nki: str, tmp_path: Path) -> None:
    for runtime in RUNTIMES:
        source = compiled(runtime, tmp_path / runtime, nki_root=nki if runtime == "vllm-neuron" else "")
        drafted = draft(ImportRequest(**source.stated()))
        store = folder(tmp_path / f"{runtime}-store").store
        fetch(store.blobs, publish_draft(store, drafted).published.manifest, tmp_path / f"{runtime}-to")
        for tree in drafted.trees:
            for path, content in tree.files.items():
                fetched = (tmp_path / f"{runtime}-to/serving" / runtime / tree.name / path).read_bytes()
                assert fetched == (content if isinstance(content, bytes) else content.read_bytes())
                assert str(tmp_path / runtime).encode() not in fetched


def test_what_belongs_to_the_process_that_compiled_is_left_out(tmp_path: Path) -> None:
    drafted = draft(ImportRequest(**compiled("vllm-neuron", tmp_path).stated()))
    names = {path.rpartition("/")[2] for path in drafted.trees[0].files}
    assert {".compilation_complete", ".artifact_metadata_v0.json", "command.txt"} <= names
    assert not any(name.endswith(".lock") or name == ".cache_accessed" for name in names)


def test_checkpoints_of_other_frameworks_are_left_out(tmp_path: Path) -> None:
    source = compiled("vllm-neuron", tmp_path)
    assert source.model_files is not None
    for name in ("pytorch_model.bin", "original/consolidated.00.pth", ".cache/huggingface/download.lock"):
        path = source.model_files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("other")
    model = next(tree for tree in draft(ImportRequest(**source.stated())).trees if tree.name == "model")
    assert set(model.files) == {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


# Folders that are refused


def removed(*names: str) -> Change:
    def change(source: Compiled) -> None:
        for name in names:
            path = next(source.folder.rglob(name))
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def cut(name: str) -> Change:
    def change(source: Compiled) -> None:
        path = next(source.folder.rglob(name))
        path.write_bytes(path.read_bytes()[:-9])

    return change


def edited(name: str, **fields: object) -> Change:
    """Change fields of a JSON file; of its neuron_config if it has one. None removes a field."""

    def change(source: Compiled) -> None:
        path = next(source.folder.rglob(name))
        document = json.loads(path.read_text())
        inner = document.get("neuron_config", document)
        inner.update(fields)
        for field in [field for field, value in fields.items() if value is None]:
            del inner[field]
        path.write_text(json.dumps(document))

    return change


def linked(source: Compiled) -> None:
    path = next(source.folder.rglob("*.pt" if source.runtime != "vllm-neuron" else "graph.hlo"))
    path.rename(source.folder.parent / "elsewhere")
    path.symlink_to(source.folder.parent / "elsewhere")


def fifo(source: Compiled) -> None:
    os.mkfifo(min(path for path in source.folder.rglob("*") if path.is_file()).with_name("pipe"))


def renamed_graph(source: Compiled) -> None:
    path = next(source.folder.rglob("graph.hlo")).parent
    path.rename(path.with_name("0" * 32))


def names_kernels(source: Compiled) -> None:
    next(source.folder.rglob("graph.hlo")).write_bytes(b"\x12" + recipes.NKI_BINARIES.encode() + b"/attention.bin\x08")


def both(*changes: Change) -> Change:
    return lambda source: [change(source) for change in changes]


def without_model(*names: str) -> Change:
    def change(source: Compiled) -> None:
        assert source.model_files is not None
        for name in names:
            (source.model_files / name).unlink()

    return change


def fused(source: Compiled) -> None:
    path = source.folder / "neuron_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fused_spec_config": {"draft_model_path": "/tmp/d"}}))


def named(name: str) -> Change:
    return lambda source: (
        min(path for path in source.folder.rglob("*") if path.is_file()).with_name(name).write_text("1")
    )


REFUSED: list[tuple[str, Change, dict[str, Any], str]] = [
    ("vllm-nxdi", removed("neuron_config.json"), {}, r"neuron_config\.json: is missing; .* export"),
    ("vllm-nxdi", removed("model.pt"), {}, r"model\.pt: is missing; without it the server compiles"),
    ("vllm-nxdi", cut("model.pt"), {}, r"model\.pt: is no complete TorchScript archive"),
    (
        "vllm-nxdi",
        removed("tp1_sharded_checkpoint.safetensors"),
        {},
        r"tp1_sharded_checkpoint\.safetensors: is missing",
    ),
    ("vllm-nxdi", cut("tp0_sharded_checkpoint.safetensors"), {}, r"tp0_\S+: has \d+ bytes, and its header names \d+"),
    ("vllm-nxdi", edited("neuron_config.json", tp_degree=None), {}, "tp_degree is None"),
    ("vllm-nxdi", edited("neuron_config.json", seq_len="long"), {}, "seq_len is 'long'"),
    ("vllm-nxdi", without_model("config.json"), {}, r"config\.json: is missing"),
    ("vllm-nxdi", without_model("tokenizer.json"), {}, "no tokenizer"),
    ("vllm-nxdi", lambda _: None, {"model_files": None}, r"config\.json: is missing; .*--model-files"),
    (
        "vllm-nxdi",
        both(lambda source: standins.shard_on_load(source.folder), without_model("model.safetensors")),
        {},
        r"holds no \*\.safetensors",
    ),
    (
        "vllm-nxdi",
        both(
            edited("neuron_config.json", quantized_checkpoints_path="/home/ann/int8"),
            lambda source: standins.shard_on_load(source.folder),
        ),
        {},
        "quantized_checkpoints_path is /home/ann/int8 of the machine that compiled",
    ),
    ("vllm-nxdi", lambda _: None, {"flags": "--max-model-len 99"}, "leave out --serve-flags"),
    ("vllm-nxdi", lambda _: None, {"lnc": 2}, "logical cores of 1"),
    ("vllm-neuron", removed(".compilation_complete"), {}, r"\.compilation_complete: is missing; .*hidden files"),
    ("vllm-neuron", removed(".artifact_metadata_v0.json"), {}, r"\.artifact_metadata_v0\.json: is missing"),
    ("vllm-neuron", removed("graph.hlo"), {}, r"graph\.hlo: is missing"),
    ("vllm-neuron", removed("graph_*.neff"), {}, r"has 0 graph_\*\.neff"),
    ("vllm-neuron", cut("graph_*.neff"), {}, r"has \d+ bytes, and its marker says \d+"),
    ("vllm-neuron", edited(".artifact_metadata_v0.json", cache_key="f" * 32), {}, "do not rename folders"),
    ("vllm-neuron", renamed_graph, {}, "do not rename folders"),
    ("vllm-neuron", removed("compile_cache"), {}, "no compiled graph"),
    ("vllm-neuron", names_kernels, {}, r"attention\.bin\S*, which is not imported; .*--nki-binaries"),
    ("vllm-neuron", lambda _: None, {"model_files": None}, "--model-files"),
    ("vllm-neuron", without_model("model.safetensors"), {}, r"holds no \*\.safetensors"),
    (
        "vllm-neuron",
        lambda _: None,
        {"flags": NEURON_FLAGS.replace("--block-size 32", "")},
        "--block-size is not known",
    ),
    ("vllm-neuron", lambda _: None, {"flags": f"{NEURON_FLAGS} --port 8000"}, "--port is set by the fleet"),
    ("vllm-neuron", lambda _: None, {"flags": f"{NEURON_FLAGS} 'open"}, "quote them"),
    ("vllm-neuron", lambda _: None, {"target": "inf2"}, "compiled for trn2; pass --target trn2"),
    ("vllm-neuron", removed("command.txt"), {"target": "inf2"}, "trn2"),
    ("optimum", edited("neuron_config.json", neuronxcc_version=None), {}, "no neuronxcc_version"),
    ("optimum", edited("neuron_config.json", _serialized_key=None), {}, "no _serialized_key"),
    ("optimum", removed("model.pt"), {}, r"model\.pt: is missing"),
    ("optimum", removed("tp1_sharded_checkpoint.safetensors"), {}, r"tp1_\S+: is missing; the model has 2 shards"),
    ("optimum", removed("checkpoint"), {}, r"holds no \*\.safetensors"),
    ("optimum", removed("tokenizer.json"), {}, "no tokenizer"),
    ("optimum", lambda _: None, {"pins": {**PINS["optimum"], "neuronx-cc": "2.0"}}, r"compiled with neuronx-cc 2\.21"),
    ("torchscript", removed("model-32.pt", "model-128.pt"), {}, r"holds no \*\.pt"),
    ("torchscript", cut("model-128.pt"), {}, r"model-128\.pt: is no complete TorchScript archive"),
    ("torchscript", lambda _: None, {"target": None}, "does not state its target; pass --target"),
    ("torchscript", lambda _: None, {"target": "trn9"}, "pass --target"),
    ("torchscript", lambda _: None, {"pins": {"torch": "2.9.0"}}, "--pin torch-neuronx=VERSION"),
    ("torchscript", lambda _: None, {"pins": {"torch": ">=2"}}, "no exact version"),
    ("torchscript", lambda _: None, {"command": "serve ${tree}"}, "placeholder"),
    ("torchscript", named("notes\n.txt"), {}, "is not a plain relative path"),
    ("torchscript", both(named("Notes"), named("notes")), {}, "the same name on a file system that ignores case"),
    ("torchscript", lambda _: None, {"model_id": "../tiny"}, "is not a plain relative path"),
    (
        "vllm-nxdi",
        both(lambda source: standins.shard_on_load(source.folder), fused),
        {},
        "has a draft model, whose checkpoint is at a path of the machine that compiled",
    ),
    *((runtime, linked, {}, "is a link; replace links by their files") for runtime in RUNTIMES),
    *((runtime, fifo, {}, "is no regular file") for runtime in RUNTIMES),
]


@pytest.mark.parametrize(
    ("runtime", "change", "stated", "sentence"), REFUSED, ids=[str(n) for n in range(len(REFUSED))]
)
def test_a_folder_that_its_runtime_would_not_load_is_refused_in_one_sentence(
    runtime: str, change: Change, stated: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    source = compiled(runtime, tmp_path / "built")
    change(source)
    store = folder(tmp_path / "store").store
    with pytest.raises(ModelSourceError, match=sentence) as refused:
        publish_draft(store, draft(ImportRequest(**{**source.stated(), **stated})))
    assert "\n" not in str(refused.value)
    assert ";" in str(refused.value) or ":" in str(refused.value)
    assert not store.list()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
SETTINGS = st.sampled_from(
    [
        *(
            "tp_degree",
            "seq_len",
            "batch_size",
            "save_sharded_checkpoint",
            "logical_nc_config",
            "chunked_prefill_config",
        ),
        *("is_block_kv_layout", "pa_num_blocks", "pa_block_size", "quantized_checkpoints_path", "target"),
        *("max_batch_size", "sequence_length", "optimum_neuron_version", "neuronxcc_version"),
    ]
)


@given(st.sampled_from(["vllm-nxdi", "optimum"]), st.dictionaries(SETTINGS, JSON, max_size=3))
def test_settings_of_any_kind_are_understood_or_refused_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, runtime: str, settings: dict[str, Any]
) -> None:
    source = compiled(runtime, tmp_path_factory.mktemp("settings"))
    path = source.folder / "neuron_config.json"
    document = json.loads(path.read_text())
    document.get("neuron_config", document).update(settings)
    path.write_text(json.dumps(document))
    with suppress(ModelSourceError):
        drafted = draft(ImportRequest(**source.stated()))
        assert all(isinstance(word, str) for word in drafted.argv)
        assert drafted.tp >= 1


def test_the_command_refuses_with_the_exit_code_of_a_model_source(nxpipe: InProcess, tmp_path: Path) -> None:
    source = compiled("vllm-nxdi", tmp_path / "built")
    removed("model.pt")(source)
    answer = nxpipe("store", "import", *source.arguments(), "--store", str(tmp_path / "store"))
    assert answer.code == exit_codes.MODEL.number
    assert "model.pt: is missing" in answer.err


def test_options_of_folders_require_a_runtime(nxpipe: InProcess, tmp_path: Path) -> None:
    answer = nxpipe("store", "import", str(tmp_path), "--pin", "torch=2.9.0", "--store", str(tmp_path / "store"))
    assert answer.code == exit_codes.USAGE.number
    assert "--pin requires --runtime" in answer.err


def test_the_command_has_the_runtimes_of_the_contract() -> None:
    assert OF_THE_COMMAND == OF_THE_CONTRACT


# Sharing


def test_equal_weights_of_two_runtimes_are_stored_once(tmp_path: Path) -> None:
    store = folder(tmp_path / "store").store
    sizes = []
    for runtime in ("vllm-neuron", "vllm-nxdi"):
        source = compiled(runtime, tmp_path / runtime)
        if runtime == "vllm-nxdi":
            standins.shard_on_load(source.folder)
        publish_draft(store, draft(ImportRequest(**source.stated())))
        sizes.append(usage(store).stored)
    assert sizes[1] - sizes[0] < 64 * 1024  # of 128 KiB of weights, nothing again


@given(st.permutations(["a", "b", "c"]), st.integers(0, 8), st.booleans())
def test_a_safetensors_file_arrives_byte_for_byte_in_every_layout(
    tmp_path_factory: pytest.TempPathFactory, order: list[str], gap: int, known: bool
) -> None:
    """Also one that cannot be stored by tensor: with a gap, or of an unknown type."""
    root = tmp_path_factory.mktemp("layout")
    source = compiled("torchscript", root / "built")
    header, body = {}, b""
    for name in order:
        data = name.encode() * 70_000
        header[name] = {
            "dtype": "U8" if known else "F4",
            "shape": [len(data)],
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data + bytes(gap if name != order[-1] else 0)
    text = json.dumps(header).encode()
    file = source.folder / "head.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)
    store = folder(root / "store").store
    made = publish_draft(store, draft(ImportRequest(**source.stated()))).published.manifest
    assert bool(made.serving[0].shared) == (gap == 0 and known)
    fetch(store.blobs, made, root / "to")
    assert (root / "to/serving/torchscript/artifact/head.safetensors").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("command", ["run", "verify"])
def test_the_emulator_refuses_an_imported_artifact_with_what_serves_it(
    command: str, nxpipe: InProcess, tmp_path: Path
) -> None:
    source = compiled("optimum", tmp_path / "built")
    assert nxpipe("store", "import", *source.arguments(), "--store", str(tmp_path / "store")).code == 0
    answer = nxpipe(command, "acme/tiny", "--store", str(tmp_path / "store"))
    assert answer.code == exit_codes.COMPILE.number
    assert "was imported for optimum" in answer.err


# Artifacts of our own


def test_an_artifact_of_our_own_has_a_contract_with_our_server(tmp_path: Path) -> None:
    store = folder(tmp_path / "store").store
    made = store.publish(put(store)).manifest
    (contract,) = contracts_of(store, made)
    assert contract.argv[:2] == ("nxpipe", "serve")
    assert "${artifact_folder}" in contract.argv
    fetch(store.blobs, made, tmp_path / "to")
    assert contract_of_folder(tmp_path / "to") == contract


def test_a_fetched_artifact_of_our_own_is_published_with_pins(nxpipe: InProcess, tmp_path: Path) -> None:
    store = folder(tmp_path / "store").store
    made = store.publish(put(store)).manifest
    fetch(store.blobs, made, tmp_path / "to")
    words = ("store", "import", str(tmp_path / "to"), "--runtime", "nxpipe", "--store", str(tmp_path / "store"))
    answer = nxpipe(*words, "--pin", "driver=2.26.5.0", "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    found = store.find(document["request_key"])
    assert found is not None
    assert contracts_of(store, found.manifest)[0].pins == {"driver": "2.26.5.0"}
    assert found.manifest.executables == made.executables
    next((tmp_path / "to/executables").iterdir()).write_bytes(b"changed")
    refused = nxpipe(*words)
    assert refused.code == exit_codes.MODEL.number
    assert "is missing or changed" in refused.err


# The contract


def test_every_field_of_a_contract_is_on_its_page_and_no_other() -> None:
    page = (ROOT / "docs/reference/serving-contract.md").read_text()
    table = page.split("| Field |")[1].split("\n\n")[0]
    first = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert first == set(ServingContract.model_fields)
    assert f"at most {MAX_CONTRACT_BYTES} bytes" in page
    for kind in (FileTree, TreeFile):
        assert all(f"`{name}`" in table for name in kind.model_fields)
    assert all(f"`{runtime}`" in table for runtime in OF_THE_CONTRACT)


def test_a_contract_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = folder(tmp_path / "store").store
    contract = publish_draft(store, draft(ImportRequest(**compiled("vllm-nxdi", tmp_path / "built").stated()))).contract
    assert ServingContract.from_bytes(contract.to_bytes()) == contract


@pytest.mark.parametrize(
    "change",
    [
        {"argv": ("serve", "${unknown}")},
        {"proves": ("(",)},
        {"forbidden": ("NEURON_COMPILED_ARTIFACTS",)},
        {"environment": {"not a name": "1"}},
        {"runtime": "tgi"},
    ],
)
def test_a_contract_that_no_agent_could_fulfil_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    store = folder(tmp_path / "store").store
    contract = publish_draft(store, draft(ImportRequest(**compiled("vllm-nxdi", tmp_path / "built").stated()))).contract
    data = contract.model_copy(update=change)
    with pytest.raises(InvalidDocument):
        ServingContract.from_bytes(data.to_bytes())
