"""A build report as one page: no request to anywhere, nothing to run to read it, what is missing first."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.build.report.markup import Child, Markup, tag, text
from nxpipe.pipeline.build.report.reasons import BECAME
from nxpipe.pipeline.build.report.sheet import moment, sheet
from nxpipe.pipeline.build.report.timeline import timeline
from nxpipe.pipeline.build.report.words import counted, duration
from nxpipe.pipeline.util.text import human_bytes

_SCRIPT: Final = Path(__file__).with_name("page.js")
_MADE: Final = ("found", "built", "waiting")
_OPEN: Final = 8  # lots of cells that are listed without a click
_COLUMNS: Final = ("program", "of", "before", "became", "tries", "time", "memory", "predicted")
_NUMBERS: Final = ("tries", "time", "memory", "predicted")

Report = Mapping[str, Any]


def page(report: Report) -> bytes:
    return sheet(f"Build report, {moment(report)}", _sections(report), _SCRIPT.read_text())


def _sections(report: Report) -> Iterator[Markup]:
    cells = [(artifact, cell) for artifact in report["artifacts"] for cell in artifact["cells"]]
    yield _header(report)
    yield _tiles(report, cells)
    yield _bar(report["counts"])
    if report["missing"]:
        yield tag("section", tag("h2", "Missing"), map(_missing, report["missing"]))
    yield tag("section", tag("h2", "Artifacts"), _artifacts(report["artifacts"]))
    if report["attempts"]:
        yield tag("section", tag("h2", "Timeline"), timeline(report["attempts"], report["seconds"]))
    yield tag("section", tag("h2", "Programs"), _programs(cells))
    yield tag("section", tag("h2", "Made with"), _made_with(report))


def _header(report: Report) -> Markup:
    verdict = report["verdict"]
    exit_code = f"exit code {report['exit_code']}" if report["exit_code"] else ""
    about = [moment(report), duration(report["seconds"]), f"executor {report['executor']}", exit_code]
    return tag(
        "header",
        tag("h1", "Build report", tag("span", verdict, class_=f"verdict {verdict}")),
        tag("p", " · ".join(filter(None, about)), class_="about"),
        tag("p", "store ", tag("code", report["store"]), class_="about"),
    )


def _tiles(report: Report, cells: Sequence[tuple[Report, Report]]) -> Markup:
    published = sum(artifact["published"] for artifact in report["artifacts"])
    worked = sum(cell["seconds"] for _, cell in cells)
    most = max((cell["memory_bytes"] for _, cell in cells), default=0)
    figures = [
        (f"{published:,} / {len(report['artifacts']):,}", "artifacts published"),
        (f"{len(cells):,}", "programs asked for"),
        *((f"{number:,}", fate) for fate in BECAME if (number := report["counts"].get(fate))),
        (duration(worked), "of work"),
        (human_bytes(most) if most else "–", "most memory of one"),
    ]
    tiles = [tag("div", tag("strong", figure), tag("span", what)) for figure, what in figures]
    return tag("section", tiles, class_="tiles")


def _bar(counts: Mapping[str, int]) -> Markup:
    total, begun, parts = max(sum(counts.values()), 1), 0, []
    for fate in BECAME:
        if number := counts.get(fate, 0):
            x, width = (f"{100 * share / total:.3f}%" for share in (begun, number))
            parts.append(tag("svg", tag("title", f"{number:,} {fate}"), tag("rect", width="100%", height=10),
                             class_=_class(fate), x=x, width=width, height=10))  # fmt: skip
            begun += number
    return tag("svg", parts, class_="shares", height=10, role="img", aria_label="shares")


def _missing(lack: Report) -> Markup:
    items = [tag("li", tag("code", lot["programs"]), " of ", lot["title"]) for lot in lack["lots"]]
    named = tag("ul", items)
    said = f"failed: {lack['reason']}" if lack["became"] == "failed" else lack["became"]
    return tag(
        "article",
        tag("h3", said, tag("span", counted(lack["cells"], "program"), class_="count")),
        tag("p", lack["message"]),
        tag("p", "Way out: ", _quoted(lack["way_out"]), class_="way-out"),
        named if len(items) <= _OPEN else tag("details", tag("summary", "Which"), named),
        class_=_class(lack["became"]),
    )


def _quoted(sentence: str) -> list[Markup]:
    """What stands in backticks is meant to be typed."""
    return [tag("code", part) if odd % 2 else text(part) for odd, part in enumerate(sentence.split("`"))]


def _artifacts(artifacts: Sequence[Report]) -> Markup:
    rows = []
    for artifact in artifacts:
        there = sum(cell["became"] in _MADE for cell in artifact["cells"])
        state, word = ("built", "published") if artifact["published"] else ("failed", "missing")
        order = artifact["asked"]["order"]
        degree = order["tp"] or 1
        cells = (artifact["title"], order["target"], degree, f"{there:,} / {len(artifact['cells']):,}")
        key = tag("td", tag("code", artifact["key"][:12]))
        rows.append(tag("tr", [tag("td", cell) for cell in cells], key, tag("td", _pill(word, state))))
    return _table(("artifact", "target", "tp", "programs", "key", "state"), rows, ())


def _programs(cells: Sequence[tuple[Report, Report]]) -> Markup:
    """Failures first; whoever runs the script may sort and filter."""
    order = ("failed", "not retried", "not tried", "waiting", "built", "found")
    rows = [_program(*pair) for pair in sorted(cells, key=lambda pair: order.index(pair[1]["became"]))]
    return _table(_COLUMNS, rows, _NUMBERS, id="programs")


def _program(artifact: Report, cell: Report) -> Markup:
    before, predicted = cell["before"], cell["predicted"]
    why = tag("small", before["why"]) if before["why"] else None
    figures = (
        (cell["attempts"] or None, cell["attempts"]),
        (duration(cell["seconds"]) if cell["seconds"] else None, cell["seconds"]),
        (human_bytes(cell["memory_bytes"]) if cell["memory_bytes"] else None, cell["memory_bytes"]),
        (_predicted(predicted) if predicted else "–", predicted["latency_ns"] if predicted else 0),
    )
    return tag(
        "tr",
        tag("td", tag("code", cell["program"])),
        tag("td", artifact["title"]),
        tag("td", before["state"], why),
        tag("td", _pill(cell["became"], _class(cell["became"]))),
        [tag("td", shown, class_="number", data_value=value) for shown, value in figures],
    )


def _predicted(figures: Report) -> Markup:
    bound = tag("small", f"bound by {figures['bound_by']}")
    return tag("span", f"{figures['latency_ns'] / 1e6:,.2f} ms", bound, title=figures["in_short"])


def _made_with(report: Report) -> Markup:
    host = report["host"]
    memory = human_bytes(host["memory_bytes"])
    facts = {"machine": f"{counted(host['cores'], 'core')}, {memory}, {host['system']}", **report["versions"]}
    return tag("dl", [(tag("dt", name), tag("dd", tag("code", value))) for name, value in facts.items()])


def _table(columns: Sequence[str], rows: Sequence[Markup], numbers: Sequence[str], **attributes: str) -> Markup:
    heads = [tag("th", name, scope="col", class_="number" if name in numbers else None) for name in columns]
    table = tag("table", tag("thead", tag("tr", heads)), tag("tbody", rows), **attributes)
    return tag("div", table, class_="wide")


def _pill(word: Child, kind: str) -> Markup:
    return tag("span", text(word), class_=f"pill {kind}")


def _class(fate: str) -> str:
    return fate.replace(" ", "-")
