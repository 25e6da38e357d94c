"""`nxpipe store ls` with filters, `explain`, `diff`, `export` and `import`, as typed by a user."""

import json
from pathlib import Path
from typing import Any

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.errors import Conflict
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.emulator.errors import CaptureError
from nxpipe.pipeline.build.plan import explain_cache_miss
from nxpipe.pipeline.build.worker import CellBuilder
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.util.exit_codes import NOT_FOUND, OK, STORE, USAGE
from tests.artifact_store.samples import publish_verified
from tests.pipeline.test_store_commands import here, nxpipe, publish

FLAGS: dict[str, Any] = {
    "revision": None,
    "task": None,
    "target": "inf2.xlarge",
    "tp": 1,
    "phases": None,
    "batches": (1,),
    "autocast": "matmult",
    "autocast_type": "bf16",
    "weights": "random:0",
}

__all__ = ["here"]  # the fixture that puts every test into a folder of its own


def rows(*words: str) -> list[dict[str, Any]]:
    found = json.loads(nxpipe("store", "ls", "--store", "s", "--json", *words).out)
    assert isinstance(found, list)
    return found


# ls


def test_the_list_is_narrowed_by_model_target_and_number(here: Path) -> None:
    for note, model in enumerate(("acme/bert", "acme/llama", "other/bert", "acme/bert")):
        publish(here / "s", model=model, note=str(note))
    assert [row["model"] for row in rows("--model", "acme/*")] == ["acme/bert", "acme/llama", "acme/bert"]
    assert [row["model"] for row in rows("--model", "acme/bert")] == ["acme/bert", "acme/bert"]
    assert [row["model"] for row in rows("--limit", "2")] == ["acme/bert", "other/bert"]
    assert rows("--model", "acme/bert", "--limit", "1") == rows("--limit", "1")
    assert len(rows("--target", "inf2")) == 4
    assert rows("--target", "inf") == rows("--model", "bert") == []


def test_a_list_that_fits_nothing_says_how_many_there_are(here: Path) -> None:
    publish(here / "s")
    answer = nxpipe("store", "ls", "--store", "s", "--target", "trn1")
    assert (answer.code, answer.out) == (OK, "")
    assert "None of the 1 artifacts" in answer.err


# explain


def test_an_artifact_is_explained_by_the_one_most_like_it(here: Path) -> None:
    near, asked = publish(here / "s", note="a"), publish(here / "s", note="b")
    publish(here / "s", note="c", model="llama")
    answer = nxpipe("store", "explain", asked.request_key, "--store", "s")
    assert answer.code is OK
    assert f"{near.model_id}@{near.request_key[:12]} differs in 1 of 4 fields" in answer.out
    assert answer.out.splitlines()[-1].split() == ["options.note", '"a"', '"b"']
    (explained,) = json.loads(
        nxpipe("store", "explain", asked.request_key, "--store", "s", "--nearest", "2", "--json").out
    )
    assert explained["in_store"] is True
    assert [len(near["differences"]) for near in explained["nearest"]] == [1, 2]
    assert explained["nearest"][0]["differences"] == [{"field": "options.note", "stored": "a", "wanted": "b"}]


def test_a_build_is_explained_before_it_is_made(here: Path, bert: Path) -> None:
    wanted = ["--model-id", str(bert), "--weights", "random:0", "--buckets", "16"]
    stored = BuildSpec.of(ModelSpec.from_options(str(bert), {**FLAGS, "buckets": (32,)}))
    found = publish_inputs(here / "s", stored.key_inputs())
    (explained,) = json.loads(nxpipe("store", "explain", *wanted, "--store", "s", "--json").out)
    assert explained["in_store"] is False
    (near,) = explained["nearest"]
    assert near["request_key"] == found.request_key
    assert near["differences"] == [{"field": "shapes", "stored": [["forward", 1, 32]], "wanted": [["forward", 1, 16]]}]
    wanted[-1] = "32"
    (explained,) = json.loads(nxpipe("store", "explain", *wanted, "--store", "s", "--json").out)
    assert explained["in_store"] is True
    assert [near["model"] for near in explained["nearest"]] == ["acme/tiny-bert"]
    assert found.request_key not in [near["request_key"] for near in explained["nearest"]]


def publish_inputs(folder: Path, inputs: dict[str, object]) -> Manifest:
    """An artifact for this request."""
    store = open_store(str(folder))
    sample = publish(folder).manifest
    found = sample.model_copy(update={"key_inputs": store.put_blob(canonical_json(inputs))})
    publish_verified(store, found)
    return found


def test_an_empty_store_explains_itself(here: Path, bert: Path) -> None:
    answer = nxpipe("store", "explain", "--model-id", str(bert), "--weights", "random:0", "--store", "s")
    assert answer.code is OK
    assert "is not in" in answer.out
    assert "no other artifact" in answer.out


def test_a_name_and_a_build_are_not_explained_together(here: Path, bert: Path) -> None:
    publish(here / "s")
    assert nxpipe("store", "explain", "acme/tiny-bert", "--model-id", str(bert), "--store", "s").code is USAGE
    assert nxpipe("store", "explain", "acme/tiny-bert", "--tp", "2", "--store", "s").code is USAGE


def test_a_build_that_finds_nothing_says_what_was_nearest(here: Path) -> None:
    near = publish(here / "s", note="\x1b[2J")
    inputs = open_store("s").key_inputs(near.manifest)
    miss = explain_cache_miss(open_store("s"), inputs | {"options": {"autocast": "all", "note": "x" * 100}})
    assert miss is not None
    assert f"cache miss: nearest artifact {near.model_id}@{near.request_key[:12]} differs in " in miss
    assert 'options.autocast ("matmult" there, "all" here)' in miss
    assert miss.isprintable()
    assert len(miss) < 300
    assert explain_cache_miss(open_store("empty"), inputs) is None


def test_the_build_itself_says_so(here: Path, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is stopped at its door: what is said comes before it."""
    publish(here / "s")

    def stop(*_: object) -> bool:
        raise CaptureError("stopped")

    monkeypatch.setattr(CellBuilder, "make", stop)
    answer = nxpipe("build", "--model-id", str(bert), "--weights", "random:0", "--buckets", "16", "--store", "s")
    before, stopped, _ = answer.err.partition("stopped")
    assert stopped
    assert "nearest artifact acme/tiny-bert@" in before


# diff


def test_a_diff_tells_inputs_parts_and_bytes(here: Path) -> None:
    one, other = publish(here / "s", note="a"), publish(here / "s", note="b")
    names = [one.request_key[:12], other.manifest_digest]
    answer = nxpipe("store", "diff", *names, "--store", "s")
    assert answer.code is OK
    assert answer.out.split()[:9] == ["key", "inputs", "FIELD", "A", "B", "options.note", '"a"', '"b"']
    found = json.loads(nxpipe("store", "diff", *names, "--store", "s", "--json").out)
    assert found["key_inputs"] == [{"field": "options.note", "a": "a", "b": "b"}]
    assert found["weights"] == {"same": 2, "same_bytes": 2000, "changed": [], "added": [], "removed": []}
    assert nxpipe("store", "diff", names[0], names[0], "--store", "s").out == "no difference\n"
    assert nxpipe("store", "diff", names[0], "f" * 64, "--store", "s").code is NOT_FOUND
    assert nxpipe("store", "diff", names[0], one.request_key, "--store", "s").code is OK


def test_the_two_sides_of_a_conflict_can_be_compared(here: Path) -> None:
    one = publish(here / "s")
    store = open_store("s")
    first, second = one.manifest.weights
    changed = first.model_copy(update={"blob": store.put_blob(b"new"), "shape": (3,)})
    renamed = second.model_copy(update={"name": "c"})
    with pytest.raises(Conflict, match=r"differs in 3 of 3 weights \(a, c, b\)") as caught:
        store.publish(one.manifest.model_copy(update={"weights": (changed, renamed)}))
    sides = [caught.value.stored, caught.value.offered]
    found = json.loads(nxpipe("store", "diff", *sides, "--store", "s", "--json").out)
    assert found["key_inputs"] == found["identity"] == found["executables"]["changed"] == []
    assert [(part["name"], part["a"]["size"], part["b"]["size"]) for part in found["weights"]["changed"]] == [
        ("a", 1000, 3)
    ]
    assert [part["name"] for part in found["weights"]["added"]] == ["c"]
    assert [part["name"] for part in found["weights"]["removed"]] == ["b"]
    page = nxpipe("store", "diff", *sides, "--store", "s").out
    assert "weights: 1 changed (3 B), 1 added (1.0 kB), 1 removed (1.0 kB)" in page


# export, import


@pytest.mark.parametrize("target", ["out.tar", "out"])
def test_an_artifact_is_carried_from_store_to_store(here: Path, target: str) -> None:
    published = publish(here / "s")
    answer = nxpipe("store", "export", "acme/tiny-bert", "--to", target, "--store", "s")
    assert (answer.code, answer.out) == (OK, f"{target}\n")
    answer = nxpipe("store", "import", target, "--store", "t", "--json")
    assert answer.code is OK
    assert json.loads(answer.out)["manifest_digest"] == published.manifest_digest
    found = open_store("t").find(published.request_key)
    assert found is not None
    assert found.manifest == published.manifest
    answer = nxpipe("store", "import", target, "--store", "t")
    assert answer.out.split() == ["imported", f"acme/tiny-bert@{published.request_key[:12]}", "inf2"]


def test_what_is_no_bundle_is_a_store_error_and_nothing_is_made(here: Path) -> None:
    publish(here / "s")
    (here / "x.tar").write_bytes(b"no tar at all")
    answer = nxpipe("store", "import", "x.tar", "--store", "t")
    assert answer.code is STORE
    assert "x.tar cannot be imported" in answer.error
    assert nxpipe("store", "import", "none.tar", "--store", "t").code is NOT_FOUND
    assert not (here / "t").exists()
