"""The plan's status of cells for a store's content; planning computes nothing."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.builds import keep_step_result, record_failure
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.manifest import Executable, Manifest, ModelRef
from nxpipe.pipeline.build.cache import Timings, timing_key
from nxpipe.pipeline.build.jobs import CellStatus, FailureClass
from nxpipe.pipeline.build.plan import PlannedArtifact, PlannedCell, make_plan
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.config.sections import Backend
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.weights import WeightsSource
from nxpipe.pipeline.util.errors import BuildRefused, VerificationFailed
from tests.artifact_store.samples import publish_verified
from tests.building.plans import THRESHOLDS

E8, E16 = Shape("forward", 1, 8), Shape("forward", 1, 16)
ASKED = st.builds(
    ModelSpec,
    model_id=st.text(),
    revision=st.none() | st.text(),
    task=st.none() | st.text(),
    target=st.text(),
    tp=st.none() | st.integers(1, 64),
    phases=st.none() | st.lists(st.text(), max_size=3).map(tuple),
    batches=st.lists(st.integers(1, 1024), max_size=3).map(tuple),
    buckets=st.none() | st.lists(st.integers(1, 131072), max_size=3).map(tuple),
    autocast=st.text(),
    autocast_type=st.text(),
    weights=(st.none() | st.text()).map(WeightsSource.parse),
    name=st.none() | st.text(),
    axes=st.lists(st.tuples(st.text(), st.integers(1)), max_size=3).map(tuple),
    backend=st.sampled_from(get_args(Backend)),
    verified=st.booleans(),
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def asked(bert: Path) -> ModelSpec:
    task = "feature-extraction"
    seed = WeightsSource.parse("random:0")
    return ModelSpec(str(bert), None, task, "inf2.xlarge", 1, None, (1,), (8, 16), "none", "bf16", seed)


def but(asked: ModelSpec, **words: object) -> ModelSpec:
    return replace(asked, **words)  # type: ignore[arg-type]


def planned(store: Store, *asked: ModelSpec, force: bool = False) -> list[PlannedArtifact]:
    return list(make_plan(asked, store, THRESHOLDS, Timings(Path("no file")), force=force, hints=True).artifacts)


def cells(store: Store, asked: ModelSpec, *, force: bool = False) -> dict[Shape, PlannedCell]:
    (only,) = planned(store, asked, force=force)
    return {cell.shape: cell for cell in only.cells}


def states(store: Store, asked: ModelSpec, *, force: bool = False) -> list[tuple[str, str]]:
    return [(cell.status.value, cell.why) for cell in cells(store, asked, force=force).values()]


def commit(store: Store, key: str) -> None:
    keep_step_result(store, key, {"program": store.put_blob(key.encode())}, {"degree": 1})


def commit_cell(store: Store, asked: ModelSpec, shape: Shape) -> None:
    request = BuildSpec.of(asked)
    commit(store, request.program_key(shape))
    commit(store, request.evidence_key(shape))


def publish(store: Store, asked: ModelSpec) -> None:
    request, program = BuildSpec.of(asked), store.put_blob(b"program")
    manifest = Manifest(
        model=ModelRef(id=request.source.id, revision=None, task=request.source.task),
        target="inf2",
        backend="emulator",
        key_inputs=store.put_blob(canonical_json(request.key_inputs())),
        executables=tuple(
            Executable(
                name=shape.name,
                phase=shape.phase,
                batch=shape.batch,
                sequence=shape.sequence,
                tensor_parallel=1,
                graph_key=program.sha256,
                outputs=("logits",),
                blob=program,
            )
            for shape in sorted(request.shapes)
        ),
        weights=(),
        files=(),
    )
    publish_verified(store, manifest)


def test_what_nobody_made_is_to_do_with_its_reason(store: Store, asked: ModelSpec) -> None:
    assert states(store, asked) == [("queued", "cache miss")] * 2
    publish(store, but(asked, autocast="all"))
    (said,) = {why for _, why in states(store, asked)}
    assert 'options.autocast ("all" there, "none" here)' in said
    (unexplained,) = make_plan([asked], store, THRESHOLDS, Timings(Path("no file"))).artifacts
    assert {cell.why for cell in unexplained.cells} == {"cache miss"}


def test_a_cell_is_committed_when_its_program_and_its_evidence_are_there(store: Store, asked: ModelSpec) -> None:
    commit_cell(store, asked, E8)
    commit(store, BuildSpec.of(asked).program_key(E16))
    assert states(store, asked) == [
        ("committed", ""),
        ("queued", "compiled, and not yet verified with these weights"),
    ]
    assert {state for state, _ in states(store, replace(asked, verified=False))} == {"committed"}


def test_a_cell_whose_program_is_gone_is_to_do_though_its_evidence_is_there(store: Store, asked: ModelSpec) -> None:
    commit(store, BuildSpec.of(asked).evidence_key(E8))
    assert cells(store, asked)[E8].status is CellStatus.QUEUED


def test_a_published_artifact_is_no_work_and_force_makes_all_of_it(store: Store, asked: ModelSpec) -> None:
    publish(store, asked)
    assert states(store, asked) == [("published", "")] * 2
    assert states(store, asked, force=True) == [("queued", "forced")] * 2


@pytest.mark.parametrize(
    ("key_of", "error", "code"),
    [
        (lambda request: request.program_key(E8), BuildRefused("an operator that cannot be lowered"), 11),
        (lambda request: request.evidence_key(E8), VerificationFailed("too far away"), 12),
    ],
    ids=["program", "evidence"],
)
def test_a_remembered_failure_is_told_with_its_exit_code_and_force_forgets_it(
    key_of: Callable[[object], str], error: Exception, code: int, store: Store, asked: ModelSpec
) -> None:
    asked_for = {"verify": {"min_cosine": 0.9, "max_relative_error": 0.1, "max_kl": None, "min_top1": None}}
    record_failure(store, key_of(BuildSpec.of(asked)), error, log=canonical_json(asked_for))
    failed = cells(store, asked)[E8]
    assert failed.status is CellStatus.FAILED
    assert failed.failure is not None
    assert (failed.failure.code, failed.failure.failure_class) == (code, FailureClass.DETERMINISTIC)
    assert str(error) in failed.failure.message
    assert cells(store, asked)[E16].status is CellStatus.QUEUED
    assert cells(store, asked, force=True)[E8].status is CellStatus.QUEUED


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ({"tp": 3}, 11, "the nearest is --tp"),
        ({"buckets": (8, 65)}, 11, "positions up to 64"),
        ({"model_id": "./nowhere"}, 10, "no such folder"),
        ({"weights": WeightsSource.parse("random:x")}, 10, "a seed must be a whole number"),
    ],
    ids=lambda value: str(value),
)
def test_what_cannot_be_asked_is_refused_beside_what_can(
    words: dict[str, object], code: int, says: str, store: Store, asked: ModelSpec
) -> None:
    refused, fine = planned(store, but(asked, **words), asked)
    assert {cell.status for cell in refused.cells} == {CellStatus.REFUSED}
    assert len(refused.cells) == 2
    for cell in refused.cells:
        assert cell.failure is not None
        assert cell.failure.code == code
        assert says in cell.failure.message
    assert {cell.status for cell in fine.cells} == {CellStatus.QUEUED}


def test_artifacts_that_share_a_cell_name_it_alike(store: Store, asked: ModelSpec) -> None:
    both, one = planned(store, asked, but(asked, buckets=(16,)))
    assert both.key != one.key
    assert both.cells[1].key == one.cells[0].key
    commit_cell(store, asked, E16)
    both, one = planned(store, asked, but(asked, buckets=(16,)))
    assert [cell.status.value for cell in (*both.cells, *one.cells)] == ["queued", "committed", "committed"]


def test_a_listing_says_of_many_cells_what_a_look_at_each_says(store: Store, asked: ModelSpec) -> None:
    many = but(asked, buckets=tuple(range(1, 65)))
    chosen = Random(0).sample(range(1, 65), 20)
    for bucket in chosen:
        commit_cell(store, many, Shape("forward", 1, bucket))
    by_listing = {shape.sequence: cell.status for shape, cell in cells(store, many).items()}
    assert sorted(bucket for bucket, state in by_listing.items() if state is CellStatus.COMMITTED) == sorted(chosen)
    for bucket in range(1, 65, 7):
        assert cells(store, but(asked, buckets=(bucket,)))[Shape("forward", 1, bucket)].status is by_listing[bucket]


def test_what_was_done_alike_before_is_estimated(store: Store, asked: ModelSpec, tmp_path: Path) -> None:
    timings = Timings(tmp_path / "timings.json")
    timings.note({timing_key(BuildSpec.of(asked), E8): (1.0, 7.0)})
    (only,) = make_plan([asked], store, THRESHOLDS, timings).artifacts
    assert only.cells[0].seconds == 7.0
    assert only.cells[1].seconds is not None


@given(ASKED)
def test_what_is_asked_for_travels_as_a_document(asked: ModelSpec) -> None:
    assert ModelSpec.from_document(json.loads(json.dumps(asked.document()))) == asked


def test_what_travels_finds_its_files_from_any_folder(
    asked: ModelSpec, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bert.parent)
    relative = but(asked, model_id=f"./{bert.name}", weights=WeightsSource.parse("weights"))
    assert relative.absolute() == but(
        asked, model_id=str(bert), weights=WeightsSource.parse(str(bert.parent / "weights"))
    )
    hub = but(asked, model_id="acme/tiny", weights=WeightsSource.parse("hub"))
    assert hub.absolute() == hub
