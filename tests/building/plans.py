"""Plans of invented builds of any shape: artifacts that share cells, in all states of a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from nxpipe.pipeline.build.jobs import CellStatus, Failure, FailureClass
from nxpipe.pipeline.build.plan import BuildPlan, PlannedArtifact, PlannedCell
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.models.weights import WeightsSource
from nxpipe.pipeline.util.exit_codes import STORE

THRESHOLDS = Thresholds(0.9, 0.1)
SEED = WeightsSource.parse("random:0")
ASKED = ModelSpec("m", None, None, "inf2.xlarge", 1, None, (1,), None, "none", "bf16", SEED)
REMEMBERED = Failure(FailureClass.DETERMINISTIC, "BuildRefused", "it failed before", 11)


@dataclass(frozen=True)
class Course:
    """The outcome of each attempt at each job; missing attempts succeed."""

    plan: BuildPlan
    failures: Mapping[str, Sequence[Failure | None]]

    def end(self, key: str, attempt: int) -> Failure | None:
        result = self.failures.get(key, ())
        return result[attempt] if attempt < len(result) else None


def artifact(key: str, *cells: PlannedCell) -> PlannedArtifact:
    return PlannedArtifact(key, key, ASKED, cells, memory=1)


def cell(key: str, status: CellStatus = CellStatus.QUEUED, work: float = 1.0) -> PlannedCell:
    failure = REMEMBERED if status in (CellStatus.FAILED, CellStatus.REFUSED) else None
    return PlannedCell(key, Shape("forward", 1, 8), status, work=work, failure=failure)


def failure(failure_class: FailureClass, code: int = 11) -> Failure:
    return Failure(failure_class, "Error", f"a failure that is {failure_class.value}", code)


FAULTS = st.one_of(
    st.none(),
    st.builds(failure, st.sampled_from(FailureClass), st.sampled_from((11, 30))),
    st.just(failure(FailureClass.RETRYABLE, STORE.number)),
)


@st.composite
def courses(draw: st.DrawFn) -> Course:
    names = [f"cell {number}" for number in range(draw(st.integers(1, 7)))]
    statuses = st.sampled_from([*[CellStatus.QUEUED] * 3, CellStatus.COMMITTED, CellStatus.FAILED])
    known = {name: cell(name, draw(statuses), draw(st.integers(0, 3))) for name in names}
    artifacts = [_artifact(draw, number, known) for number in range(draw(st.integers(1, 4)))]
    keys = [*names, *(entry.key for entry in artifacts)]
    outcomes = st.lists(FAULTS, min_size=1, max_size=4)
    failures = draw(st.dictionaries(st.sampled_from(keys), outcomes, max_size=3))
    return Course(BuildPlan("file:///nowhere", tuple(artifacts)), failures)


def _artifact(draw: st.DrawFn, number: int, known: Mapping[str, PlannedCell]) -> PlannedArtifact:
    some = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=4, unique=True))
    cells = [known[name] for name in some]
    kind = draw(st.sampled_from(("open", "open", "open", "published", "refused")))
    if kind == "published":
        cells = [cell(entry.key, CellStatus.PUBLISHED) for entry in cells]
    if kind == "refused":
        return artifact("", *(cell("", CellStatus.REFUSED) for _ in cells))
    return artifact(f"artifact {number}", *cells)
