"""Formats of a report: text (verdict, errors, memory, notes) and SARIF 2.1.0."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

from nxpipe.emulator.analysis.graph_memory import GraphMemory
from nxpipe.pipeline import VERSION
from nxpipe.pipeline.check.report import Report, Row, TargetFit
from nxpipe.pipeline.compile.findings import RULES, Finding, Rule, Severity
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.text import Column, for_terminal, shown, style, table

_GIB: Final = 1 << 30
_PARTS: Final = (
    Column("tp"),
    Column("weights", drop=3),
    Column("KV cache", drop=4),
    Column("activations", drop=5),
    Column("I/O and constants", drop=6),
)
_DEGREES: Final = (*_PARTS, Column("code", drop=7), Column("total"), Column("used"), Column("fits"), Column("note"))
_PROGRAMS: Final = ("program", "operators", Column("with repeats", drop=2), Column("graph key", drop=1))
_OWN_COMPILER: Final = "nxpipe's own compiler lowered the programs; neuronx-cc was not run."
_COLOURS: Final = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "blue"}


def as_text(report: Report) -> str:
    parts = [verdict(report)]
    parts += [_finding(finding) for finding in report.of(Severity.ERROR)]
    parts += _programs(report)
    if any(fit.rows for fit in report.fits):
        parts += _memory(report)
    parts += [_finding(finding) for finding in report.findings if finding.severity is not Severity.ERROR]
    parts += [_OWN_COMPILER] if report.programs else []
    return "\n\n".join(parts)


def verdict(report: Report) -> str:
    """One sentence: whether the model lowers, and the smallest instance that it fits."""
    if report.exit_code is exit_codes.OK:
        colour, verdict = "green", f"lowers, {_where(report)}"
    elif report.exit_code is exit_codes.DOES_NOT_FIT:
        target = f" {report.fits[0].target}" if len(report.fits) == 1 else " any instance"
        colour, verdict = "red", f"lowers, but does not fit{target}"
    else:
        colour, verdict = "red", "cannot be used" if report.exit_code is exit_codes.MODEL else "does not lower"
    return f"{style(report.model, bold=True)} {style(verdict, fg=colour)}{_counts(report)}"


def _where(report: Report) -> str:
    fitting = [fit for fit in report.fits if fit.chosen is not None]
    if not fitting:
        return "memory unknown"
    smallest = min(fitting, key=lambda fit: fit.cores)
    where = f"{smallest.target} at tp {smallest.chosen}"
    if len(report.fits) > 1:
        return f"and fits {len(fitting)} of {len(report.fits)} instances, the smallest {where}"
    return f"and fits {where}"


def _counts(report: Report) -> str:
    counted = [(len(report.of(severity)), severity) for severity in Severity]
    counts = [f"{number} {severity}{'s' if number > 1 else ''}" for number, severity in counted if number]
    return f": {', '.join(counts)}" if counts else ""


def _programs(report: Report) -> Iterator[str]:
    if report.programs:
        rows = [
            (program.name, f"{program.nodes:,}", f"{program.steps:,}", program.graph_key[:12])
            for program in report.programs
        ]
        yield table(_PROGRAMS, rows)


def _memory(report: Report) -> Iterator[str]:
    caveat = "" if report.whole else " (a lower bound: not every program lowered)"
    rows = sorted({row.degree: row for fit in report.fits for row in fit.rows}.values(), key=lambda row: row.degree)
    if len(report.fits) == 1:
        (fit,) = report.fits
        headline = f"Memory of a core by tensor-parallel degree; on {fit.target} it has {_size(fit.capacity)}{caveat}"
        yield f"{headline}\n{table(_DEGREES, [_degree(row, fit) for row in fit.rows])}"
    else:
        yield f"Share of a core's memory by tensor-parallel degree{caveat}\n{_instance_table(report.fits)}"
        cells = [[*_parts(row.degree, row.footprint), _size(row.footprint.data)] for row in rows if row.footprint]
        yield f"Memory of a core by part\n{table((*_PARTS, 'total without code'), cells)}"
    if reasons := list(_reasons(rows)):
        yield "\n".join(reasons)


def _reasons(rows: Iterable[Row]) -> Iterator[str]:
    """Why degrees are not possible, each reason once."""
    degrees: dict[str, list[str]] = {}
    for row in rows:
        if row.footprint is None and row.reason:
            reason = re.sub(rf"\b{row.degree} ranks\b", "as many ranks", row.reason)
            degrees.setdefault(reason, []).append(str(row.degree))
    for reason, numbers in degrees.items():
        yield for_terminal(f"tp {', '.join(numbers)}: {reason}")


def _degree(row: Row, fit: TargetFit) -> Sequence[str]:
    if row.footprint is None:
        return (str(row.degree), *["-"] * 7, "-", "not possible")
    mark = style("yes", fg="green") if row.fits else style("no", fg="red")
    chosen = "" if row.degree != fit.chosen else "smallest" if row == _smallest(fit) else "requested"
    totals = (_size(fit.code), _size(row.need), f"{row.need / fit.capacity:.0%}")
    padded = f"{row.footprint.padding.work:.0%} of the work is padding" if row.footprint.padding else ""
    return (*_parts(row.degree, row.footprint), *totals, mark, ", ".join(filter(None, (chosen, padded))))


def _parts(degree: int, footprint: GraphMemory) -> Sequence[str]:
    sizes = (footprint.weights, footprint.state, footprint.activations, footprint.constants + footprint.interface)
    return (str(degree), *map(_size, sizes))


def _smallest(fit: TargetFit) -> Row | None:
    return next((row for row in fit.rows if row.fits), None)


def _instance_table(fits: tuple[TargetFit, ...]) -> str:
    """One row per instance, one column per degree that an instance can have; a share above 100 % does not fit."""
    degrees = sorted({row.degree for fit in fits for row in fit.rows if row.footprint})
    rows = []
    for fit in fits:
        best = style(f"tp {fit.chosen}", fg="green") if fit.chosen else style("does not fit", fg="red")
        shares = (_share(fit.row(degree), fit) for degree in degrees)
        rows.append((fit.target, str(fit.cores), _size(fit.capacity), best, *shares))
    titles = (Column(f"tp {degree}", drop=number) for number, degree in enumerate(degrees, 2))
    return table(("instance", Column("cores", drop=99), Column("each", drop=1), "fits at", *titles), rows)


def _share(row: Row | None, fit: TargetFit) -> str:
    if row is None or row.footprint is None:
        return "-"
    share = f"{row.need / fit.capacity:.0%}"
    return share if row.fits else style(share, fg="red")


def _finding(finding: Finding) -> str:
    headline = style(f"{finding.severity} {finding.rule.id}", fg=_COLOURS[finding.severity], bold=True)
    times = f" ({finding.count} times)" if finding.count > 1 else ""
    lines = [f"{headline} {finding.rule.name}: {finding.message}{times}"]
    lines += [f"  remedy: {finding.advice}"] if finding.advice else []
    where = "  ".join(part for part in (finding.place, finding.module) if part)
    lines += [f"  at {where}"] if where else []
    lines += [f"  in {', '.join(finding.programs)}"] if finding.programs else []
    return "\n".join(map(shown, lines))


def _size(count: int) -> str:
    """A size in binary units, in which device memory is specified."""
    for unit, name in ((_GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B" if count else "-"


SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_RESULTS_LIMIT: Final = 25_000  # per run: GitHub refuses a log with more results
_ORDER: Final = {id_: number for number, id_ in enumerate(RULES)}


def as_sarif(reports: Iterable[Report], fallback_file: str) -> dict[str, object]:
    """The SARIF log. `fallback_file` is annotated if no file of the model is in the repository."""
    results = [_result(report, finding, fallback_file) for report in reports for finding in report.findings]
    driver = {"name": "nxpipe", "semanticVersion": VERSION, "rules": [_rule(rule) for rule in RULES.values()]}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results[:_RESULTS_LIMIT]}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: Rule) -> dict[str, object]:
    return {
        "id": rule.id,
        "name": rule.name,
        "shortDescription": {"text": rule.meaning},
        "fullDescription": {"text": rule.meaning},
        "help": {"text": f"{rule.meaning} Each result names the source line and the remedy; see nxpipe check --help."},
        "defaultConfiguration": {"level": str(rule.severity)},
    }


def _result(report: Report, finding: Finding, fallback_file: str) -> dict[str, object]:
    file, line, suffix = _place(report, finding, fallback_file)
    physical_location = {
        "artifactLocation": {"uri": quote(file), "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": line},
    }
    location: dict[str, object] = {"physicalLocation": physical_location}
    if finding.module:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.module, "kind": "module"}]
    advice = f" Remedy: {finding.advice}." if finding.advice else ""
    return {
        "ruleId": finding.rule.id,
        "ruleIndex": _ORDER[finding.rule.id],
        "level": str(finding.severity),
        "message": {"text": f"{report.model}: {finding.message}{suffix}.{advice}"},
        "locations": [location],
        "occurrenceCount": finding.count,
        "partialFingerprints": {"nxpipeFinding/v1": _fingerprint(report, finding)},
    }


def _place(report: Report, finding: Finding, fallback_file: str) -> tuple[str, int, str]:
    """File and line of the annotation, and a text that names a place outside of the repository."""
    if _in_repository(finding.file):
        return finding.file, finding.line or 1, ""
    file = report.file if _in_repository(report.file) else fallback_file
    return file, 1, f" at {finding.place}" if finding.place else ""


def _in_repository(file: str) -> bool:
    return bool(file) and not Path(file).is_absolute() and ".." not in Path(file).parts and Path(file).is_file()


def _fingerprint(report: Report, finding: Finding) -> str:
    """An identifier of the finding that does not depend on line numbers and counts."""
    parts = (report.model, finding.rule.id, finding.file, finding.module, finding.message)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
