"""The order of the jobs of a plan."""

from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.build.jobs import CellStatus, Job
from nxpipe.pipeline.build.plan import BuildPlan
from nxpipe.pipeline.build.run import JobQueue
from tests.building.plans import THRESHOLDS, artifact, cell


def agenda(*artifacts: object, force: bool = False) -> JobQueue:
    return JobQueue.of(BuildPlan("file:///nowhere", artifacts), THRESHOLDS, force=force)  # type: ignore[arg-type]


def carried_out(of: JobQueue) -> list[Job]:
    """Sequential execution without failures."""
    order: list[Job] = []
    while of:
        order.append(of.first)
        assert of.take() is order[-1]
        of.complete(order[-1])
    return order


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_the_largest_cell_goes_first_and_equals_in_the_order_of_the_plan(works: list[int]) -> None:
    cells = [cell(str(place), work=float(work)) for place, work in enumerate(works)]
    *order, last = carried_out(agenda(artifact("whole", *cells)))
    assert [int(job.key) for job in order] == sorted(range(len(works)), key=lambda place: (-works[place], place))
    assert (last.key, last.kind) == ("whole", "artifact")


def test_an_artifact_goes_as_soon_as_it_is_whole() -> None:
    first, second = artifact("first", cell("a", work=3), cell("b", work=2)), artifact("second", cell("c", work=1))
    assert [job.key for job in carried_out(agenda(first, second))] == ["a", "b", "first", "c", "second"]


def test_one_whose_cells_are_all_committed_goes_before_everything() -> None:
    left = artifact("left", cell("a", CellStatus.COMMITTED), cell("b", CellStatus.COMMITTED))
    assert [job.key for job in carried_out(agenda(artifact("new", cell("c", work=9)), left))] == ["left", "c", "new"]


def test_a_cell_that_two_artifacts_share_is_made_once_and_both_wait_for_it() -> None:
    first, second = artifact("first", cell("x"), cell("a", work=2)), artifact("second", cell("x"), cell("b", work=3))
    assert [job.key for job in carried_out(agenda(first, second))] == ["b", "a", "x", "first", "second"]


def test_an_artifact_that_is_asked_for_in_two_ways_is_published_once() -> None:
    twice = artifact("same", cell("x"))
    assert [job.key for job in carried_out(agenda(twice, twice))] == ["x", "same"]


def test_what_is_published_is_no_work_and_what_failed_holds_its_artifact_back() -> None:
    published = artifact("published", cell("p", CellStatus.PUBLISHED))
    held = artifact("held", cell("bad", CellStatus.FAILED), cell("good"))
    assert [job.key for job in carried_out(agenda(published, held, artifact("", cell("", CellStatus.REFUSED))))] == [
        "good"
    ]


@given(st.booleans())
def test_an_item_travels_as_a_document(force: bool) -> None:
    for job in carried_out(agenda(artifact("whole", cell("a")), force=force)):
        assert job.force is force
        assert Job.from_document(job.document()) == job
