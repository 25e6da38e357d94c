"""A report for people: the verdict first, then the programs, the memory, and every finding with its way out."""

from collections.abc import Iterator
from typing import Final

import click

from pipeline import exit_codes
from pipeline.check.finding import Finding, Severity
from pipeline.check.report import Fit, Report, Row
from pipeline.output import table

_GIB: Final = 1 << 30
_COLOURS: Final = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "blue"}


def as_text(report: Report) -> str:
    parts = [verdict(report), *_programs(report)]
    if len(report.fits) == 1 and report.fits[0].rows:
        parts.append(_degrees(report.fits[0], whole=report.whole))
    elif any(one.rows for one in report.fits):
        parts.append(_instances(report.fits, whole=report.whole))
    parts += [_finding(finding) for finding in report.findings]
    return "\n\n".join(parts)


def verdict(report: Report) -> str:
    """One sentence: does it lower, does it fit, and where."""
    counts = _counts(report)
    if report.exit_code in (exit_codes.OK, exit_codes.DOES_NOT_FIT):
        ok = report.exit_code is exit_codes.OK
        where = (
            _where(report)
            if ok
            else "but does not fit" + (f" {report.fits[0].target}" if report.fits[1:] == () else "")
        )
        colour, said = ("green" if ok else "red"), f"lowers, {where}"
    elif report.exit_code is exit_codes.MODEL:
        colour, said = "red", "cannot be used"
    else:
        colour, said = "red", "does not lower"
    return f"{click.style(report.model, bold=True)} {click.style(said, fg=colour)}{counts}"


def _where(report: Report) -> str:
    fitting = [one for one in report.fits if one.chosen is not None]
    if len(report.fits) > 1:
        return f"and fits {len(fitting)} of {len(report.fits)} instances"
    return f"and fits {fitting[0].target} at tp {fitting[0].chosen}" if fitting else "memory unknown"


def _counts(report: Report) -> str:
    counted = [(len(report.of(severity)), severity) for severity in Severity]
    said = [f"{number} {severity}{'s' if number > 1 else ''}" for number, severity in counted if number]
    return f": {', '.join(said)}" if said else ""


def _programs(report: Report) -> Iterator[str]:
    if report.programs:
        rows = [
            (one.name, f"{one.nodes:,}", f"{one.steps:,}" if one.steps != one.nodes else "") for one in report.programs
        ]
        yield table(("PROGRAM", "OPERATORS", "WITH REPEATS"), rows)


def _degrees(fit: Fit, *, whole: bool) -> str:
    head = f"Memory of each core of {fit.target}: {_size(fit.capacity)}{_caveat(whole)}"
    header = ("TP", "WEIGHTS", "KV CACHE", "SCRATCH", "OTHER", "TOTAL", "")
    return f"{head}\n{table(header, [_degree(row, fit) for row in fit.rows])}"


def _degree(row: Row, fit: Fit) -> tuple[str, ...]:
    one = row.footprint
    if one is None:
        return (str(row.degree), "-", "-", "-", "-", "-", row.reason)
    other = one.constants + one.interface + fit.code
    sizes = (one.weights, one.state, one.activations, other, row.need)
    mark = click.style("fits", fg="green") if row.fits else click.style("does not fit", fg="red")
    chosen = "  <- " + ("smallest" if row == _smallest(fit) else "asked for") if row.degree == fit.chosen else ""
    return (str(row.degree), *map(_size, sizes), mark + chosen)


def _smallest(fit: Fit) -> Row | None:
    return next((row for row in fit.rows if row.fits), None)


def _instances(fits: tuple[Fit, ...], *, whole: bool) -> str:
    rows = []
    for fit in fits:
        row = fit.row(fit.chosen)
        need = f"{_size(row.need)} of {_size(fit.capacity)}" if row else f"- of {_size(fit.capacity)}"
        at = click.style(f"tp {fit.chosen}", fg="green") if row else click.style("does not fit", fg="red")
        rows.append((fit.target, str(fit.cores), at, need))
    return table(("INSTANCE", "CORES", "FITS AT", f"OF EACH CORE{_caveat(whole)}"), rows)


def _caveat(whole: bool) -> str:
    return "" if whole else " (at least: not every program lowered)"


def _finding(finding: Finding) -> str:
    head = click.style(f"{finding.severity} {finding.rule.id}", fg=_COLOURS[finding.severity], bold=True)
    times = f" ({finding.count} times)" if finding.count > 1 else ""
    lines = [f"{head} {finding.rule.name}: {finding.message}{times}"]
    where = "  ".join(part for part in (finding.place, finding.module) if part)
    lines += [f"  at {where}"] if where else []
    lines += [f"  in {', '.join(finding.programs)}"] if finding.programs else []
    lines += [f"  way out: {finding.advice}"] if finding.advice else []
    return "\n".join(lines)


def _size(count: int) -> str:
    """Device memory comes in powers of two."""
    if count >= _GIB:
        return f"{count / _GIB:.1f} GiB"
    return f"{count / 2**20:.1f} MiB" if count else "-"
