"""`nxpipe calibrate`: predicted times compared with those that devices measured, or constants fitted to tables."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from nxpipe.pipeline.cli.completion import complete_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.param_types import Choice
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import MissingSoftware
from nxpipe.pipeline.util.text import table

if TYPE_CHECKING:
    from nxpipe.pipeline.artifacts.calibration import Calibration, CalibrationReport, Measurement

_FACTORS: Final = ("phase", "measurements", "factor", "spread")
_PROGRAMS: Final = ("artifact", "program", "evidence", "predicted", "p50", "ratio", "residual")
_FAMILIES: Final = ("family", "rows", "models", "median", "p90", "worst", "in 1.5x", "interval", "inside")
_DIGITS: Final = 12  # of a digest


@click.command(cls=Command)
@click.argument("artifacts", nargs=-1, metavar="[ARTIFACT]...", shell_complete=complete_artifacts)
@click.option(
    "--from",
    "tables",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="CSV",
    help="Fit the constants of predictions of AWS's compiler to this table of measurements; repeatable.",
)
@click.option("--instance-type", metavar="TYPE", help="Only measurements on this instance type.")
@click.option("--clock", type=Choice(["device", "host"]), help="Only measurements by this clock.")
@click.option("--rehearsal", is_flag=True, help="Accept evidence of a stand-in, and mark the result.")
@click.option(
    "-o",
    "--output",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the calibration to a new file, for `nxpipe bench --calibration`; with --from, the constants.",
)
@store_option
@config_option
@click.pass_obj
def calibrate(
    console: Console,
    artifacts: tuple[str, ...],
    tables: tuple[Path, ...],
    instance_type: str | None,
    clock: str | None,
    rehearsal: bool,
    output: Path | None,
    store: str | None,
    config_path: Path,
) -> None:
    """Compare predicted times with those that devices measured.

    ARTIFACT is an artifact of the store (MODEL@KEY or a key) with evidence of `nxpipe prove`. For each instance type,
    clock and phase it prints the factor p50 / predicted, which is the geometric mean of all programs, and its spread,
    their geometric standard deviation: near 1, one factor explains the measurements. The residual of a program is what
    its factor leaves: +5% is slower than predicted times factor. No prediction changes. Evidence that does not name
    its instance type and driver is refused, as is that of a stand-in, without --rehearsal (code 23). All predictions of
    an instance type must be by one compiler of nxpipe (code 2).

    With --from, the constants of the predictions called AWS's compiler are fitted to tables of published measurements
    instead; no artifact is read. docs/reference/prediction.md has the terms, the columns and the errors.

    \b
    Example:
      nxpipe calibrate bert-base-uncased@4e9ce0 my-llama@a41f07
      nxpipe calibrate my-llama@a41f07 --instance-type inf2.xlarge -o inf2.calibration.json
      nxpipe calibrate --from published.csv --out constants.json
    """
    from nxpipe.pipeline.artifacts.calibration import REPORT_FORMAT, measurements_of
    from nxpipe.pipeline.artifacts.calibration import calibrate as calibrated
    from nxpipe.pipeline.artifacts.lookup import artifact
    from nxpipe.pipeline.artifacts.store_url import open_configured_store

    if tables:
        _require_tables_only(artifacts, instance_type, clock, rehearsal=rehearsal)
        _fit_tables(console, tables, output)
        return
    if not artifacts:
        raise click.UsageError("name an artifact with evidence of `nxpipe prove`, or tables with --from")
    opened = open_configured_store(store, config_path, console)
    manifests = {manifest.digest: manifest for manifest in (artifact(name, opened) for name in artifacts)}
    measured = [each for manifest in manifests.values() for each in measurements_of(manifest, opened)]
    reports = calibrated(_selected(measured, instance_type, clock), rehearsal=rehearsal)
    if output is not None:
        _only(reports).write(output)
    if console.json:
        console.data({"format": REPORT_FORMAT, "calibrations": [report.document() for report in reports]})
    else:
        console.page("\n\n".join(map(_page, reports)))
    for report in reports:
        _note_single(report.calibration, console)
    if output is not None:
        console.say(f"  {output}: the calibration of {reports[0].calibration.instance_type}")


def _require_tables_only(
    artifacts: tuple[str, ...], instance_type: str | None, clock: str | None, *, rehearsal: bool
) -> None:
    if artifacts or instance_type or clock or rehearsal:
        raise click.UsageError(
            "--from cannot be combined with artifacts, --instance-type, --clock or --rehearsal; it reads tables only"
        )


def _fit_tables(console: Console, tables: tuple[Path, ...], output: Path | None) -> None:
    """Fit the constants to tables, print their errors, and write them."""
    from datetime import UTC, datetime
    from importlib.util import find_spec

    from nxpipe.pipeline.predict.constants import PREDICTED

    if find_spec("numpy") is None:
        raise MissingSoftware("numpy", "nxpipe calibrate --from", "pip install 'nxpipe[compile]'")
    from nxpipe.pipeline.predict.fit import calibrate_from
    from nxpipe.pipeline.util.progress import watching

    today = datetime.now(UTC).date().isoformat()
    fitted = calibrate_from(tables, date=today, watch=partial(watching, console, "fit constants", unit="fits"))
    if output is not None:
        fitted.write(output)
    if console.json:
        console.data(fitted.model_dump())
    else:
        families = [
            (
                family,
                str(each.rows),
                str(each.models),
                *(f"{share:.1%}" for share in (each.median, each.p90, each.worst, each.within)),
                f"x/÷ {each.interval:.2f}",
                f"{each.coverage:.0%}",
            )
            for family, each in fitted.families.items()
        ]
        console.page(table(_FAMILIES, families))
    used = sum(source.rows for source in fitted.sources)
    console.say(
        f"  {PREDICTED}: {len(fitted.constants)} constants fitted to {used} rows, each predicted without its model; "
        f"{sum(fitted.excluded.values())} rows not used"
    )
    if output is not None:
        console.say(f"  {output}: the constants")


def _selected(measured: "Sequence[Measurement]", instance_type: str | None, clock: str | None) -> "list[Measurement]":
    """The measurements on an instance type and by a clock, if these are given."""
    from nxpipe.artifact_store.errors import Refused

    found = [each for each in measured if instance_type in (None, each.instance_type) and clock in (None, each.clock)]
    if not found:
        known = sorted({f"{each.instance_type} by the clock of the {each.clock}" for each in measured})
        raise Refused(f"there is no such measurement; the evidence has those of {', '.join(known)}")
    return found


def _only(reports: "Sequence[CalibrationReport]") -> "Calibration":
    if len(reports) > 1:
        found = ", ".join(f"{each.calibration.instance_type} ({each.calibration.clock})" for each in reports)
        raise click.UsageError(
            f"-o writes one calibration, and the evidence has measurements of {found}; select one with --instance-type "
            "or --clock"
        )
    return reports[0].calibration


def _page(report: "CalibrationReport") -> str:
    from nxpipe.pipeline.util.text import shown

    calibration = report.calibration
    factors = [
        (phase, str(each.count), f"{each.factor:.4g}", "-" if each.spread is None else f"{each.spread:.4g}")
        for phase, each in calibration.phases.items()
    ]
    programs = [
        (
            each.artifact,
            each.program,
            each.evidence[:_DIGITS],
            f"{each.predicted_ms:.3f} ms",
            f"{each.p50_ms:.3f} ms",
            f"{each.p50_ms / each.predicted_ms:.4g}",
            f"{report.residual(each):+z.1%}",
        )
        for each in report.measurements
    ]
    return "\n\n".join((shown(_title(calibration)), table(_FACTORS, factors), table(_PROGRAMS, programs)))


def _title(calibration: "Calibration") -> str:
    """The line above the tables: what was measured, by which clock and software."""
    software = "".join(f"; {name} {', '.join(found)}" for name, found in calibration.software.items() if found)
    rehearsal = "REHEARSAL, no device measured this: " if calibration.rehearsal else ""
    return f"{rehearsal}{calibration.instance_type}, clock of the {calibration.clock}{software}"


def _note_single(calibration: "Calibration", console: Console) -> None:
    if single := [phase for phase, each in calibration.phases.items() if each.count == 1]:
        console.say(
            f"{calibration.instance_type}: one measurement of {' and one of '.join(single)}, which has no spread; "
            "prove more models, buckets or degrees"
        )
