"""One `nxpipe build`: plan, jobs, output, report and exit code. `UnfinishedBuild` is what `--resume` reads."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxpipe.artifact_store.errors import StoreUnavailable
from nxpipe.pipeline.build.cache import Timings, timing_key
from nxpipe.pipeline.build.jobs import CellStatus, JobLimits
from nxpipe.pipeline.build.options import BuildOptions
from nxpipe.pipeline.build.plan import BuildPlan, make_plan
from nxpipe.pipeline.build.report.live import live_view
from nxpipe.pipeline.build.report.plan_text import plan_json, plan_table
from nxpipe.pipeline.build.report.summary import published_artifacts, show_artifacts, show_end
from nxpipe.pipeline.build.scheduler import ExecutorOptions, JobQueue, RetryPolicy, execute
from nxpipe.pipeline.build.state import BuildState, Results
from nxpipe.pipeline.compile import utilisation
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.thresholds import Thresholds, report_of
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import BuildRefused
from nxpipe.pipeline.util.files import MiB, json_of, read_file, write_whole

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.pipeline.config import Config


@dataclass
class BuildRun:
    """`state_folder` is the project's `.nxpipe`: reports, timings and the arguments of an unfinished build."""

    console: Console
    store: "Store"
    config: "Config"
    thresholds: Thresholds
    state_folder: Path
    options: BuildOptions

    @property
    def timings(self) -> Timings:
        return Timings.kept_in(self.state_folder)

    def plan(self, asked: Sequence[ModelSpec]) -> BuildPlan:
        return make_plan(asked, self.store, self.thresholds, self.timings, force=self.options.force, hints=True)

    def show(self, plan: BuildPlan) -> int:
        """A dry run."""
        if self.console.json:
            self.console.data(plan_json(plan))
        else:
            self.console.page(plan_table(plan))
        return plan.exit_code

    def execute(self, plan: BuildPlan) -> Results:
        queue = JobQueue.of(plan, self.thresholds, force=self.options.force, kms_key=self.config.store.kms_key)
        for why in dict.fromkeys(cell.why for _, cell in plan.cells() if cell.status is CellStatus.QUEUED and cell.why):
            self.console.say(f"  {why}")
        policy = RetryPolicy(self.options.keep_going, self.options.retries)
        state = BuildState(plan)
        with live_view(self.console, state):
            return execute(state, self.store, queue, self._executor_options(), policy)

    def finish(self, results: Results) -> int:
        """Print the artifacts and what is missing, write the reports, and return the exit code."""
        _record_timings(results, self.timings)
        try:
            published = published_artifacts(self.store, results)
            figures = {one.request_key: utilisation.read(one.manifest, self.store) for one in published.values()}
            verified = {one.request_key: report_of(one.manifest, self.store) for one in published.values()}
        except StoreUnavailable:
            if not results.missing():
                raise
            published, figures, verified = {}, {}, {}  # the failure is printed below
        show_artifacts(self.console, published, figures, verified, results)
        page = self._write_reports(results, published, figures)
        show_end(self.console, results, page)
        _annotate_github(self.console, results)
        return results.exit_code

    def _executor_options(self) -> ExecutorOptions:
        section, options = self.config.build, self.options
        seconds = options.timeout or (section.timeout.total_seconds() if section.timeout else None)
        jobs = options.jobs or (section.parallelism if isinstance(section.parallelism, int) else None)
        limits, project = JobLimits(seconds, options.memory_limit), self.config.project
        executor = options.executor or section.executor
        return ExecutorOptions(executor, limits, jobs, options.address, project.name, project.region)

    def _write_reports(
        self, results: Results, published: Mapping[str, "Published"], figures: Mapping[str, dict[str, Any]]
    ) -> Path | None:
        """If a job ran: in the state folder, and beside each artifact that this build published."""
        attempts = results.state.attempts
        if not attempts:
            return None
        from nxpipe.artifact_store.builds import store_report
        from nxpipe.pipeline.build.report.document import write_report

        files = write_report(results, self.state_folder / "builds", figures)
        html, json = files.html.read_bytes(), files.json.read_bytes()
        try:
            for key, one in published.items():
                if key in attempts:
                    store_report(self.store, one.manifest_digest, results.began_at, html=html, json=json)
        except StoreUnavailable as error:  # the artifacts and the local report are complete
            self.console.say(f"  the report was not stored beside the artifacts: {error}")
        return files.html


def _record_timings(results: Results, timings: Timings) -> None:
    """For the estimates of the next plan."""
    built = [one for one in results.cells() if one.status is CellStatus.BUILT and one.seconds]
    keys = [timing_key(BuildSpec.of(one.artifact.asked), one.cell.shape) for one in built]
    timings.note({key: (one.cell.work, one.seconds) for key, one in zip(keys, built, strict=True)})


def _annotate_github(console: Console, results: Results) -> None:
    if "GITHUB_ACTIONS" not in os.environ:
        return
    from nxpipe.pipeline.build.report.github import annotations, in_github, show_summary, write_summary

    if in_github(os.environ):
        show_summary(console, lambda: write_summary(results, os.environ))
        for line in annotations(results):
            console.command(line)


class UnfinishedBuild:
    """Arguments of a build that began and has not published everything."""

    def __init__(self, state_folder: Path) -> None:
        self._path = state_folder / "unfinished-build.json"

    def begin(self, arguments: Sequence[str]) -> None:
        """Best effort: without the file there is no `--resume`."""
        with suppress(OSError):
            write_whole(self._path, json.dumps(list(arguments)).encode())

    def end(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def arguments(self) -> list[str]:
        try:
            found = json_of(read_file(self._path, limit=MiB))
        except (OSError, ValueError):
            found = None
        if not isinstance(found, list):
            raise BuildRefused(f"no unfinished build: {self._path} does not exist; run nxpipe build without --resume")
        return [str(argument) for argument in found]
