"""The driver with every executor: for every plan and every sequence of failures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.build.jobs import CellStatus, Event, Failure, FailureClass, Job, JobFinished, JobStarted
from nxpipe.pipeline.build.plan import BuildPlan, PlannedCell
from nxpipe.pipeline.build.run import JobQueue, RetryPolicy, run_jobs
from nxpipe.pipeline.build.state import BuildState, Results
from nxpipe.pipeline.util.exit_codes import INCOMPLETE, INTERRUPTED, STORE
from tests.building.plans import FAULTS, THRESHOLDS, Course, artifact, cell, courses, failure

POLICIES = st.builds(RetryPolicy, keep_going=st.booleans(), retries=st.integers(0, 3), pause=st.just(0.0))


@dataclass
class Played:
    """An executor that ends jobs as a plan orders, in any order, and records those that it begins."""

    course: Course
    capacity: int
    chance: Random
    interrupted_after: int | None = None
    name: str = "local"
    diary: list[tuple[str, Job, JobFinished | None]] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)
    is_closed: bool = False

    def takes(self, job: Job) -> bool:
        return len(self.running) < self.capacity

    def start(self, job: Job) -> None:
        assert self.takes(job)
        assert job.key not in {entry.key for entry in self.running}
        self.running.append(job)
        self.diary.append(("begins", job, None))

    def events(self, patience: float) -> Sequence[Event]:
        assert 0 < patience <= 1
        if self.interrupted_after is not None and len(self.diary) >= self.interrupted_after:
            raise KeyboardInterrupt
        if not self.running or self.chance.random() < 0.3:
            return ()
        job = self.running.pop(self.chance.randrange(len(self.running)))
        ended = JobFinished(job.key, 1.0, failure=self.course.end(job.key, self.attempts[job.key]))
        self.attempts[job.key] += 1
        self.diary.append(("ends", job, ended))
        return JobStarted(job.key, "somebody"), ended

    def close(self) -> None:
        self.is_closed = True


def played(course: Course, policy: RetryPolicy, executor: Played) -> Results:
    return run_jobs(BuildState(course.plan), JobQueue.of(course.plan, THRESHOLDS), executor, policy)


def is_final(ended: JobFinished, attempts: int, policy: RetryPolicy) -> bool:
    return ended.failure is not None and (
        ended.failure.failure_class != FailureClass.RETRYABLE or attempts > policy.retries
    )


def is_everybodys(ended: JobFinished) -> bool:
    return ended.failure is not None and (
        ended.failure.failure_class == FailureClass.HOST or ended.failure.code == STORE.number
    )


EXECUTORS = st.tuples(st.integers(1, 3), st.integers(0, 99).map(Random))


@given(courses(), POLICIES, EXECUTORS)
def test_every_item_ends_once_an_attempt_and_is_tried_again_only_after_what_may_pass(
    course: Course, policy: RetryPolicy, means: tuple[int, Random]
) -> None:
    executor = Played(course, *means)
    results = played(course, policy, executor)
    assert executor.is_closed
    assert not executor.running
    begun = Counter(job.key for what, job, _ in executor.diary if what == "begins")
    assert begun == executor.attempts == Counter(results.state.attempts)
    assert results.state.finished.keys() == begun.keys()
    for key, times in begun.items():
        ends = [ended for _, job, ended in executor.diary if ended and job.key == key]
        assert times <= policy.retries + 1
        assert all(ended.failure and ended.failure.failure_class == FailureClass.RETRYABLE for ended in ends[:-1])
        assert results.state.finished[key].failure == ends[-1].failure


@given(courses(), POLICIES, EXECUTORS)
def test_nothing_begins_after_a_failure_that_stops_the_run(
    course: Course, policy: RetryPolicy, means: tuple[int, Random]
) -> None:
    executor = Played(course, *means)
    played(course, policy, executor)
    is_stopped = not policy.keep_going and any(cell.failure for _, cell in course.plan.cells())
    attempts = Counter[str]()
    for what, job, ended in executor.diary:
        assert not (is_stopped and what == "begins")
        if ended is not None:
            attempts[job.key] += 1
            final = is_final(ended, attempts[job.key], policy)
            is_stopped |= final and (not policy.keep_going or is_everybodys(ended))


@given(courses(), POLICIES, EXECUTORS)
def test_with_keep_going_all_that_can_be_made_is_made(
    course: Course, policy: RetryPolicy, means: tuple[int, Random]
) -> None:
    executor = Played(course, *means)
    results = played(course, policy, executor)
    if not policy.keep_going or any(is_everybodys(ended) for ended in results.state.finished.values()):
        return
    made = {key for key, ended in results.state.finished.items() if ended.failure is None}
    for entry in course.plan.artifacts:
        if entry.is_published or not entry.key:
            continue
        wanted = {cell.key for cell in entry.cells if cell.status is CellStatus.QUEUED}
        assert wanted <= results.state.finished.keys()
        is_whole = all(cell.status is CellStatus.COMMITTED or cell.key in made for cell in entry.cells)
        assert (entry.key in results.state.finished) == is_whole


@given(courses(), POLICIES, EXECUTORS)
def test_an_artifact_is_published_only_when_all_of_its_cells_are_there(
    course: Course, policy: RetryPolicy, means: tuple[int, Random]
) -> None:
    executor = Played(course, *means)
    played(course, policy, executor)
    there = {cell.key for _, cell in course.plan.cells() if cell.status is CellStatus.COMMITTED}
    cells_of = {entry.key: {cell.key for cell in entry.cells} for entry in course.plan.artifacts}
    for what, job, ended in executor.diary:
        if what == "begins" and job.key in cells_of:
            assert cells_of[job.key] <= there
        if ended is not None and ended.failure is None:
            there.add(job.key)


@given(courses(), POLICIES, EXECUTORS)
def test_the_exit_code_is_0_only_when_every_cell_is_in_a_published_artifact(
    course: Course, policy: RetryPolicy, means: tuple[int, Random]
) -> None:
    results = played(course, policy, Played(course, *means))
    published = {key for key, ended in results.state.finished.items() if ended.failure is None}
    missing = [entry for entry in course.plan.artifacts if not entry.is_published and entry.key not in published]
    assert (results.exit_code == 0) == (not missing)
    assert len(results.missing()) == sum(len(entry.cells) for entry in missing)
    for entry in results.missing():
        assert (entry.status in (CellStatus.SKIPPED, CellStatus.BLOCKED)) == (entry.failure is None)
    codes = {entry.failure.code for entry in results.missing() if entry.failure and entry.status is CellStatus.FAILED}
    assert results.exit_code in {0, INCOMPLETE.number, *codes}


@given(st.fixed_dictionaries({key: st.lists(FAULTS, max_size=3) for key in "abcde"}), POLICIES, EXECUTORS)
def test_only_what_was_given_up_has_failed(
    failures: dict[str, list[Failure | None]], policy: RetryPolicy, means: tuple[int, Random]
) -> None:
    artifacts = (artifact("first", *map(cell, "abc")), artifact("second", *map(cell, "cde")))
    course = Course(BuildPlan("file:///nowhere", artifacts), failures)
    results = played(course, policy, Played(course, *means))
    given_up = {
        key for key, ended in results.state.finished.items() if is_final(ended, results.state.attempts[key], policy)
    }
    for entry in results.missing():
        assert (entry.status is CellStatus.FAILED) == (entry.cell.key in given_up)


@given(courses(), EXECUTORS, st.integers(0, 8))
def test_an_interruption_ends_all_and_says_so(course: Course, means: tuple[int, Random], after: int) -> None:
    executor = Played(course, *means, interrupted_after=after)
    results = played(course, RetryPolicy(keep_going=True, pause=0.0), executor)
    assert executor.is_closed
    if results.interrupted:
        assert results.exit_code == INTERRUPTED.number
    else:
        assert len(executor.diary) < after or not executor.running


def test_what_was_begun_is_carried_to_its_end_when_another_is_given_up() -> None:
    plan = BuildPlan("file:///nowhere", (artifact("a", cell("small"), cell("bad", work=2)),))
    course = Course(plan, {"bad": [failure(FailureClass.DETERMINISTIC)]})
    results = played(course, RetryPolicy(), Played(course, 2, Random(0)))
    assert {entry.cell.key: entry.status for entry in results.cells()} == {
        "small": CellStatus.BLOCKED,
        "bad": CellStatus.FAILED,
    }
    assert results.state.finished["small"].failure is None


@pytest.mark.parametrize(("left", "code"), [([], 11), ([cell("left")], INCOMPLETE.number)], ids=["all", "not all"])
def test_what_waits_for_another_attempt_when_the_run_is_stopped_has_not_failed(
    left: list[PlannedCell], code: int
) -> None:
    """Be all others tried by then or not."""
    cells = (cell("flaky", work=3), cell("bad", work=2), *left)
    passing, grave = failure(FailureClass.RETRYABLE, 30), failure(FailureClass.DETERMINISTIC, 11)
    course = Course(BuildPlan("file:///nowhere", (artifact("a", *cells),)), {"flaky": [passing], "bad": [grave]})
    results = played(course, RetryPolicy(pause=60.0), Played(course, 1, Random(0)))
    assert [(entry.cell.key, entry.status, entry.attempts, entry.failure) for entry in results.cells()] == [
        ("flaky", CellStatus.RETRYING, 1, passing),
        ("bad", CellStatus.FAILED, 1, grave),
        *((entry.key, CellStatus.SKIPPED, 0, None) for entry in left),
    ]
    assert results.exit_code == code


@pytest.mark.parametrize(("pause", "after"), [(60.0, 2), (0.0, 3)], ids=["before it begins", "before it ends"])
def test_an_interruption_of_another_attempt_is_no_failure(pause: float, after: int) -> None:
    course = Course(
        BuildPlan("file:///nowhere", (artifact("a", cell("flaky")),)), {"flaky": [failure(FailureClass.RETRYABLE)]}
    )
    results = played(course, RetryPolicy(pause=pause), Played(course, 1, Random(0), interrupted_after=after))
    (one,) = results.missing()
    assert (one.status, one.attempts) == (CellStatus.RETRYING, after // 2 + after % 2)
    assert results.exit_code == INTERRUPTED.number


def test_a_failure_after_all_attempts_is_one_whatever_it_met_before() -> None:
    course = Course(
        BuildPlan("file:///nowhere", (artifact("a", cell("x")),)), {"x": [failure(FailureClass.RETRYABLE, 30)] * 2}
    )
    results = played(course, RetryPolicy(retries=1, pause=0.0), Played(course, 1, Random(0)))
    assert [(entry.status, entry.attempts) for entry in results.missing()] == [(CellStatus.FAILED, 2)]
    assert results.exit_code == 30


@pytest.mark.parametrize(
    ("failures", "code"),
    [({}, 0), ({"x": 11}, 11), ({"x": 11, "y": 11}, 11), ({"x": 11, "y": 30}, INCOMPLETE.number)],
    ids=["none", "one", "alike", "different"],
)
def test_the_exit_code_is_that_of_the_one_failure(failures: dict[str, int], code: int) -> None:
    plan = BuildPlan("file:///nowhere", (artifact("a", cell("x")), artifact("b", cell("y"))))
    course = Course(plan, {key: [failure(FailureClass.LIMIT, number)] for key, number in failures.items()})
    assert played(course, RetryPolicy(keep_going=True), Played(course, 1, Random(0))).exit_code == code
