"""Which instances hold a model, at which tensor-parallel degree."""

from collections.abc import Iterator

from nxpipe.emulator.analysis.graph_memory import GraphMemory, capacity, code_bytes
from nxpipe.emulator.hardware import Instance
from nxpipe.pipeline.check.finding import DEGREE, DOES_NOT_FIT, PADDED, TIGHT, Finding
from nxpipe.pipeline.check.report import Examination, Fit, Row

_GIB = 1 << 30


def fit(found: Examination, target: Instance, asked: int | None) -> Fit:
    """The table of one instance. A degree that was asked for has a row even where the instance has no such degree."""
    room, code = capacity(target), code_bytes(target)
    offered = target.degrees
    listed = sorted({*offered, asked} if asked else offered)
    rows = tuple(_row(found, target, degree, offered, room) for degree in listed) if found.footprints else ()
    fitting = [row.degree for row in rows if row.fits]
    chosen = (asked if asked in fitting else None) if asked else min(fitting, default=None)
    return Fit(target.name, target.logical_cores, room, code, rows, chosen)


def _row(found: Examination, target: Instance, degree: int, offered: tuple[int, ...], room: int) -> Row:
    footprint = next((one for one in found.footprints if one.degree == degree), None)
    if degree not in offered:
        reason = f"{target.name} offers degrees {', '.join(map(str, offered))}"
        return Row(degree, None, 0, fits=False, reason=reason)
    if footprint is None:
        return Row(degree, None, 0, fits=False, reason=found.refused.get(degree, "not examined"))
    need = footprint.on(target)
    return Row(degree, footprint, need, fits=need <= room)


def verdicts(fits: tuple[Fit, ...], asked: int | None) -> Iterator[Finding]:
    """One instance must hold the model; of several, one is enough."""
    if not any(one.rows for one in fits):
        return
    fitting = [one for one in fits if one.chosen is not None]
    if not fitting:
        yield _refusal(fits, asked)
    if len(fits) == 1 and fitting:
        row = fits[0].row(fits[0].chosen)
        if row and row.need > 0.9 * fits[0].capacity:
            yield Finding(
                TIGHT,
                f"tp {row.degree} takes {row.need / _GIB:.1f} of the {fits[0].capacity / _GIB:.1f} GiB of each core",
                "leave room for the runtime's buffers: a higher --tp, a smaller bucket or batch",
            )
        if row and row.footprint and row.footprint.padding:
            yield _padded(row.footprint, fits[0])


def _padded(footprint: GraphMemory, fit: Fit) -> Finding:
    rows = (row for row in fit.rows if row.fits and row.footprint and not row.footprint.padding)
    without = ", ".join(str(row.degree) for row in rows)
    advice = f"degrees that fit without padding: {without}" if without else "no degree that fits goes without padding"
    return Finding(PADDED, f"tp {footprint.degree} pads with zeros, which is {footprint.padding}", advice)


def _refusal(fits: tuple[Fit, ...], asked: int | None) -> Finding:
    if len(fits) > 1:
        return Finding(DOES_NOT_FIT, "no instance of the catalogue holds the model", "use a smaller bucket or batch")
    one = fits[0]
    row = one.row(asked)
    possible = [row.degree for row in one.rows if row.fits]
    advice = f"the smallest degree that fits is --tp {possible[0]}" if possible else "see --target all"
    if row is not None and row.reason:
        return Finding(DEGREE, f"tp {asked} cannot be had: {row.reason}", advice)
    counted = [row for row in one.rows if row.footprint]
    if not counted:
        return Finding(DEGREE, f"no degree of {one.target} suits the model: {one.rows[0].reason}", advice)
    least = row or min(counted, key=lambda row: row.need)
    return Finding(
        DOES_NOT_FIT,
        f"at tp {least.degree} each core of {one.target} needs {least.need / _GIB:.1f} GiB and has "
        f"{one.capacity / _GIB:.1f} GiB",
        advice,
    )
