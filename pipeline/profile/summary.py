"""Summary of a profile for a terminal, and the difference of two programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.predict.constants import PREDICTED, THIS_PROGRAM
from nxpipe.pipeline.profile.charts import time_text
from nxpipe.pipeline.profile.programs import Identity, ProfiledProgram
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.text import for_terminal, human_bytes, page_width, style, table

if TYPE_CHECKING:
    from nxpipe.emulator.analysis.profile import PathShare, Profile

_ROWS: Final = 8
_LEAST_SHARE: Final = 0.005


def summary(program: ProfiledProgram) -> str:
    """Several lines: times, critical path, the largest operators and modules, gaps, and changes."""
    profile = program.profile
    total = max(profile.latency_ps, 1)
    sections = [
        style(for_terminal(f"{program.title} for {program.target}"), bold=True),
        "\n".join(f"{name:<16}{value}" for name, value in _times(program)),
        table(("operator", "critical path", "share", "bound by"), list(_largest(profile.by_operator, total))),
        table(("module", "critical path", "share", "bound by"), list(_largest(profile.by_module, total))),
        _gaps(profile),
        _changes(program),
    ]
    return "\n\n".join(filter(None, sections))


def _times(program: ProfiledProgram) -> Iterator[tuple[str, str]]:
    profile, used = program.profile, program.profile.utilisation
    total, bound = max(profile.latency_ps, 1), profile.whole.bound_by
    time = time_text(profile.latency_ps)
    if bound:
        time += f", bound by {bound} for {profile.whole.path[bound] / total:.0%} of it"
    if used.over_floor:
        floors = used.floors_ns
        limit = max(floors, key=lambda name: floors[name])
        time += f"; {used.over_floor:.1f} x its floor of {time_text(floors[limit] * 1000)} ({limit})"
    yield THIS_PROGRAM, time
    reason = f" ({for_terminal(program.aws.reason)})" if program.aws.reason else ""
    yield PREDICTED, f"{program.aws}{reason}"
    path = sorted(profile.whole.path.items(), key=lambda item: -item[1])
    yield "critical path", ", ".join(f"{name} {ps / total:.0%}" for name, ps in path if ps >= _LEAST_SHARE * total)
    if profile.busiest:
        yield "busiest engine", f"{profile.busiest}, {profile.busy[profile.busiest] / total:.0%} of the time"
    spilled = f"{human_bytes(used.spilled)} of it spilled and read back"
    yield "HBM", f"{human_bytes(used.traffic)} read and written, {spilled}"
    if profile.memory:
        usages = profile.memory.by_memory.items()
        yield "memory at peak", ", ".join(f"{name.upper()} {human_bytes(usage.peak)}" for name, usage in usages)


def _largest(shares: "Mapping[str, PathShare]", total: int) -> Iterator[tuple[str, str, str, str]]:
    for name, share in list(shares.items())[:_ROWS]:
        yield name, time_text(share.on_path), f"{share.on_path / total:.1%}", share.bound_by or "-"


def _gaps(profile: "Profile") -> str:
    if not profile.gaps:
        return ""
    total, idle = max(profile.latency_ps, 1), sum(profile.gaps.values())
    rows = [
        (time_text(ps), f"{reason.resource}: {reason.work}", f"{reason.place.operator} of {reason.place.module}")
        for reason, ps in list(profile.gaps.items())[:_ROWS]
    ]
    header = f"{profile.busiest} idles for {time_text(idle)}, {idle / total:.0%} of the time:"
    return f"{header}\n{table(('idle', 'it waits for', 'at'), rows)}"


def _changes(program: ProfiledProgram) -> str:
    if not program.changes:
        return "no change of one cost gains 1% or more"
    rows = [
        (f"-{change.gain:.0%}", f"{change.name}: {time_text(change.latency_ns * 1000)}", change.action)
        for change in program.changes
    ]
    head = "changes that would help most, each an upper bound for its action alone:"
    return f"{head}\n{table(('gain', 'if', 'action'), rows, page_width(120))}"


# Differences


@dataclass(frozen=True)
class Line:
    """A figure of two programs: a time in ps, or bytes."""

    kind: str
    name: str
    before: int
    after: int

    @property
    def change(self) -> int:
        return self.after - self.before

    def cells(self) -> tuple[str, ...]:
        shown = (lambda value: human_bytes(int(value))) if self.kind == "bytes" else time_text
        sign = "+" if self.change > 0 else "-" if self.change < 0 else ""
        relative = f"{self.change / self.before:+.1%}" if self.before and self.change else "" if self.before else "new"
        return self.name, shown(self.before), shown(self.after), f"{sign}{shown(abs(self.change))}", relative


@dataclass(frozen=True, eq=False)
class ProfileDifference:
    """The figures of two programs; a figure that only one of them has is 0 in the other."""

    before: ProfiledProgram
    after: ProfiledProgram

    def lines(self) -> Iterator[Line]:
        """All figures, by kind: total, critical path, busy, operators, modules, bytes."""
        one, other = self.before.profile, self.after.profile
        yield Line("total", THIS_PROGRAM, one.latency_ps, other.latency_ps)
        yield from _paired("critical path", one.whole.path, other.whole.path)
        yield from _paired("busy", one.busy, other.busy)
        yield from _paired("operator", _on_path(one.by_operator), _on_path(other.by_operator))
        yield from _paired("module", _on_path(one.by_module), _on_path(other.by_module))
        yield from _paired("bytes", _traffic(one), _traffic(other))

    def text(self) -> str:
        by_kind: dict[str, list[Line]] = {}
        for line in self.lines():
            by_kind.setdefault(line.kind, []).append(line)
        sections = [style(for_terminal(f"{self.before.title} -> {self.after.title}"), bold=True)]
        for kind, lines in by_kind.items():
            changed = [line for line in lines if line.change or kind == "total"]
            largest = sorted(changed, key=lambda line: -abs(line.change))[:_ROWS]
            if largest:
                sections.append(
                    table((kind, "before", "after", "change", "relative"), [line.cells() for line in largest])
                )
        if len(sections) == 2 and not any(line.change for line in self.lines()):
            sections.append("no figure differs")
        return "\n\n".join(sections)

    def document(self) -> dict[str, Any]:
        def entry(line: Line) -> dict[str, Any]:
            unit = 1 if line.kind == "bytes" else 1000
            before, after, change = (
                value / unit if unit > 1 else value for value in (line.before, line.after, line.change)
            )
            return {"name": line.name, "before": before, "after": after, "change": change}

        figures: dict[str, list[dict[str, Any]]] = {}
        for line in self.lines():
            name = "bytes" if line.kind == "bytes" else f"{line.kind.replace(' ', '_')}_ns"
            figures.setdefault(name, []).append(entry(line))
        titles = {
            side: {"program": each.name, "origin": each.origin, "aws_compiler": each.aws.document()}
            for side, each in (("before", self.before), ("after", self.after))
        }
        return {**titles, **figures}


def differences(before: Sequence[ProfiledProgram], after: Sequence[ProfiledProgram]) -> list[ProfileDifference]:
    """The programs of one side with those of the other: the only ones, else those of one configuration."""
    if len(before) == 1 and len(after) == 1:
        return [ProfileDifference(before[0], after[0])]
    known: dict[Identity | None, ProfiledProgram] = {program.identity: program for program in before}
    pairs = [ProfileDifference(known[program.identity], program) for program in after if program.identity in known]
    if not pairs:
        names = (", ".join(program.name for program in side) for side in (before, after))
        raise InputInvalid(f"no program in common: {' and '.join(names)}; select one of each with ARTIFACT:PROGRAM")
    return pairs


def _paired(kind: str, one: Mapping[str, int], other: Mapping[str, int]) -> Iterator[Line]:
    for name in sorted(one.keys() | other.keys()):
        yield Line(kind, name, one.get(name, 0), other.get(name, 0))


def _on_path(shares: "Mapping[str, PathShare]") -> dict[str, int]:
    return {name: share.on_path for name, share in shares.items()}


def _traffic(profile: "Profile") -> dict[str, int]:
    total, used = profile.utilisation.totals, profile.utilisation
    return {"HBM read": total.read["hbm"], "HBM written": total.written["hbm"], "spilled": used.spilled}
