"""`nxpipe cache`: complete, verbatim entries in a compile cache, without effect on its other users."""

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.backends.protocol import Backend, ignore_progress
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.channel.generation import Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.manifest import Executable, File, Manifest, ModelRef
from nxpipe.pipeline.artifacts.neuron_cache import (
    EntryState,
    ExportedEntry,
    ExportResult,
    entries_in,
    entries_of,
    export_entries,
    remove_abandoned_files,
)
from nxpipe.pipeline.util.errors import ProgramInvalid
from tests.artifact_store.afar import first_generation
from tests.artifact_store.samples import Place, bucket, folder, s3_server, watched
from tests.artifact_store.test_crashes import in_child, kill_at_step
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

FOLDER = "neuronxcc-2.27.5334.0+0acef03a/MODULE_56f0d314fda2b6e1e336+617f6939"
OTHER = "neuronxcc-2.27.5334.0+0acef03a/MODULE_10043026988640143225+d41d8cd9"
FILES = {
    "compile_flags.json": b'["--target", "inf2"]',
    "model.hlo_module.pb": b"module" * 50,
    "model.neff": b"neff" * 1000,
    "model.done": b"",
}
ENTRY = {FOLDER: FILES}
MODEL = "acme/tiny-bert"


def made(
    store: Store,
    entries: Mapping[str, Mapping[str, bytes]] = ENTRY,
    *,
    programs: Sequence[str] = ("forward-b1-s128",),
    backend: str = "neuronx",
    model: str = MODEL,
) -> Manifest:
    """A published artifact; the entries are its first program's."""
    files = {
        f"neuron-cache/{programs[0]}/{where}/{name}": data
        for where, entry in entries.items()
        for name, data in entry.items()
    }
    manifest = Manifest(
        model=ModelRef(id=model, revision=None, task="fill-mask"),
        target="inf2",
        backend=backend,
        key_inputs=store.put_blob(canonical_json({"asked": [model, backend, sorted(files), *programs]})),
        executables=tuple(
            Executable(
                name=name,
                phase="forward",
                batch=1,
                sequence=number,
                tensor_parallel=1,
                graph_key=sha256_hex(name.encode()),
                outputs=("logits",),
                blob=store.put_blob(FILES["model.neff"]),
            )
            for number, name in enumerate(programs, 1)
        ),
        weights=(),
        files=tuple(File(path=path, blob=store.put_blob(data)) for path, data in files.items()),
    )
    return store.publish(manifest).manifest


def carry_out(store: Store, manifest: Manifest, cache: Backend) -> list[ExportedEntry]:
    return list(export_entries(store.blobs, entries_of(manifest), cache, ignore_progress))


def outcomes(exported: Sequence[ExportedEntry]) -> list[ExportResult]:
    return [entry.result for entry in exported]


def cached(place: Place) -> dict[str, bytes]:
    """The entries that readers of a cache see."""
    return {path: data for path, data in place.objects().items() if not path.startswith("tmp/")}


def inside(entries: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    return {f"{where}/{name}": data for where, entry in entries.items() for name, data in entry.items()}


def write(place: Place, files: Mapping[str, bytes], where: str = FOLDER) -> None:
    for name, data in files.items():
        assert place.backend.create(f"{where}/{name}", place.backend.hashed(data))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return folder(tmp_path / "store").store


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture(params=["folder", "s3"])
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "folder":
        return folder(tmp_path / "cache")
    for name, value in request.getfixturevalue("server").items():
        monkeypatch.setenv(name, value)
    return bucket(f"test-{secrets.token_hex(8)}", "caches/neuron+x/")


def test_a_cache_gets_each_entry_to_the_byte_and_a_repetition_writes_nothing(store: Store, cache: Place) -> None:
    entries = {FOLDER: FILES, OTHER: {**FILES, "wrapped_neff.hlo": b"wrapped"}}
    manifest = made(store, entries)
    assert outcomes(carry_out(store, manifest, cache.backend)) == [ExportResult.WRITTEN, ExportResult.WRITTEN]
    assert cached(cache) == inside(entries)
    written: list[str] = []
    backend = watched(cache.backend, lambda _, path: written.append(path))
    assert outcomes(carry_out(store, manifest, backend)) == [ExportResult.THERE, ExportResult.THERE]
    assert written == []


def test_the_neff_is_written_first_and_done_last_each_safe_before_the_next(store: Store, cache: Place) -> None:
    steps: list[tuple[str, str]] = []
    carry_out(store, made(store), watched(cache.backend, lambda what, path: steps.append((what, Path(path).name))))
    names = ["model.neff", "compile_flags.json", "model.hlo_module.pb", "model.done"]
    assert steps == [("create durably", name) for name in names]


def test_progress_tells_every_byte_once(store: Store, cache: Place) -> None:
    for _ in range(2):
        result: list[int] = []
        entries = entries_of(made(store))
        list(export_entries(store.blobs, entries, cache.backend, result.append))
        assert sum(result) == entries[0].size


def test_an_export_cut_short_before_any_write_is_finished_by_the_next(store: Store, cache: Place) -> None:
    """As Ctrl-C does it, on both kinds of cache."""
    manifest = made(store)
    for after in range(len(FILES)):
        writes = iter(range(after))

        def stop(_: str, __: str, writes: Iterator[int] = writes) -> None:
            if next(writes, None) is None:
                raise KeyboardInterrupt

        try:
            carry_out(store, manifest, watched(cache.backend, stop))
        except KeyboardInterrupt:
            assert_nothing_half_visible(cached(cache))
        else:
            break
    assert after == 3  # each attempt has added as many files as it was let: 0, 1, 2 and the last
    assert cached(cache) == inside(ENTRY)


def assert_nothing_half_visible(found: Mapping[str, bytes]) -> None:
    for path, data in found.items():
        assert data == inside(ENTRY)[path]
    if f"{FOLDER}/model.done" in found:
        assert found == inside(ENTRY)


@pytest.mark.sample(6)
def test_an_exporter_killed_before_any_step_leaves_nothing_half_visible(tmp_path: Path, store: Store) -> None:
    manifest = made(store)

    def until(step: int, root: Path) -> None:
        kill_at_step(step, root)
        carry_out(store, manifest, LocalFolder(root))

    killed, ready = 0, set()
    for step in range(1, 1000):
        place = folder(tmp_path / f"cache-{step}")
        status = in_child(partial(until, step, place.root))
        assert_nothing_half_visible(cached(place))
        ready.add([entry.state for entry in entries_in(place.backend)] == [EntryState.READY])
        carry_out(store, manifest, place.backend)
        assert cached(place) == inside(ENTRY)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
        killed += 1
    assert killed > 4 * len(FILES)
    assert ready == {True, False}


def test_what_a_killed_exporter_left_goes_after_a_day(store: Store, tmp_path: Path) -> None:
    place = folder(tmp_path / "cache")
    carry_out(store, made(store), place.backend)
    old, young = (place.backend.scratch_folder / f".{name}.part" for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half a neff")
    os.utime(old, (0, 0))
    remove_abandoned_files(place.backend)
    assert (old.exists(), young.exists()) == (False, True)
    assert cached(place) == inside(ENTRY)


def test_of_two_exporters_with_different_programs_for_one_graph_one_has_the_entry(store: Store, tmp_path: Path) -> None:
    """The other one comes between any two of its steps, and is told the truth."""
    ours, theirs = made(store), made(store, {FOLDER: {**FILES, "model.neff": b"other" * 900, "extra": b""}})
    entries = [inside(ENTRY), inside({FOLDER: {**FILES, "model.neff": b"other" * 900, "extra": b""}})]
    for moment in range(len(FILES)):
        place = folder(tmp_path / f"cache-{moment}")
        steps = iter(range(moment))
        answers: list[ExportResult] = []

        def interrupt(_: str, __: str, steps: Any = steps, place: Any = place, answers: Any = answers) -> None:
            if next(steps, None) is None and not answers:
                answers += outcomes(carry_out(store, theirs, place.backend))

        mine = outcomes(carry_out(store, ours, watched(place.backend, interrupt)))
        assert (mine, answers) == (
            ([ExportResult.THERE], [ExportResult.WRITTEN])
            if moment == 0
            else ([ExportResult.WRITTEN], [ExportResult.HELD])
        )
        assert cached(place) == entries[moment == 0]


def test_two_exporters_of_the_same_program_do_each_others_work(store: Store, cache: Place) -> None:
    manifest, told = made(store), iter(range(2))

    def interrupt(_: str, __: str) -> None:
        if next(told, None) == 1:
            assert outcomes(carry_out(store, manifest, cache.backend)) == [ExportResult.WRITTEN]

    exported = carry_out(store, manifest, watched(cache.backend, interrupt))
    assert outcomes(exported) == [ExportResult.WRITTEN]
    assert cached(cache) == inside(ENTRY)


@pytest.mark.parametrize(
    ("there", "what", "why"),
    [
        ({"model.neff": b"theirs", "model.done": b""}, ExportResult.THERE, "another compilation"),
        ({**FILES, "model.hlo_module.pb.lock": b""}, ExportResult.THERE, ""),
        ({"model.hlo_module.pb.lock": b""}, ExportResult.HELD, "locked by a compiler"),
        (
            {"model.log": b"[NCC_EOOM001]", "model.hlo_module.pb": b"module" * 50},
            ExportResult.HELD,
            "a failed compilation",
        ),
        ({"model.done": b""}, ExportResult.HELD, "a failed compilation"),
        ({"model.neff": b"half of a ne"}, ExportResult.HELD, "a different model.neff"),
        ({"model.hlo_module.pb": b"x" * 300}, ExportResult.HELD, "a different model.hlo_module.pb"),
    ],
)
def test_what_others_have_begun_or_finished_stays_as_it_is(
    store: Store, tmp_path: Path, there: dict[str, bytes], what: ExportResult, why: str
) -> None:
    place = folder(tmp_path / "cache")
    write(place, there)
    first, second = carry_out(store, made(store, {FOLDER: FILES, OTHER: FILES}), place.backend)
    assert first.result is what
    assert why in first.why
    assert bool(first.why) == bool(why)
    assert second.result is ExportResult.WRITTEN
    assert cached(place) == {**inside({FOLDER: there}), **inside({OTHER: FILES})}


def test_a_file_of_an_artifact_that_is_no_part_of_an_entry_is_refused(store: Store) -> None:
    for where, files in (("elsewhere/MODULE_a+b", FILES), (FOLDER, {"model.neff": b""}), (f"{FOLDER}/sub", FILES)):
        with pytest.raises(ProgramInvalid, match="build the model again"):
            entries_of(made(store, {where: files}))


def test_the_command_says_which_programs_have_no_entry(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    monkeypatch.chdir(tmp_path)
    made(store, programs=("decode-b1-s1", "prefill-b1-s128"))
    traced, emulated = made(store, {}, model="acme/traced"), made(store, {}, backend="emulator", model="acme/emulated")
    answer = nxpipe("cache", "export", MODEL, "acme/traced", "--to", "cache", "--store", "store")
    assert answer.code == 0, answer.err
    assert "1 of 2 programs came with no cache entry (prefill-b1-s128)" in answer.err
    assert "acme/traced@" in answer.err
    assert "written" in answer.out
    nothing = nxpipe("cache", "export", "acme/traced", "--to", "cache", "--store", "store")
    assert nothing.code == 21
    assert "builds compile without that cache" in nothing.err
    refused = nxpipe("cache", "export", MODEL, "acme/emulated", "--to", "other", "--store", "store")
    assert refused.code == 21
    assert "no Neuron device runs the emulator's programs" in refused.err
    assert not Path("other").exists()
    tip = first_generation("prod", sorted((Served.of(entry) for entry in store.list()), key=lambda one: one.slot))
    assert ChannelLog(store.backend, "prod").append(lambda _: tip).changed
    served = nxpipe("cache", "export", "--channel", "prod", "--to", "again", "--store", "store", "--json")
    assert served.code == 0, served.err
    assert f"acme/emulated@{emulated.request_key[:12]}" in served.err
    document = json.loads(served.out)
    assert [row["outcome"] for row in document["entries"]] == ["written"]
    assert {entry["artifact"] for entry in document["without_entry"]} >= {f"acme/traced@{traced.request_key[:12]}"}


def test_without_names_the_newest_artifacts_of_the_configuration_are_exported(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    monkeypatch.chdir(tmp_path)
    model = '[[models]]\nname = "{0}"\nid = "acme/{0}"\ntarget = "inf2.xlarge"\ntask = "fill-mask"\n'
    text = '[project]\nname = "test"\n[store]\nurl = "file://store"\n' + "".join(
        model.format(name) for name in ("one", "two")
    )
    Path("nxpipe.toml").write_text(text)
    nothing = nxpipe("cache", "export", "--to", "cache")
    assert nothing.code == 21, nothing.err
    made(store, {OTHER: FILES}, model="acme/one")
    made(store, model="acme/one")
    made(store, {}, model="acme/one", backend="emulator")
    made(store, {OTHER: FILES}, model="acme/unnamed")
    answer = nxpipe("cache", "export", "--to", "cache", "--json")
    assert answer.code == 0, answer.err
    assert [row["entry"] for row in json.loads(answer.out)["entries"]] == [FOLDER]
    assert "acme/two for inf2: the store holds no artifact of neuronx-cc" in answer.err


def test_an_entry_that_others_hold_is_an_error_after_all_else_is_written(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    monkeypatch.chdir(tmp_path)
    made(store, {FOLDER: FILES, OTHER: FILES})
    write(folder(tmp_path / "cache"), {"model.hlo_module.pb.lock": b""})
    answer = nxpipe("cache", "export", MODEL, "--to", "cache", "--store", "store")
    assert answer.code == 20
    assert "1 of 2 entries were skipped" in answer.err
    assert "clear-locks" in answer.err
    write(folder(tmp_path / "cache"), {"model.log": b"", "notes.txt": b""}, "neuronxcc-2.0/MODULE_1+2")
    listed = nxpipe("cache", "ls", "cache", "--json")
    assert listed.code == 0, listed.err
    states = {row["entry"]: row["state"] for row in json.loads(listed.out)}
    assert states == {FOLDER: "locked", OTHER: "ready", "neuronxcc-2.0/MODULE_1+2": "failed"}
    assert nxpipe("cache", "ls", "cache").out.count("\n") == 4
    assert nxpipe("cache", "ls", "elsewhere").out == ""
