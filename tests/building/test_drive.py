"""The driver, whoever carries out: for every plan and every course of failures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.build.jobs import Begun, Ended, Event, Item
from nxpipe.pipeline.build.plan import Plan, PlannedCell
from nxpipe.pipeline.build.scheduler import Agenda, Policy, drive
from nxpipe.pipeline.build.state import Results
from nxpipe.pipeline.build.status import Fault
from nxpipe.pipeline.util.exit_codes import INCOMPLETE, INTERRUPTED, STORE
from tests.building.plans import FAULTS, THRESHOLDS, Course, artifact, cell, courses, fault

POLICIES = st.builds(Policy, keep_going=st.booleans(), retries=st.integers(0, 3), pause=st.just(0.0))


@dataclass
class Played:
    """An executor that ends items as a course says, in any order, and keeps a diary of what it was told to begin."""

    course: Course
    capacity: int
    chance: Random
    interrupted_after: int | None = None
    name: str = "local"
    diary: list[tuple[str, Item, Ended | None]] = field(default_factory=list)
    running: list[Item] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)
    is_closed: bool = False

    def takes(self, item: Item) -> bool:
        return len(self.running) < self.capacity

    def start(self, item: Item) -> None:
        assert self.takes(item)
        assert item.key not in {each.key for each in self.running}
        self.running.append(item)
        self.diary.append(("begins", item, None))

    def events(self, patience: float) -> Sequence[Event]:
        assert 0 < patience <= 1
        if self.interrupted_after is not None and len(self.diary) >= self.interrupted_after:
            raise KeyboardInterrupt
        if not self.running or self.chance.random() < 0.3:
            return ()
        item = self.running.pop(self.chance.randrange(len(self.running)))
        ended = Ended(item.key, 1.0, fault=self.course.end(item.key, self.attempts[item.key]))
        self.attempts[item.key] += 1
        self.diary.append(("ends", item, ended))
        return Begun(item.key, "somebody"), ended

    def close(self) -> None:
        self.is_closed = True


def played(course: Course, policy: Policy, executor: Played) -> Results:
    return drive(course.plan, Agenda.of(course.plan, THRESHOLDS), executor, policy, lambda event: None)


def is_final(ended: Ended, attempts: int, policy: Policy) -> bool:
    return ended.fault is not None and (ended.fault.sort != "environmental" or attempts > policy.retries)


def is_everybodys(ended: Ended) -> bool:
    return ended.fault is not None and (ended.fault.sort == "here" or ended.fault.code == STORE.number)


EXECUTORS = st.tuples(st.integers(1, 3), st.integers(0, 99).map(Random))


@given(courses(), POLICIES, EXECUTORS)
def test_every_item_ends_once_an_attempt_and_is_tried_again_only_after_what_may_pass(
    course: Course, policy: Policy, means: tuple[int, Random]
) -> None:
    executor = Played(course, *means)
    results = played(course, policy, executor)
    assert executor.is_closed
    assert not executor.running
    begun = Counter(item.key for what, item, _ in executor.diary if what == "begins")
    assert begun == executor.attempts == Counter(results.attempts)
    assert results.ended.keys() == begun.keys()
    for key, times in begun.items():
        ends = [ended for _, item, ended in executor.diary if ended and item.key == key]
        assert times <= policy.retries + 1
        assert all(ended.fault and ended.fault.sort == "environmental" for ended in ends[:-1])
        assert results.ended[key].fault == ends[-1].fault


@given(courses(), POLICIES, EXECUTORS)
def test_nothing_begins_after_a_failure_that_stops_the_run(
    course: Course, policy: Policy, means: tuple[int, Random]
) -> None:
    executor = Played(course, *means)
    played(course, policy, executor)
    is_stopped = not policy.keep_going and any(cell.fault for _, cell in course.plan.cells())
    attempts = Counter[str]()
    for what, item, ended in executor.diary:
        assert not (is_stopped and what == "begins")
        if ended is not None:
            attempts[item.key] += 1
            final = is_final(ended, attempts[item.key], policy)
            is_stopped |= final and (not policy.keep_going or is_everybodys(ended))


@given(courses(), POLICIES, EXECUTORS)
def test_with_keep_going_all_that_can_be_made_is_made(
    course: Course, policy: Policy, means: tuple[int, Random]
) -> None:
    executor = Played(course, *means)
    results = played(course, policy, executor)
    if not policy.keep_going or any(is_everybodys(ended) for ended in results.ended.values()):
        return
    made = {key for key, ended in results.ended.items() if ended.fault is None}
    for each in course.plan.artifacts:
        if each.is_published or not each.key:
            continue
        wanted = {cell.key for cell in each.cells if cell.state == "to do"}
        assert wanted <= results.ended.keys()
        is_whole = all(cell.state == "committed" or cell.key in made for cell in each.cells)
        assert (each.key in results.ended) == is_whole


@given(courses(), POLICIES, EXECUTORS)
def test_an_artifact_is_published_only_when_all_of_its_cells_are_there(
    course: Course, policy: Policy, means: tuple[int, Random]
) -> None:
    executor = Played(course, *means)
    played(course, policy, executor)
    there = {cell.key for _, cell in course.plan.cells() if cell.state == "committed"}
    cells_of = {each.key: {cell.key for cell in each.cells} for each in course.plan.artifacts}
    for what, item, ended in executor.diary:
        if what == "begins" and item.key in cells_of:
            assert cells_of[item.key] <= there
        if ended is not None and ended.fault is None:
            there.add(item.key)


@given(courses(), POLICIES, EXECUTORS)
def test_the_exit_code_is_0_only_when_every_cell_is_in_a_published_artifact(
    course: Course, policy: Policy, means: tuple[int, Random]
) -> None:
    results = played(course, policy, Played(course, *means))
    published = {key for key, ended in results.ended.items() if ended.fault is None}
    missing = [one for one in course.plan.artifacts if not one.is_published and one.key not in published]
    assert (results.exit_code == 0) == (not missing)
    assert len(results.missing()) == sum(len(one.cells) for one in missing)
    for one in results.missing():
        assert (one.fate == "not tried") == (one.fault is None)
    codes = {one.fault.code for one in results.missing() if one.fault and one.fate == "failed"}
    assert results.exit_code in {0, INCOMPLETE.number, *codes}


@given(st.fixed_dictionaries({key: st.lists(FAULTS, max_size=3) for key in "abcde"}), POLICIES, EXECUTORS)
def test_only_what_was_given_up_has_failed(
    faults: dict[str, list[Fault | None]], policy: Policy, means: tuple[int, Random]
) -> None:
    artifacts = (artifact("first", *map(cell, "abc")), artifact("second", *map(cell, "cde")))
    course = Course(Plan("file:///nowhere", artifacts), faults)
    results = played(course, policy, Played(course, *means))
    given_up = {key for key, ended in results.ended.items() if is_final(ended, results.attempts[key], policy)}
    for one in results.missing():
        assert (one.fate == "failed") == (one.cell.key in given_up)


@given(courses(), EXECUTORS, st.integers(0, 8))
def test_an_interruption_ends_all_and_says_so(course: Course, means: tuple[int, Random], after: int) -> None:
    executor = Played(course, *means, interrupted_after=after)
    results = played(course, Policy(keep_going=True, pause=0.0), executor)
    assert executor.is_closed
    if results.interrupted:
        assert results.exit_code == INTERRUPTED.number
    else:
        assert len(executor.diary) < after or not executor.running


def test_what_was_begun_is_carried_to_its_end_when_another_is_given_up() -> None:
    plan = Plan("file:///nowhere", (artifact("a", cell("small"), cell("bad", work=2)),))
    course = Course(plan, {"bad": [fault("deterministic")]})
    results = played(course, Policy(), Played(course, 2, Random(0)))
    assert {one.cell.key: one.fate for one in results.cells()} == {"small": "not tried", "bad": "failed"}
    assert results.ended["small"].fault is None


@pytest.mark.parametrize(("left", "code"), [([], 11), ([cell("left")], INCOMPLETE.number)], ids=["all", "not all"])
def test_what_waits_for_another_attempt_when_the_run_is_stopped_has_not_failed(
    left: list[PlannedCell], code: int
) -> None:
    """Be all others tried by then or not."""
    cells = (cell("flaky", work=3), cell("bad", work=2), *left)
    passing, grave = fault("environmental", 30), fault("deterministic", 11)
    course = Course(Plan("file:///nowhere", (artifact("a", *cells),)), {"flaky": [passing], "bad": [grave]})
    results = played(course, Policy(pause=60.0), Played(course, 1, Random(0)))
    assert [(one.cell.key, one.fate, one.attempts, one.fault) for one in results.cells()] == [
        ("flaky", "not retried", 1, passing),
        ("bad", "failed", 1, grave),
        *((one.key, "not tried", 0, None) for one in left),
    ]
    assert results.exit_code == code


@pytest.mark.parametrize(("pause", "after"), [(60.0, 2), (0.0, 3)], ids=["before it begins", "before it ends"])
def test_an_interruption_of_another_attempt_is_no_failure(pause: float, after: int) -> None:
    course = Course(Plan("file:///nowhere", (artifact("a", cell("flaky")),)), {"flaky": [fault("environmental")]})
    results = played(course, Policy(pause=pause), Played(course, 1, Random(0), interrupted_after=after))
    (one,) = results.missing()
    assert (one.fate, one.attempts, results.exit_code) == ("not retried", after // 2 + after % 2, INTERRUPTED.number)


def test_a_failure_after_all_attempts_is_one_whatever_it_met_before() -> None:
    course = Course(Plan("file:///nowhere", (artifact("a", cell("x")),)), {"x": [fault("environmental", 30)] * 2})
    results = played(course, Policy(retries=1, pause=0.0), Played(course, 1, Random(0)))
    assert [(one.fate, one.attempts) for one in results.missing()] == [("failed", 2)]
    assert results.exit_code == 30


@pytest.mark.parametrize(
    ("faults", "code"),
    [({}, 0), ({"x": 11}, 11), ({"x": 11, "y": 11}, 11), ({"x": 11, "y": 30}, INCOMPLETE.number)],
    ids=["none", "one", "alike", "different"],
)
def test_the_exit_code_is_that_of_the_one_failure(faults: dict[str, int], code: int) -> None:
    plan = Plan("file:///nowhere", (artifact("a", cell("x")), artifact("b", cell("y"))))
    course = Course(plan, {key: [fault("limit", number)] for key, number in faults.items()})
    assert played(course, Policy(keep_going=True), Played(course, 1, Random(0))).exit_code == code
