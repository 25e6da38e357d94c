"""Step results: shared by all builds, complete or absent, and never replaced."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.builds import ResultFile, StepResult, keep_step_result, step_result
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Conflict, Corrupt, Incomplete, InvalidDocument, NotFound
from nxpipe.artifact_store.layout import PARTS, blob_path, part_path
from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, fsck, plan
from tests.artifact_store.samples import Place, put
from tests.artifact_store.upkeep_world import GRACE, ClockedFolder

KEY, OTHER = "a" * 64, "b" * 64
FACTS: dict[str, object] = {"instructions": 12, "sizes": [1, 2.5]}


def made(store: Store, key: str = KEY, program: bytes = b"program", **facts: object) -> StepResult:
    files = {"program": store.put_blob(program), "graph": store.put_blob(b"graph")}
    return keep_step_result(store, key, files, FACTS | facts)


def test_a_part_is_found_by_its_key_with_its_files_and_facts(store: Store) -> None:
    assert step_result(store, KEY) is None
    kept = made(store)
    assert step_result(store, KEY) == kept
    assert step_result(store, OTHER) is None
    assert [file.path for file in kept.files] == ["graph", "program"]
    assert store.read_blob(kept.blob("program")) == b"program"
    assert kept.facts == FACTS
    with pytest.raises(NotFound, match=r"no file 'log'; its files are: graph, program"):
        kept.blob("log")


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_part_with_a_bad_blob_is_none_until_it_is_made_again(place: Place, damage: str) -> None:
    kept = made(place.store)
    path = blob_path(kept.blob("program"))
    if damage == "missing":
        place.remove(path)
    else:
        place.write(path, b"pr0gram")
    assert step_result(place.store, KEY) is None
    assert made(place.store) == kept
    assert step_result(place.store, KEY) == kept


def test_who_makes_the_same_again_gets_the_part_that_stands(place: Place) -> None:
    first = made(place.store)
    before = place.objects()
    assert made(place.store).write_id == first.write_id
    assert place.objects() == before


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"program": b"other"}, r"differs in files\.program;"),
        ({"instructions": 13}, r"differs in facts\.instructions;"),
        ({"instructions": 12.0}, r"differs in facts\.instructions;"),
        (dict.fromkeys("abcde", 0), r"differs in facts\.a, facts\.b, facts\.c and 2 more;"),
    ],
    ids=["file", "fact", "spelling of a fact", "many"],
)
def test_another_result_of_the_same_question_is_a_conflict(store: Store, other: dict[str, object], words: str) -> None:
    kept = made(store)
    with pytest.raises(Conflict, match=words) as caught:
        made(store, **other)  # type: ignore[arg-type]
    assert f"step result {KEY}" in str(caught.value)
    assert caught.value.stored == kept.result != caught.value.offered
    assert step_result(store, KEY) == kept


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_part_whose_bad_blob_is_not_made_again_has_a_successor(place: Place, damage: str) -> None:
    parts = [made(place.store, program=b"one")]
    for program in (b"two", b"three"):
        path = blob_path(parts[-1].blob("program"))
        if damage == "missing":
            place.remove(path)
        else:
            place.write(path, b"rot")
        parts.append(made(place.store, program=program))
        assert step_result(place.elsewhere(), KEY) == parts[-1]
    assert len({part.key for part in parts}) == 3
    with pytest.raises(Conflict, match=rf"step result {KEY}.*differs in files\.program"):
        made(place.store, program=b"four")
    assert made(place.store, program=b"one") == parts[0] == step_result(place.store, KEY)  # its blob is back


def test_a_bad_blob_that_is_made_again_excuses_no_other_difference(place: Place) -> None:
    place.remove(blob_path(made(place.store).blob("program")))
    with pytest.raises(Conflict, match=r"differs in facts\.instructions"):
        made(place.store, instructions=13)


def test_a_part_that_names_what_is_not_there_is_not_kept(place: Place) -> None:
    with pytest.raises(Incomplete, match=f"cannot keep step result {KEY}"):
        keep_step_result(place.store, KEY, {"program": Blob.of(b"nobody put this")}, {})
    assert not [path for path in place.objects() if path.startswith(PARTS)]


def test_a_part_in_anothers_place_or_damaged_is_corrupt(place: Place) -> None:
    made(place.store)
    theirs = made(place.store, OTHER)
    for data in (theirs.to_bytes(), b"rot"):
        place.write(part_path(KEY), data)
        with pytest.raises(Corrupt):
            step_result(place.store, KEY)


def test_a_part_of_more_than_a_mebibyte_is_refused(place: Place) -> None:
    with pytest.raises(InvalidDocument, match="at most 1048576"):
        keep_step_result(place.store, KEY, {}, {"listing": "x" * 1024**2})
    assert not place.objects()


@given(paths=st.lists(st.sampled_from("abcd"), max_size=4))
def test_files_have_one_order_and_no_twins(paths: list[str]) -> None:
    files = tuple(ResultFile(path=path, blob=Blob.of(path.encode())) for path in paths)
    if paths == sorted(set(paths)):
        part = StepResult(key=KEY, files=files, facts={}, write_id="0" * 32)
        assert StepResult.from_bytes(part.to_bytes()) == part
    else:
        with pytest.raises(ValueError, match="are not sorted and unique"):
            StepResult(key=KEY, files=files, facts={}, write_id="0" * 32)


@pytest.fixture
def clocked(tmp_path: Path) -> Store:
    return Store(ClockedFolder(tmp_path / "clocked"), grace=GRACE)


def collect_after(store: Store, graces: float) -> set[str]:
    """The collected paths."""
    assert isinstance(store.backend, ClockedFolder)
    store.backend.time += graces * GRACE
    return {step.listed.path for step in apply_plan(store, plan(store, Rules(), store.backend.now())).done}


def everything_of(part: StepResult) -> set[str]:
    return {part.path, *map(blob_path, part.blobs())}


def test_a_part_of_no_artifact_stays_while_it_is_young_and_goes_with_its_blobs(clocked: Store) -> None:
    clocked.put_blob(b"program")
    assert collect_after(clocked, 0.4) == set()
    kept = made(clocked)
    assert collect_after(clocked, 0.9) == set()
    assert step_result(clocked, KEY) == kept
    assert collect_after(clocked, 2) == everything_of(kept)
    assert step_result(clocked, KEY) is None


def test_a_part_stays_as_long_as_an_artifact_holds_all_its_blobs(clocked: Store) -> None:
    artifact = put(clocked)
    clocked.publish(artifact)
    whole = keep_step_result(clocked, KEY, {"program": artifact.executables[0].blob}, FACTS)
    half = keep_step_result(clocked, OTHER, {"program": whole.blob("program"), "log": clocked.put_blob(b"log")}, {})
    assert collect_after(clocked, 2) == {half.path, blob_path(half.blob("log"))}
    assert step_result(clocked, KEY) == whole


def test_a_part_that_names_nothing_goes_with_its_age(clocked: Store) -> None:
    kept = keep_step_result(clocked, KEY, {}, FACTS)
    assert collect_after(clocked, 0.9) == set()
    assert collect_after(clocked, 0.2) == {kept.path}


@pytest.mark.parametrize("again", [lambda store: step_result(store, KEY), made], ids=["found", "made"])
def test_a_part_that_is_asked_for_again_lives_as_long_as_a_new_one(
    clocked: Store, again: Callable[[Store], StepResult]
) -> None:
    kept = made(clocked)
    assert isinstance(clocked.backend, ClockedFolder)
    clocked.backend.time += 2 * GRACE
    assert again(clocked) == kept
    assert collect_after(clocked, 0.9) == set()
    assert step_result(clocked, KEY) == kept


def test_a_collection_that_is_cut_short_leaves_no_part_without_its_blobs(clocked: Store) -> None:
    kept = made(clocked)
    assert isinstance(clocked.backend, ClockedFolder)
    clocked.backend.time += 2 * GRACE
    paths = [step.listed.path for step in plan(clocked, Rules(), clocked.backend.now()).steps]
    assert paths[0] == kept.path
    assert set(paths) == everything_of(kept)


def test_a_part_whose_blob_is_gone_is_found_by_fsck_while_it_is_young_and_collected_later(clocked: Store) -> None:
    kept = made(clocked)
    (found,) = [entry for entry in clocked.backend.walk("cas/") if entry.path == blob_path(kept.blob("graph"))]
    assert clocked.backend.remove(found)
    assert [finding.path for finding in fsck(clocked).findings] == [found.path]
    assert collect_after(clocked, 2) == everything_of(kept) - {found.path}
    assert fsck(clocked).is_sound
