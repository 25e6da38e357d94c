"""The stored program and graph of each shape, and their uses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.manifest import Executable as Stored
from nxpipe.artifact_store.manifest import File, Manifest
from nxpipe.emulator.executable.executable import Executable, from_bytes, to_bytes
from nxpipe.emulator.ir.decoding import decode
from nxpipe.emulator.isa.program import Loop, Role, Step
from nxpipe.emulator.isa.vector import TensorTensor
from nxpipe.emulator.lower import LOWERINGS
from nxpipe.emulator.ops import LayerNorm
from nxpipe.pipeline.verify.stored_artifact import read_instructions
from tests.pipeline.conftest import BERT, LLAMA, write_model
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.test_build import built, words

pytestmark = pytest.mark.sample(12)

__all__ = ["nxpipe"]

TWO_BUCKETS = ("--buckets", "16,32", "--no-verify")


@pytest.fixture(scope="module")
def two_buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store that has a small BERT of two programs."""
    folder = tmp_path_factory.mktemp("built")
    built(folder, write_model(folder / "models" / "tiny-bert", dict(BERT)), *TWO_BUCKETS)
    return folder


def opened(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store")


def program_of(store: Store, stored: Stored) -> Executable:
    return from_bytes(store.read_blob(stored.blob))


def path_of(stored: Stored) -> str:
    return f"graphs/{stored.name}"


def elsewhere(store: Store, tmp_path: Path, change: Callable[[Store, Manifest], Manifest]) -> str:
    """Another store, with a changed copy of the only artifact."""
    other = open_store(f"file://{tmp_path}/other")
    (published,) = store.list()
    for blob in published.manifest.blobs():
        other.put_blob(store.read_blob(blob))
    other.publish(change(other, published.manifest))
    return f"file://{tmp_path}/other"


def with_code(manifest: Manifest, *codes: Blob) -> Manifest:
    changed = (
        executable.model_copy(update={"blob": code})
        for executable, code in zip(manifest.executables, codes, strict=True)
    )
    return manifest.model_copy(update={"executables": tuple(changed)})


@pytest.mark.parametrize("degree", [1, 2])
def test_each_shape_is_stored_as_a_program_for_the_target_s_cores_beside_its_graph(
    degree: int, tmp_path: Path, llama: Path
) -> None:
    found = built(
        tmp_path, llama, *TWO_BUCKETS, *("--tp", str(degree)), *("--target", "trn2.48xlarge", "--phases", "prefill")
    )
    store = opened(tmp_path)
    manifest = store.resolve(str(found["request_key"])).manifest
    files = {file.path: file.blob for file in manifest.files}
    for stored in manifest.executables:
        executable = program_of(store, stored)
        graph = decode(store.read_blob(files[path_of(stored)]))
        assert (executable.program.core, executable.program.ranks) == ("v3", degree)
        assert graph.key == stored.graph_key
        assert executable.of_role(Role.INPUT).keys() | executable.of_role(Role.STATE).keys() == graph.inputs.keys()
        assert executable.absent_constants == ()
        assert bool(executable.pieces(Role.STATE)) == bool(executable.pieces(Role.PARAMETER)) == (degree > 1)


def test_how_each_program_uses_the_cores_is_told_by_the_build_by_the_next_one_and_by_show(
    tmp_path: Path, bert: Path, nxpipe: InProcess
) -> None:
    first, second = (built(tmp_path, bert, "--no-verify") for _ in range(2))
    assert (first["cache"], second["cache"]) == ("miss", "hit")
    assert first["utilisation"] == second["utilisation"]
    store = opened(tmp_path)
    (stored,) = store.resolve(str(first["request_key"])).manifest.executables
    utilisation = first["utilisation"]
    assert isinstance(utilisation, dict)
    assert utilisation[stored.name]["instructions"]["static"] == program_of(store, stored).counts.instructions
    again = nxpipe(*words(tmp_path, bert, "--no-verify"))
    (row,) = (line for line in again.out.splitlines() if line.startswith(stored.name))
    figures = utilisation[stored.name]
    assert f"{figures['hbm']['ratio']:.2f} x" in row
    assert f"{figures['this_program']['ms']:.2f} ms" in row
    shown = nxpipe("store", "show", "tiny-bert", "--store", f"file://{tmp_path}/store")
    assert row in shown.out.splitlines()


def first_sum_turned(body: tuple[Step, ...]) -> tuple[Step, ...]:
    """The body with one sum changed into a difference: legal, and wrong."""
    for number, step in enumerate(body):
        changed = step
        if isinstance(step, Loop):
            changed = replace(step, body=first_sum_turned(step.body))
        elif isinstance(step, TensorTensor) and step.op == "add":
            changed = replace(step, op=type(step.op)("subtract"))
        if changed != step:
            return (*body[:number], changed, *body[number + 1 :])
    return body


def test_it_is_the_stored_program_that_runs_and_not_another_made_of_its_graph(
    tmp_path: Path, bert: Path, nxpipe: InProcess
) -> None:
    built(tmp_path, bert)

    def spoil(store: Store, manifest: Manifest) -> Manifest:
        whole = program_of(store, manifest.executables[0])
        wrong = replace(whole.program, body=first_sum_turned(whole.program.body))
        assert wrong != whole.program
        return with_code(manifest, store.put_blob(to_bytes(replace(whole, program=wrong))))

    other = elsewhere(opened(tmp_path), tmp_path, spoil)
    assert nxpipe("verify", "tiny-bert", "--store", f"file://{tmp_path}/store", "--mode", "isa").code == 0
    assert nxpipe("verify", "tiny-bert", "--store", other).code == 0
    answer = nxpipe("verify", "tiny-bert", "--store", other, "--mode", "isa")
    assert answer.code == 12, answer.err
    assert "verification failed: " in answer.err


def swapped(store: Store, manifest: Manifest) -> Manifest:
    return with_code(manifest, *(executable.blob for executable in reversed(manifest.executables)))


def for_other_cores(store: Store, manifest: Manifest) -> Manifest:
    programs = [program_of(store, executable) for executable in manifest.executables]
    moved = [replace(program, program=replace(program.program, core="v3")) for program in programs]
    return with_code(manifest, *(store.put_blob(to_bytes(entry)) for entry in moved))


def reading_another_weight(store: Store, manifest: Manifest) -> Manifest:
    def renamed(whole: Executable) -> Executable:
        buffers = [
            replace(it, names=tuple(f"{name}.old" for name in it.names)) if it.role is Role.PARAMETER else it
            for it in whole.program.buffers
        ]
        return replace(whole, program=replace(whole.program, buffers=tuple(buffers)))

    programs = [renamed(program_of(store, executable)) for executable in manifest.executables]
    return with_code(manifest, *(store.put_blob(to_bytes(program)) for program in programs))


def of_an_older_nxpipe(store: Store, manifest: Manifest) -> Manifest:
    files = {file.path: file.blob for file in manifest.files}
    without = tuple(file for file in manifest.files if not file.path.startswith("graphs/"))
    as_it_was = with_code(manifest, *(files[path_of(executable)] for executable in manifest.executables))
    return as_it_was.model_copy(update={"files": without})


def cut_off(store: Store, manifest: Manifest) -> Manifest:
    return with_code(
        manifest, *(store.put_blob(store.read_blob(executable.blob)[:-1]) for executable in manifest.executables)
    )


def with_another_graph(store: Store, manifest: Manifest) -> Manifest:
    graphs = {path_of(value): path_of(other) for value, other in zip(*[manifest.executables] * 2, strict=True)}
    blobs = {file.path: file.blob for file in manifest.files}
    turned = dict(zip(graphs, reversed(graphs), strict=True))
    files = tuple(File(path=path, blob=blobs[turned.get(path, path)]) for path in blobs)
    return manifest.model_copy(update={"files": files})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (swapped, "its program was not compiled from its graph"),
        (for_other_cores, "its program is for 1 rank of NeuronCore-v3, its manifest for 1 rank of NeuronCore-v2"),
        (reading_another_weight, ".old'"),
        (of_an_older_nxpipe, "built by an older nxpipe, which stored no program of instructions"),
        (cut_off, "the executable is invalid at byte"),
        (with_another_graph, "its graph has key"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_program_that_is_not_what_its_artifact_says_is_refused(
    change: Callable[[Store, Manifest], Manifest], sentence: str, two_buckets: Path, tmp_path: Path, nxpipe: InProcess
) -> None:
    other = elsewhere(opened(two_buckets), tmp_path, change)
    for command in (("verify", "--mode", "isa"), ("run", "--mode", "isa"), ("run",)):
        answer = nxpipe(command[0], "tiny-bert", "--store", other, *command[1:])
        assert answer.code == 14, answer.err
        assert sentence in answer.err
        assert "build the model again" in answer.err


def test_a_large_table_is_stored_beside_the_programs_that_read_it(tmp_path: Path, nxpipe: InProcess) -> None:
    """Cosines and sines of 512 positions, for one row and for two."""
    long = {**LLAMA, "hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 512}
    model = write_model(tmp_path / "models" / "long", long)
    built(tmp_path, model, "--buckets", "512", "--batches", "1,2", "--phases", "prefill", "--no-verify")
    store = opened(tmp_path)
    manifest = store.resolve("long").manifest
    beside = {file.path.removeprefix("constants/"): file for file in manifest.files if file.path[:10] == "constants/"}
    reads = [set(program_of(store, stored).absent_constants) for stored in manifest.executables]
    assert reads[0]
    assert set.union(*reads) == beside.keys() == {file.blob.sha256 for file in beside.values()}
    assert all(file.blob.size >= 1 << 16 for file in beside.values())
    for stored in manifest.executables:
        assert not read_instructions(manifest, stored, store).absent_constants

    def without(_: Store, manifest: Manifest) -> Manifest:
        kept = tuple(file for file in manifest.files if file not in beside.values())
        return manifest.model_copy(update={"files": kept})

    answer = nxpipe("dis", "long", "--store", elsewhere(store, tmp_path, without), "--program", stored.name)
    assert answer.code == 14, answer.err
    assert "is not stored with it; build the model again" in answer.err


def test_an_operator_without_instructions_fails_the_build_and_is_remembered(
    tmp_path: Path, bert: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[Any, Any] = LOWERINGS
    monkeypatch.delitem(known, LayerNorm)
    first, second = (nxpipe(*words(tmp_path, bert)) for _ in range(2))
    for answer in (first, second):
        assert (answer.code, answer.out) == (11, "")
        assert "cannot lower layer_norm at " in answer.err
    assert "known failure" in second.err
    assert opened(tmp_path).list() == []


def test_what_does_not_fit_the_cores_is_said_before_a_weight_is_loaded(tmp_path: Path, nxpipe: InProcess) -> None:
    wide = {**LLAMA, "vocab_size": 600_000, "hidden_size": 8192, "num_hidden_layers": 1, "num_attention_heads": 64}
    model = write_model(tmp_path / "models" / "wide", wide)
    for remembered in (False, True):
        answer = nxpipe(*words(tmp_path, model, "--phases", "prefill"))
        assert (answer.code, answer.out) == (13, ""), answer.err
        assert "wide prefill-b1-s32" in answer.err
        assert ("known failure" in answer.err) == remembered


def test_a_program_of_the_store_is_read_as_text_and_one_of_several_has_to_be_named(
    two_buckets: Path, tmp_path: Path, nxpipe: InProcess
) -> None:
    store = opened(two_buckets)
    (stored, _) = store.resolve("tiny-bert").manifest.executables
    file = tmp_path / "program.nxe"
    store.copy_blob_to(stored.blob, file)
    where = ("--store", f"file://{two_buckets}/store")
    by_name = nxpipe("dis", "tiny-bert", "--program", stored.name, *where)
    assert by_name.code == 0, by_name.err
    assert by_name.out == nxpipe("dis", str(file)).out
    for more, complaint in [
        ((), "tiny-bert has forward-b1-s16, forward-b1-s32; select one with --program"),
        (("--program", "forward-b1-s23"), "did you mean 'forward-b1-s32'?"),
    ]:
        answer = nxpipe("dis", "tiny-bert", *more, *where)
        assert answer.code == 2
        assert complaint in answer.err
    assert nxpipe("dis", str(file), "--program", stored.name).code == 2
    assert nxpipe("dis", "no-such-model", *where).code == 21


def test_the_order_of_the_engines_changes_no_answer(tmp_path: Path, llama: Path, nxpipe: InProcess) -> None:
    built(tmp_path, llama, "--tp", "2", "--buckets", "8", "--phases", "prefill")
    where = ("tiny-llama", "--store", f"file://{tmp_path}/store")
    answers: list[Any] = []
    for order in ("program", "hostile", "random:1", "random:2"):
        answer = nxpipe("run", *where, "--mode", "isa", "--engine-order", order, "--json", "-q")
        assert answer.code == 0, answer.err
        answers.append(json.loads(answer.out))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("command", ["run", "verify"])
@pytest.mark.parametrize(
    ("words_", "complaint"),
    [
        (("--mode", "isa", "--engine-order", "backwards"), "'backwards' is not program, hostile or random:SEED"),
        (("--mode", "isa", "--engine-order", "random:x"), "as in random:7"),
        (("--engine-order", "program"), "requires --mode isa"),
    ],
)
def test_an_order_that_says_nothing_is_refused(
    command: str, words_: tuple[str, ...], complaint: str, bert: Path, nxpipe: InProcess
) -> None:
    answer = nxpipe(command, "--model-id", str(bert), "--weights", "random:0", *words_)
    assert (answer.code, answer.out) == (2, "")
    assert complaint in answer.err
