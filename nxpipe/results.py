"""Results of the Python API that put several results of the library together, each with its tables and charts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.profile.charts import time_text
from nxpipe.pipeline.profile.summary import summary as profile_summary
from nxpipe.pipeline.util.display import BarsPart, Displayed, Part, SharesPart, TablePart
from nxpipe.pipeline.util.files import write_whole
from nxpipe.pipeline.util.text import human_bytes, unstyled

if TYPE_CHECKING:
    from nxpipe.artifact_store.difference import ManifestDifference
    from nxpipe.artifact_store.index.leaves import Difference
    from nxpipe.pipeline.artifacts.bench import BenchLine
    from nxpipe.pipeline.artifacts.difference import ProgramDifference
    from nxpipe.pipeline.build.explain import CacheLookup
    from nxpipe.pipeline.plan.serve import Plan, ServingPlan
    from nxpipe.pipeline.plan.serve_report import GpuComparison
    from nxpipe.pipeline.profile.programs import ProfiledProgram
    from nxpipe.pipeline.verify.comparison import Comparison

_ROWS: Final = 10
_WIDTH: Final = 100  # columns of text at a prompt


class Verification(Displayed, tuple["Comparison", ...]):
    """The comparisons of a verification, one for each program and reference."""

    def display(self) -> Iterator[Part]:
        rows = []
        for comparison in self:
            results = [(result, comparison.reference) for result in comparison.emulated]
            for result, reference in results:
                for output in result.outputs:
                    rows.append(
                        (
                            *(comparison.program, output.output, reference, result.variant),
                            *(f"{output.cosine:.7f}", f"{output.max_absolute:.3g}", f"{output.max_relative:.3g}"),
                        )
                    )
        header = ("program", "output", "reference", "run", "cosine", "max absolute error", "max relative error")
        yield TablePart("", header, rows)


class Profile(Displayed):
    """Profiles of programs: where their predicted time goes. `str` is the summary of `nxpipe profile`."""

    def __init__(self, programs: "Sequence[ProfiledProgram]") -> None:
        self.programs = tuple(programs)

    def __getitem__(self, name: str) -> "ProfiledProgram":
        """A program by its name."""
        return next(program for program in self.programs if program.name == name)

    def summary(self) -> str:
        """The summary of each program: times, critical path, operators, gaps, and changes that would help most."""
        return unstyled("\n\n".join(map(profile_summary, self.programs)))

    def save_trace(self, path: str | Path) -> Path:
        """Write a trace that ui.perfetto.dev opens."""
        from nxpipe.pipeline.profile.trace import to_bytes, trace_document

        write_whole(Path(path), to_bytes(trace_document(self.programs)))
        return Path(path)

    def save_page(self, path: str | Path) -> Path:
        """Write a page with all charts, which needs no network."""
        from nxpipe.pipeline.profile.page import profile_page

        write_whole(Path(path), profile_page(self.programs))
        return Path(path)

    def __str__(self) -> str:
        return self.summary()

    def display(self) -> Iterator[Part]:
        rows = [
            (
                *(each.name, time_text(each.profile.latency_ps), str(each.aws), each.profile.whole.bound_by or "-"),
                *(_floor(each), human_bytes(each.profile.utilisation.traffic)),
            )
            for each in self.programs
        ]
        header = ("program", "predicted", "AWS's compiler", "bound by", "of its floor", "HBM traffic")
        yield TablePart("", header, rows)
        for each in self.programs:
            yield from _profile_parts(each)


def _floor(program: "ProfiledProgram") -> str:
    factor = program.profile.utilisation.over_floor
    return "-" if factor is None else f"{factor:.1f} x"


def _profile_parts(program: "ProfiledProgram") -> Iterator[Part]:
    profile, total = program.profile, max(program.profile.latency_ps, 1)
    path = [(name, float(ps)) for name, ps in profile.whole.path.items()]
    yield SharesPart(f"{program.name}: critical path", path, total)
    busy = [(name, ps / total, f"{ps / total:.0%}") for name, ps in profile.busy.items() if ps]
    yield BarsPart("Busy share of each engine", sorted(busy, key=lambda bar: -bar[1]))
    operators = [
        (name, share.on_path / total, f"{share.on_path / total:.1%}")
        for name, share in list(profile.by_operator.items())[:_ROWS]
    ]
    yield BarsPart("Largest operators, by their share of the critical path", operators)
    if program.changes:
        changes = [
            (f"-{change.gain:.0%}", time_text(change.latency_ns * 1000), change.action)
            for change in program.changes[:_ROWS]
        ]
        yield TablePart("Changes that would help most, each an upper bound", ("gain", "then", "action"), changes)


class CapacityPlan(Displayed):
    """Serving plans, the cheapest first, beside GPUs. `str` is the output of `nxpipe plan serve`."""

    def __init__(self, plan: "ServingPlan", comparison: "GpuComparison") -> None:
        self.plan, self.comparison = plan, comparison

    @property
    def plans(self) -> "tuple[Plan, ...]":
        return self.plan.plans

    @property
    def best(self) -> "Plan | None":
        """The cheapest plan within the budget; None if no instance type meets the objectives."""
        return self.plan.best

    def document(self) -> dict[str, Any]:
        """What `nxpipe plan serve --json` prints."""
        from nxpipe.pipeline.plan.serve_report import document

        return document(self.plan, self.comparison)

    def save_page(self, path: str | Path) -> Path:
        """Write a page with charts, which needs no network."""
        from nxpipe.pipeline.plan.serve_page import plan_page

        write_whole(Path(path), plan_page(self.plan, self.comparison))
        return Path(path)

    def __str__(self) -> str:
        from nxpipe.pipeline.plan.serve_report import summary

        return unstyled(summary(self.plan, self.comparison, _WIDTH))

    def display(self) -> Iterator[Part]:
        from nxpipe.pipeline.plan.serve_report import money, money_between, price_dates

        demand, plans = self.plan.demand, self.plan.plans
        objectives = [f"{name} {each}" for name, each in (("TTFT", demand.ttft), ("TPOT", demand.tpot)) if each]
        yield (
            f"{self.plan.model.name}: {demand.rate:g} requests/s, prompts of {demand.prompt:,.0f} and answers of "
            f"{demand.output:,.0f} tokens; {', '.join(objectives) or 'no objective of latency'}; {demand.region}, "
            f"{price_dates(self.plan, self.comparison.gpus)}"
        )
        rows = [
            (
                *(f"{each.fleet.size} x {each.instance.name}", str(each.purchase), f"{each.candidate.tp}"),
                *(str(each.candidate.replica.rows), money_between(each.per_million), money(each.monthly.nominal)),
                *_latencies(each),
            )
            for each in plans
        ]
        header = ("instances", "bought", "tp", "batch", "$ for 1M tokens", "$ a month", "TTFT p95", "TPOT p95")
        yield TablePart("Plans", header, rows) if rows else "No instance type meets this."
        if len(costs := [(row[0], each.monthly.nominal) for row, each in zip(rows, plans, strict=True)]) > 1:
            yield BarsPart("$ a month", [(name, cost, money(cost)) for name, cost in costs if cost is not None])
        if self.comparison.gpus:
            gpus = [
                (
                    f"{each.sizes.nominal:.0f} x {each.instance}",
                    money_between(each.per_million),
                    money(each.monthly.nominal),
                )
                for each in self.comparison.gpus
            ]
            yield TablePart("GPUs", ("instances", "$ for 1M tokens", "$ a month"), gpus)
        if verdict := self.comparison.verdict(self.plan):
            yield f"{verdict[:1].upper()}{verdict[1:]}."
        if refused := [f"{each}" for each in self.plan.refused]:
            yield TablePart("Not possible", ("",), [(each,) for each in refused])


def _latencies(plan: "Plan") -> tuple[str, str]:
    outcome = plan.load.outcome
    if outcome is None:
        return "-", "-"
    tpot = f"{outcome.tpot_at(0.95) * 1e3:,.1f} ms" if outcome.tpot else "-"
    return f"{outcome.ttft_at(0.95) * 1e3:,.0f} ms", tpot


class Bench(Displayed):
    """Predicted times of programs, beside those of a baseline."""

    def __init__(self, lines: "Sequence[BenchLine]", threshold: float) -> None:
        self.lines, self.threshold = tuple(lines), threshold

    @property
    def regressions(self) -> "tuple[BenchLine, ...]":
        """The programs that are slower than the baseline by more than the threshold."""
        return tuple(line for line in self.lines if line.is_regression(self.threshold))

    def display(self) -> Iterator[Part]:
        rows = [
            (
                *(line.artifact, line.program.name, _milliseconds(line.program.ns)),
                _milliseconds(line.before.ns if line.before else None),
                "-" if line.change is None else f"{line.change:+.1%}",
                line.verdict(self.threshold),
            )
            for line in self.lines
        ]
        yield TablePart("", ("artifact", "program", "device time", "before", "change", "verdict"), rows)
        timed = [(line.program.name, line.program.ns, _milliseconds(line.program.ns)) for line in self.lines]
        bars = [(name, ns, shown) for name, ns, shown in timed if ns is not None]
        if len(bars) > 1:
            yield BarsPart("Predicted device time", bars, in_table=True)


def _milliseconds(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.3f} ms"


@dataclass(frozen=True, repr=False)
class ArtifactDifference(Displayed):
    """The differences of two artifacts: the fields of the cache key, figures and graphs of programs, blobs."""

    before: str
    after: str
    key_inputs: "tuple[Difference, ...]"
    manifests: "ManifestDifference"
    programs: "tuple[ProgramDifference, ...]"

    @property
    def is_empty(self) -> bool:
        sections = any(section.differing for section in self.manifests.sections)
        return not (self.key_inputs or self.manifests.identity or sections)

    def display(self) -> Iterator[Part]:
        yield f"A: {self.before}   B: {self.after}" + ("   no difference" if self.is_empty else "")
        if self.key_inputs:
            yield TablePart("Cache key", ("field", "A", "B"), _fields(self.key_inputs))
        figures = [
            (program.name, name.replace("_", " "), _figure(before), _figure(after), _change(before, after))
            for program in self.programs
            for name, (before, after) in program.figures.items()
            if before != after
        ]
        if figures:
            yield TablePart("Programs", ("program", "figure", "A", "B", "change"), figures)
        sections = [
            (section.title, str(len(section.changed)), str(len(section.added)), str(len(section.removed)))
            for section in self.manifests.sections
            if section.differing
        ]
        if sections:
            yield TablePart("Content", ("", "changed", "added", "removed"), sections)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _change(before: float | None, after: float | None) -> str:
    return f"{after / before - 1:+.1%}" if before and after is not None else "-"


def _fields(differences: "Sequence[Difference]") -> list[tuple[str, str, str]]:
    from nxpipe.pipeline.build.plan import shorten

    return [(each.path, shorten(each.before), shorten(each.after)) for each in differences]


class Explanation(Displayed):
    """Why a build is a cache hit or a miss: its programs, and the fields that differ from the nearest artifacts."""

    def __init__(self, lookup: "CacheLookup", url: str) -> None:
        self.lookup, self.url = lookup, url

    @property
    def is_hit(self) -> bool:
        return self.lookup.is_hit

    def display(self) -> Iterator[Part]:
        lookup = self.lookup
        yield f"{lookup.model}@{lookup.key[:12]} is{'' if lookup.is_hit else ' not'} in {self.url}"
        rows = [
            (each.cell.shape.name, each.cell.status.value, each.cell.why or "-" if each.cell.failure is None
             else each.cell.failure.message)
            for each in lookup.programs
        ]  # fmt: skip
        if rows:
            yield TablePart("", ("program", "state", "why"), rows)
        for nearest in () if lookup.is_hit else lookup.nearest:
            count = len(nearest.differences)
            title = f"{nearest.published.name} differs in {count} of {nearest.fields} fields"
            yield TablePart(title, ("field", "stored", "wanted"), _fields(nearest.differences))
