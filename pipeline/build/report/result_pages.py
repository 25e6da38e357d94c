"""The pages of `nxpipe verify` and `nxpipe bench`, from the documents that --json prints."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nxpipe.pipeline.build.report.figures import accuracy, latencies
from nxpipe.pipeline.build.report.summary import AWS_COMPILER, EXECUTION, counted
from nxpipe.pipeline.predict.constants import PREDICTED, THIS_PROGRAM
from nxpipe.pipeline.util.page.charts import Bar, Curve, Roof, Scale, bars, plot
from nxpipe.pipeline.util.page.html import Child, Markup, tag
from nxpipe.pipeline.util.page.page import (
    NOT_MEASURED,
    Cell,
    Section,
    heading,
    joined,
    note,
    pill,
    sheet,
    table,
    two,
    verdict,
)

_DRAWN: Final = 24  # programs in a chart
_SERIES: Final = 8

Document = Mapping[str, Any]


# Verification


def verify_page(documents: Sequence[Document]) -> bytes:
    """The accuracy of the outputs of each comparison, and of its layers if they were compared."""
    failed = sum(not document["passed"] for document in documents)
    word = verdict(f"{failed} of {len(documents)} failed", "bad") if failed else verdict("within thresholds", "good")
    models = list(dict.fromkeys(str(document["model"]) for document in documents))
    inputs = list(dict.fromkeys(f"on {document['inputs']}" for document in documents))
    head = heading("Verification", [tag("code", ", ".join(models))], joined(*inputs), verdict=word)
    return sheet(f"Verification of {', '.join(models)}", "Verification", head, _verified(documents), script=True)


def _verified(documents: Sequence[Document]) -> Iterator[Section]:
    thresholds = documents[0]["thresholds"] if documents else {}
    rows = [
        (f"{document['program']}, {label}", figures, document["yardstick"])
        for document in documents
        for label, result in _variants(document)
        for figures in result["outputs"]
    ]
    yield Section("Accuracy", accuracy(rows, thresholds) if rows else tag("p", "Nothing was compared."))
    beside = [
        (f"{document['program']}, {name}", figures, document["yardstick"])
        for document in documents
        for name, result in document["beside"].items()
        for figures in result["outputs"]
    ]
    if beside:
        about = note("The error of the narrow type alone, without the emulator; it is not judged.")
        yield Section("Other references", [about, *accuracy(beside, None)[3:]])
    yield Section("Layers", _layers(documents))


def _variants(document: Document) -> Iterator[tuple[str, Document]]:
    machine = "device" if "device" in document else "emulated"
    for variant, result in document[machine].items():
        typed = f" {document['autocast_type']}" if variant in ("matmult", "all") and document["autocast_type"] else ""
        yield f"{machine}, {variant}{typed}", result


def _layers(documents: Sequence[Document]) -> list[Markup]:
    shown = [layers for document in documents if (layers := _layer_plot(document)) is not None]
    return shown or [tag("p", f"{NOT_MEASURED.capitalize()}; nxpipe verify --layers compares every layer.")]


def _layer_plot(document: Document) -> Markup | None:
    """The largest relative error of each layer, a curve for each run, and the threshold."""
    others = [(name, result) for name, result in document["beside"].items() if result.get("layers")]
    runs = [(label, result) for label, result in _variants(document) if result.get("layers")]
    if not runs:
        return None
    curves = [
        Curve(label, [(number, layer["max_relative"]) for number, layer in enumerate(result["layers"], 1)
                      if layer["max_relative"] > 0])
        for label, result in (*runs, *others)[:_SERIES]
    ]  # fmt: skip
    names = [layer["output"] for layer in runs[0][1]["layers"]]
    limit = document["thresholds"]["max_relative_error"]
    x = Scale(1, max(len(names), 2), "layer, in the order of execution", shown=lambda value: f"{value:.0f}",
              marks=range(1, len(names) + 1))  # fmt: skip
    errors = [error for curve in curves for _, error in curve.points]
    y = Scale.over([*errors, limit], "largest relative error", log=True, shown=lambda value: f"{value:.0e}")
    roof = Roof(((1, limit), (x.high, limit)), f"threshold {limit:g}")
    first = next((found for _, result in runs if (found := result.get("first_layer_beyond"))), None)
    sentence = f"{first} is the first layer beyond the thresholds." if first else "No layer is beyond the thresholds."
    return tag(
        "div",
        plot(f"{document['model']}, {document['program']}", sentence, x, y, lines=curves, roofs=[roof]),
        tag("details", tag("summary", f"Figures of {counted(len(names), 'layer')}"), _layer_table(document, runs)),
    )


def _layer_table(document: Document, runs: Sequence[tuple[str, Document]]) -> Markup:
    rows = [
        (tag("code", layer["output"]), label, _error(layer["max_relative"]), f"{layer['cosine']:.7f}")
        for label, result in runs
        for layer in result["layers"]
    ]
    columns = ("layer", "run", "max rel error", "cosine")
    return table(columns, rows, f"Layers of {document['program']}", words=("run",), sortable=True)


def _error(value: float) -> Cell:
    return Cell(f"{value:.3g}", value)


# Predicted times


def bench_page(documents: Sequence[Document], threshold: float) -> bytes:
    """The predicted times of programs, and of the baseline's if there is one."""
    against = sorted({str(document["against"]) for document in documents if document["against"]})
    slower = sum(document["verdict"] == "regression" for document in documents)
    if slower:
        word = verdict(f"{counted(slower, 'program')} slower", "bad")
    else:
        word = verdict("no regression", "good") if against else verdict("no baseline", "wait")
    baseline = f"against {', '.join(against)}; at most {threshold:.3g} % slower" if against else ""
    artifacts = dict.fromkeys(str(document["artifact"]) for document in documents)
    head = heading("Predicted times", [tag("code", ", ".join(artifacts))], baseline, verdict=word)
    return sheet("Predicted times", "Benchmark", head, _benched(documents), script=True)


def _benched(documents: Sequence[Document]) -> Iterator[Section]:
    yield Section("Latency by bucket and batch", latencies(_series(documents)))
    compared = [document for document in documents if document["before_ns"] and document["predicted_ns"]]
    if compared:
        yield Section("Change", changes(compared))
    yield Section("Programs", _programs(documents))
    if any(document.get("measured") for document in documents):
        yield Section("Measured on devices", _measured(documents))
    else:
        yield Section("Measured on devices", tag("p", f"{NOT_MEASURED.capitalize()}; nxpipe bench --measured shows "
                                                      "the times of device evidence."))  # fmt: skip


def _series(documents: Sequence[Document]) -> Iterator[tuple[str, str, int, int, float]]:
    for document in documents:
        name, at = f"{document['artifact']}, {document['phase']}", (document["batch"], document["sequence"])
        aws, own = document[AWS_COMPILER], document[EXECUTION]
        if aws["covered"]:
            yield name, PREDICTED, *at, aws["ms"]
        if own:
            yield name, THIS_PROGRAM, *at, own["ms"]


def changes(documents: Sequence[Document]) -> Markup:
    """Bars of the device times now and of the baseline, the largest changes first."""
    ordered = sorted(documents, key=lambda document: -abs(document["change"]))[:_DRAWN]
    rows = []
    for document in ordered:
        now, before = document["predicted_ns"] / 1e6, document["before_ns"] / 1e6
        rows += [
            Bar(f"{document['program']}: now {now:,.3f} ms, {_change(document)}", [("s0", now)]),
            Bar(f"{document['program']}: baseline {before:,.3f} ms", [("r-host", before)]),
        ]
    return bars("Device time, ms", "The largest changes first.", rows, key=[("s0", "now"), ("r-host", "baseline")])


def _change(document: Document) -> str:
    change = document["change"]
    if change is None:
        return "–"
    return f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}" if abs(change) >= 5e-4 else "equal"


_KINDS: Final = {"regression": "bad", "within": "good"}


def _programs(documents: Sequence[Document]) -> Markup:
    rows = [
        (
            tag("span", tag("code", document["program"]), tag("small", document["artifact"])),
            pill({"alone": "no baseline"}.get(document["verdict"], document["verdict"]),
                 _KINDS.get(document["verdict"], "wait")),
            _ns(document["predicted_ns"]),
            _ns(document["before_ns"]),
            Cell(_change(document), document["change"] or 0.0),
            _own(document[EXECUTION]),
            _aws(document[AWS_COMPILER]),
            document["tensor_parallel"],
        )
        for document in documents
    ]  # fmt: skip
    columns = ("program", "verdict", "device time", "before", "change", THIS_PROGRAM, PREDICTED, "tp")
    return table(columns, rows, "Predicted times", words=("verdict",), sortable=True)


def _ns(value: float | None) -> Cell:
    return Cell("–", 0) if value is None else Cell(f"{value / 1e6:,.3f} ms", value)


def _own(time: Document | None) -> Cell:
    return Cell(f"{time['ms']:,.3f} ms", time["ms"]) if time else Cell("–", 0)


def _aws(time: Document) -> Cell:
    if not time["covered"]:
        return Cell(tag("span", "not covered", title=time.get("reason")), 0)
    return Cell(two(f"{time['ms']:,.3f} ms", f"{time['low_ms']:,.3f} to {time['high_ms']:,.3f} ms"), time["ms"])


def _measured(documents: Sequence[Document]) -> Markup:
    rows: list[Sequence[Child | Cell]] = [
        (tag("code", document["program"]), f"{measured['p50_ms']:,.3f} ms", f"{measured['p99_ms']:,.3f} ms",
         f"{document['measured_ratio']:.3g}" if document["measured_ratio"] else "–", measured["clock"])
        for document in documents
        if (measured := document.get("measured"))
    ]  # fmt: skip
    columns = ("program", "p50", "p99", "p50 / predicted", "clock")
    return table(columns, rows, "Times that devices measured", words=("clock",))
