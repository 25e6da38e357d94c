"""One `nxpipe build`, from what is asked for to its exit code."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxpipe.artifact_store.errors import StoreUnavailable
from nxpipe.pipeline.build.agenda import Agenda
from nxpipe.pipeline.build.asked import Asked
from nxpipe.pipeline.build.drive import Policy
from nxpipe.pipeline.build.events import Event
from nxpipe.pipeline.build.execute import Means, execute, note_timings
from nxpipe.pipeline.build.executors.protocol import Limits
from nxpipe.pipeline.build.plan import make_plan
from nxpipe.pipeline.build.planned import Plan
from nxpipe.pipeline.build.report.live import watch
from nxpipe.pipeline.build.report.plan_text import plan_json, plan_table
from nxpipe.pipeline.build.results import Results
from nxpipe.pipeline.build.shown import published_of, show_artifacts, show_end
from nxpipe.pipeline.build.timings import Timings
from nxpipe.pipeline.compile import utilisation
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.verify.judged import report_of
from nxpipe.pipeline.verify.verify import Thresholds

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.pipeline.build.report.recorder import Recorder
    from nxpipe.pipeline.config import Config


@dataclass
class Run:
    """`said` are the words of the command line; what they leave open the configuration says."""

    console: Console
    store: "Store"
    config: "Config"
    thresholds: Thresholds
    state: Path
    said: Mapping[str, Any]
    recorder: "Recorder | None" = None

    @property
    def timings(self) -> Timings:
        return Timings.kept_in(self.state)

    def plan(self, asked: Sequence[Asked]) -> Plan:
        return make_plan(asked, self.store, self.thresholds, self.timings, force=self.said["force"], hints=True)

    def show(self, plan: Plan) -> int:
        """A dry run."""
        if self.console.json:
            self.console.data(plan_json(plan))
        else:
            self.console.page(plan_table(plan))
        return plan.exit_code

    def carry_out(self, plan: Plan) -> Results:
        kms_key = self.config.store.kms_key
        agenda = Agenda.of(plan, self.thresholds, force=self.said["force"], kms_key=kms_key)
        self._say_reasons(plan)
        policy = Policy(self.said["keep_going"], self.said["retries"])
        with watch(self.console, plan) as shown:
            return execute(plan, self.store, agenda, self._means(), policy, self._told(shown.handle))

    def _told(self, show: Any) -> Any:
        from nxpipe.pipeline.build.report.recorder import Recorder

        self.recorder = recorder = Recorder()

        def tell(event: Event) -> None:
            recorder.handle(event)
            show(event)

        return tell

    def _means(self) -> Means:
        section, said = self.config.build, self.said
        seconds = said["timeout"] or (section.timeout.total_seconds() if section.timeout else None)
        jobs = said["jobs"] or (section.parallelism if isinstance(section.parallelism, int) else None)
        limits = Limits(seconds, said["memory_limit"])
        executor, project = said["executor"] or section.executor, self.config.project
        return Means(executor, limits, jobs, said["address"], project.name, project.region)

    def _say_reasons(self, plan: Plan) -> None:
        """Why what is to be done was not found, once for all that it is true of."""
        for why in dict.fromkeys(cell.why for _, cell in plan.cells() if cell.state == "to do" and cell.why):
            self.console.say(f"  {why}")


def finish(run: Run, results: Results) -> int:
    """Say what came of it, keep the reports, and give the exit code."""
    note_timings(results, run.timings)
    try:
        published = published_of(run.store, results)
        figures = {one.request_key: utilisation.read(one.manifest, run.store) for one in published.values()}
        verified = {one.request_key: report_of(one.manifest, run.store) for one in published.values()}
    except StoreUnavailable:
        if not results.missing():
            raise
        published, figures, verified = {}, {}, {}  # what went wrong is said below
    show_artifacts(run.console, published, figures, verified, results)
    files = _kept_reports(run, results, published, figures)
    show_end(run.console, results, files)
    _tell_github(run.console, results)
    return results.exit_code


def _kept_reports(
    run: Run, results: Results, published: Mapping[str, "Published"], figures: Mapping[str, dict[str, Any]]
) -> Path | None:
    """Of a run in which something was done: in a folder here, and beside every artifact that it published."""
    if not results.attempts or run.recorder is None:
        return None
    from nxpipe.artifact_store.builds import store_report
    from nxpipe.pipeline.build.report.keeping import keep_report

    files = keep_report(results, run.recorder, run.state / "builds", figures)
    html, json = files.html.read_bytes(), files.json.read_bytes()
    try:
        for key, one in published.items():
            if key in results.attempts:
                store_report(run.store, one.manifest_digest, results.began_at, html=html, json=json)
    except StoreUnavailable as error:  # what was built is there, and so is the report
        run.console.say(f"  the report is not kept in the store: {error}")
    return files.html


def _tell_github(console: Console, results: Results) -> None:
    from nxpipe.pipeline.build.report.github import annotations, in_github, show_summary, write_summary

    if in_github(os.environ):
        show_summary(console, lambda: write_summary(results, os.environ))
        for line in annotations(results):
            console.command(line)
