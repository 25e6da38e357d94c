"""From a plan to its results: who carries it out, who watches, what is left to read."""

from collections.abc import Callable
from dataclasses import dataclass

from nxpipe.artifact_store import Store
from nxpipe.pipeline.build.agenda import Agenda
from nxpipe.pipeline.build.drive import Policy, drive
from nxpipe.pipeline.build.events import Event
from nxpipe.pipeline.build.executors.inline import InlineExecutor
from nxpipe.pipeline.build.executors.protocol import Executor, Limits
from nxpipe.pipeline.build.planned import Plan
from nxpipe.pipeline.build.results import Results
from nxpipe.pipeline.build.size import LITTLE
from nxpipe.pipeline.build.timings import Timings, name_of
from nxpipe.pipeline.util.process import processors


@dataclass(frozen=True)
class Means:
    """Who carries items out, and within which limits. `project` and `region` say where the build farm is."""

    executor: str
    limits: Limits
    jobs: int | None
    address: str | None
    project: str
    region: str | None


def execute(
    plan: Plan, store: Store, agenda: Agenda, means: Means, policy: Policy, watch: Callable[[Event], None]
) -> Results:
    """Where nothing is left to do, no cluster is started for it."""
    executor = _executor(plan, store, means, watch) if agenda else InlineExecutor(watch)
    return drive(plan, agenda, executor, policy, watch)


def note_timings(results: Results, timings: Timings) -> None:
    """What was made, for the estimates of the next plan."""
    built = [one for one in results.cells() if one.fate == "built" and one.seconds]
    timings.note({name_of(one.artifact.asked.request(), one.cell.shape): (one.cell.work, one.seconds) for one in built})


def _executor(plan: Plan, store: Store, means: Means, watch: Callable[[Event], None]) -> Executor:
    if means.executor == "ray":
        from nxpipe.pipeline.build.executors.ray import RayExecutor

        return RayExecutor(means.address, means.limits, means.jobs)
    if means.executor == "batch":
        from nxpipe.pipeline.build.executors.batch import BatchExecutor
        from nxpipe.pipeline.build.executors.batch_farm import find_farm

        return BatchExecutor(store, find_farm(means.project, means.region), means.limits)
    to_do = [cell.work for _, cell in plan.cells() if cell.state == "to do"]
    if means.limits == Limits() and (len(to_do) <= 1 or (means.jobs is None and sum(to_do) <= LITTLE)):
        return InlineExecutor(watch)
    from nxpipe.pipeline.build.executors.local import LocalExecutor

    return LocalExecutor(means.jobs or max(min(processors(), len(to_do)), 1), means.limits)
