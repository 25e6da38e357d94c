"""Sections of a report that draw the figures of programs: times, accuracy, engines, memory, traffic, changes.

They draw what the document of an artifact has. Reports of earlier versions lack some of it; their sections say so.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from nxpipe.pipeline.build.report.summary import AWS_COMPILER, EXECUTION, counted
from nxpipe.pipeline.predict.constants import PREDICTED, THIS_PROGRAM
from nxpipe.pipeline.util.page.charts import (
    Bar,
    Curve,
    Dot,
    Scale,
    bars,
    dots,
    plot,
    resource_class,
    resource_shares,
)
from nxpipe.pipeline.util.page.html import Child, Markup, tag
from nxpipe.pipeline.util.page.page import NOT_MEASURED, Cell, Row, Section, note, pill, table, two
from nxpipe.pipeline.util.text import human_bytes

_DRAWN: Final = 24  # programs in a chart; the tables have all
_PLOTS: Final = 8
_OUTPUTS: Final = 200  # rows of the table of accuracy
_ENGINES: Final = ("tensor", "vector", "scalar", "gpsimd", "dma", "collective")
# Parts of a rank's memory, by the kinds of a program's buffers.
MEMORY_PARTS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "weights": ("s0", ("parameter", "constant")),
    "KV cache": ("s2", ("state",)),
    "activations": ("s1", ("scratch", "input", "output")),
    "code": ("s3", ("code",)),
}

Document = Mapping[str, Any]


def figure_sections(artifacts: Sequence[Document], thresholds: Document | None) -> Iterator[Section]:
    """The sections of artifacts, each with its `cells`, of which some have predictions and accuracy."""
    cells = [(artifact, cell) for artifact in artifacts for cell in artifact["cells"]]
    predicted = [(artifact, cell) for artifact, cell in cells if cell.get("predicted")]
    if predicted:
        yield Section("Predicted latency", latencies(_series(predicted)))
    if any(artifact.get("published", True) for artifact in artifacts):
        yield Section("Accuracy", _accuracy(cells, thresholds))
    if predicted:
        named = [(_named(artifact, cell, len(artifacts)), cell["predicted"]) for artifact, cell in predicted]
        yield Section("Where the predicted time goes", _critical_paths(named))
        yield Section("Engine utilization", _engines(named))
        yield Section("Memory of a rank", _memory(predicted))
        yield Section("HBM traffic", _traffic(named))
    compared = [(artifact, other) for artifact in artifacts for other in artifact.get("served", ())]
    if compared:
        yield Section("Compared with what channels serve", [_served(*pair) for pair in compared])


def _named(artifact: Document, cell: Document, count: int) -> str:
    return f"{cell['program']}, {artifact['title']}" if count > 1 else str(cell["program"])


# Latency


Series = tuple[str, str, int, int, float]  # of a plot, prediction, batch, bucket, ms


def _series(cells: Iterable[tuple[Document, Document]]) -> Iterator[Series]:
    for artifact, cell in cells:
        name = f"{artifact['title']}, {cell['phase']}"
        aws, own = (cell["predicted"].get(kind) for kind in (AWS_COMPILER, EXECUTION))
        if aws and aws.get("covered"):
            yield name, PREDICTED, cell["batch"], cell["sequence"], aws["ms"]
        if own:
            yield name, THIS_PROGRAM, cell["batch"], cell["sequence"], own["ms"]
        elif not aws:
            yield name, THIS_PROGRAM, cell["batch"], cell["sequence"], cell["predicted"]["latency_ns"] / 1e6


def latencies(series: Iterable[Series]) -> Markup:
    """A plot for each phase of an artifact and each prediction: latency over the bucket, a line for each batch."""
    plots: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {}
    for name, kind, batch, bucket, ms in series:
        plots.setdefault((name, kind), {}).setdefault(batch, []).append((bucket, ms))
    shown = [_latency(name, kind, batches) for (name, kind), batches in list(plots.items())[:_PLOTS]]
    left = len(plots) - len(shown)
    about = (
        f"“{PREDICTED}” by constants fitted to published measurements, “{THIS_PROGRAM}” on the documented costs of its "
        "instructions, with the host and collectives. Neither was measured on a device."
    )
    return tag("div", note(about), tag("div", shown, class_="row"), _more(left, "plot"))


def _latency(name: str, kind: str, batches: Mapping[int, list[tuple[float, float]]]) -> Markup:
    lines = [Curve(f"batch {batch}", sorted(batches[batch])) for batch in sorted(batches)]
    across = sorted({bucket for line in lines for bucket, _ in line.points})
    x = Scale.over(across, "sequence bucket, tokens", log=True, marks=across, shown=lambda value: f"{value:.0f}")
    y = Scale.over([ms for line in lines for _, ms in line.points], "latency, ms")
    return plot(f"{name}: {kind}", "", x, y, lines=lines)


# Accuracy


def _accuracy(cells: Sequence[tuple[Document, Document]], thresholds: Document | None) -> list[Markup | None]:
    several = len({artifact["title"] for artifact, _ in cells})
    rows = [
        (_named(artifact, cell, several), figures, cell["accuracy"]["reference"])
        for artifact, cell in cells
        if cell.get("accuracy")
        for figures in cell["accuracy"]["outputs"]
    ]
    if not rows:
        return [tag("p", f"{NOT_MEASURED.capitalize()}: the document has no evidence of a verification.")]
    return accuracy(rows, thresholds)


def accuracy(rows: Sequence[tuple[str, Document, str]], thresholds: Document | None) -> list[Markup | None]:
    """A chart of the largest relative errors and a table; rows are (program, figures of an output, reference)."""
    allowed = thresholds or {}
    worst = sorted(rows, key=lambda row: -_finite(row[1]["max_relative"]))
    failed = sum(bool(beyond(figures, allowed)) for _, figures, _ in rows)
    limit = allowed.get("max_relative_error")
    drawn = [
        Dot(f"{program} {figures['output']}: {figures['max_relative']:.3g}", _finite(figures["max_relative"]),
            fails=bool(beyond(figures, allowed)))
        for program, figures, _ in worst[:_DRAWN]
    ]  # fmt: skip
    values = [dot.value for dot in drawn if dot.value] + ([limit] if limit else [])
    axis = Scale.over(values, "largest relative error", log=True, shown=lambda value: f"{value:.0e}")
    chart = dots(
        "Largest relative error of each output",
        "A cross is an output beyond a threshold.",
        drawn,
        axis,
        limits=[(limit, f"threshold {limit:g}")] if limit else (),
    )
    references = ", ".join(sorted({reference for *_, reference in rows}))
    verdict = (
        f"{counted(failed, 'output')} of {len(rows):,} beyond a threshold of [verify]"
        if failed
        else f"All {counted(len(rows), 'output')} within the thresholds of [verify]"
    )
    sentence = f"{verdict if allowed else 'No thresholds are in the document'}; against {references}."
    return [tag("p", sentence), chart, _more(len(worst) - len(drawn), "output"), _figures(worst, allowed)]


def _finite(value: float) -> float:
    """NaN is worse than any error."""
    return value if value == value else float("inf")


def _figures(rows: Sequence[tuple[str, Document, str]], allowed: Document) -> Markup:
    body = [
        (
            tag("span", tag("code", figures["output"]), tag("small", program)),
            _judged(beyond(figures, allowed), allowed),
            Cell(_limited(f"{figures['max_relative']:.3g}", allowed.get("max_relative_error"), "at most"),
                 figures["max_relative"]),
            Cell(_limited(f"{figures['cosine']:.7f}", allowed.get("min_cosine"), "at least"), figures["cosine"]),
            _optional(figures.get("kl"), allowed.get("max_kl"), "at most"),
            _optional(figures.get("top1"), allowed.get("min_top1"), "at least"),
            Cell(f"{figures['max_absolute']:.3g}", figures["max_absolute"]),
            Cell(f"{figures['mean_absolute']:.3g}", figures["mean_absolute"]),
        )
        for program, figures, _ in rows[:_OUTPUTS]
    ]  # fmt: skip
    columns = ("output", "verdict", "max rel error", "cosine", "KL", "top-1", "max abs", "mean abs")
    shown = table(columns, body, "Accuracy of each output", words=("verdict",), sortable=True)
    return tag("div", shown, _more(len(rows) - len(body), "output"))


def _limited(figure: str, limit: float | None, how: str) -> Child:
    return two(figure, f"{how} {limit:g}") if limit is not None else figure


def _optional(value: float | None, limit: float | None, how: str) -> Cell:
    return Cell("–", 0) if value is None else Cell(_limited(f"{value:.4g}", limit, how), value)


def _judged(faults: Sequence[str], allowed: Document) -> Markup:
    if not allowed:
        return pill("not judged", "wait")
    return pill(f"beyond: {', '.join(faults)}", "bad") if faults else pill("within", "good")


def beyond(figures: Document, allowed: Document) -> list[str]:
    """The figures of an output beyond its thresholds; NaN is beyond each."""
    tests = (
        ("cosine", figures["cosine"], allowed.get("min_cosine"), 1),
        ("relative error", figures["max_relative"], allowed.get("max_relative_error"), -1),
        ("KL", figures.get("kl"), allowed.get("max_kl"), -1),
        ("top-1", figures.get("top1"), allowed.get("min_top1"), 1),
    )
    return [
        name
        for name, value, limit, sign in tests
        if value is not None and limit is not None and not sign * value >= sign * limit
    ]


# Engines, memory, traffic


def _critical_paths(programs: Sequence[tuple[str, Document]]) -> list[Markup | None]:
    known = [(name, figures) for name, figures in programs if figures.get("critical_path_ns")]
    if not known:
        return [tag("p", f"{NOT_MEASURED.capitalize()}: the artifact has no critical path.")]
    shown = sorted(known, key=lambda each: -each[1]["latency_ns"])[:_DRAWN]
    resources = _ordered({resource for _, figures in shown for resource in figures["critical_path_ns"]})
    rows = [
        Bar(
            f"{name}: {figures['latency_ns'] / 1e6:,.3f} ms, most of it {max(path, key=path.__getitem__)}",
            [(resource_class(resource), path[resource] / 1e6) for resource in resources if path.get(resource)],
        )
        for name, figures in shown
        if (path := figures["critical_path_ns"])
    ]
    key = [(resource_class(resource), resource) for resource in resources]
    chart = bars("Critical path by resource, ms", f"{THIS_PROGRAM}, device time, the slowest first.", rows, key=key)
    return [chart, _more(len(known) - len(shown), "program")]


def _ordered(resources: Iterable[str]) -> list[str]:
    found = set(resources)
    return [name for name in (*_ENGINES[:4], "dma", "dma latency", "collective") if name in found] + sorted(
        found - {*_ENGINES, "dma latency"}
    )


def _engines(programs: Sequence[tuple[str, Document]]) -> list[Markup | None]:
    known = [(name, figures) for name, figures in programs if figures.get("busy_ns")]
    if not known:
        return [tag("p", f"{NOT_MEASURED.capitalize()}: the artifact has no busy times.")]
    engines = [name for name in _ENGINES if any(name in figures["busy_ns"] for _, figures in known)]
    rows: list[Row] = [
        (tag("code", name), *(_busy(engine, figures) for engine in engines)) for name, figures in known[:_OUTPUTS]
    ]
    about = "The share of the program's predicted device time for which each engine is busy."
    shown = table(("program", *engines), rows, "Engine utilization by program", sortable=True)
    return [note(about), shown, _more(len(known) - len(rows), "program")]


def _busy(engine: str, figures: Document) -> Cell:
    if engine not in figures["busy_ns"]:
        return Cell("–", 0)
    share = figures["busy_ns"][engine] / max(figures["latency_ns"], 1e-9)
    bar = resource_shares({engine: share}, 1, f"{engine} busy", 6)
    return Cell(tag("div", f"{share:.0%}", bar, class_="named"), share)


def memory_parts(footprint: Document) -> list[tuple[str, str, int]]:
    """(class of a colour, name, bytes) of each part of a program's footprint."""
    return [
        (colour, name, sum(footprint.get(kind, 0) for kind in kinds)) for name, (colour, kinds) in MEMORY_PARTS.items()
    ]


def _memory(cells: Sequence[tuple[Document, Document]]) -> list[Markup | None]:
    """The largest program of each artifact and phase, by degree."""
    largest: dict[tuple[str, str], tuple[int, Document]] = {}
    for artifact, cell in cells:
        footprint = cell["predicted"].get("footprint")
        at = (f"{artifact['title']}", cell["phase"])
        if footprint and (at not in largest or footprint["total"] > largest[at][1]["total"]):
            largest[at] = (artifact["asked"]["order"]["tp"] or 1, {**footprint, "program": cell["program"]})
    if not largest:
        return [tag("p", f"{NOT_MEASURED.capitalize()}: the artifact has no footprint.")]
    ordered = sorted(largest.items(), key=lambda item: (item[0][1], item[1][0], item[0][0]))
    rows: list[Bar] = []
    body: list[Row] = []
    for (title, _), (degree, footprint) in ordered[:_DRAWN]:
        parts = memory_parts(footprint)
        rows.append(
            Bar(f"tp {degree}, {footprint['program']}: {human_bytes(footprint['total'])}",
                [(colour, size) for colour, _, size in parts])
        )  # fmt: skip
        body.append(
            (tag("span", tag("code", footprint["program"]), tag("small", title)), degree,
             *(Cell(human_bytes(size), size) for *_, size in parts),
             Cell(human_bytes(footprint["total"]), footprint["total"]))
        )  # fmt: skip
    key = [(colour, name) for name, (colour, _) in MEMORY_PARTS.items()]
    chart = bars("HBM that the largest program of each phase holds", "By tensor-parallel degree.", rows, key=key)
    columns = ("program", "tp", *MEMORY_PARTS, "total")
    shown = table(columns, body, "Memory of a rank by part")
    return [chart, shown, _more(len(ordered) - len(body), "program")]


def _traffic(programs: Sequence[tuple[str, Document]]) -> list[Markup | None]:
    known = [(name, figures) for name, figures in programs if figures.get("moved_bytes")]
    if not known:
        return [tag("p", f"{NOT_MEASURED.capitalize()}: the artifact has no bytes of transfers.")]
    shown = sorted(known, key=lambda each: -each[1]["moved_bytes"])[:_DRAWN]
    rows = []
    for name, figures in shown:
        moved, least = figures["moved_bytes"], figures["compulsory_bytes"]
        spilled = min(figures.get("spilled_bytes", 0), max(moved - least, 0))
        again = max(moved - least - spilled, 0)
        ratio = f", {moved / least:.2f} × what must move" if least else ""
        text = f"{name}: {human_bytes(moved)}{ratio}; {human_bytes(spilled)} spilled"
        rows.append(Bar(text, [("k-good", min(least, moved)), ("k-bad", spilled), ("r-host", again)]))
    key = [("k-good", "must move"), ("k-bad", "spilled and read back"), ("r-host", "moved again")]
    chart = bars("Bytes read from and written to HBM", "The most first.", rows, key=key)
    return [chart, _more(len(known) - len(shown), "program")]


# Comparison


def _served(artifact: Document, other: Document) -> Markup:
    """An artifact against the one that a channel serves for the same model and target."""
    title = f"{artifact['title']} against {other['artifact']} of channel {other['channel']}"
    if other.get("same"):
        return tag("div", tag("h3", title), tag("p", "The channel serves this artifact."))
    rows = [
        (tag("code", each["program"]), _ms(each["before_ns"]), _ms(each["after_ns"]), _change(each))
        for each in other["programs"]
    ]
    changed = table(("program", "served", "this build", "change"), rows, f"Device time: {title}") if rows else tag(
        "p", "The two have no program in common.")  # fmt: skip
    return tag("div", tag("h3", title), changed, drift(other.get("drift"), title))


def _ms(ns: float | None) -> Cell:
    return Cell("–", 0) if ns is None else Cell(f"{ns / 1e6:,.3f} ms", ns)


def _change(each: Document) -> Cell:
    if not each["before_ns"] or each["after_ns"] is None:
        return Cell("–", 0)
    change = each["after_ns"] / each["before_ns"] - 1
    word = "slower" if change > 0 else "faster"
    return Cell(f"{abs(change):.1%} {word}" if abs(change) >= 5e-4 else "equal", change)


def drift(found: Document | None, title: str) -> Markup | None:
    """Weights drift: the norm of the difference over the norm before, by group of tensors."""
    if found is None:
        return None
    if found.get("groups") is None:
        return note(f"Weights drift: {NOT_MEASURED}, {found['why']}.")
    changed = [group for group in found["groups"] if group["relative"]]
    if not changed:
        return note("Weights drift: none, all weights are equal.")
    shown = sorted(changed, key=lambda group: -group["relative"])[:_DRAWN]
    rows = [Bar(f"{group['group']}: {group['relative']:.3g}", [("s0", group["relative"])]) for group in shown]
    about = f"Norm of the difference over the norm before, {title}. {counted(found['equal'], 'tensor')} equal."
    return tag("div", bars("Weights drift by group of tensors", about, rows), _more(len(changed) - len(shown), "group"))


def _more(count: int, noun: str) -> Markup | None:
    return note(f"{counted(count, noun)} not drawn.") if count > 0 else None
