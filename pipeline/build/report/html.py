"""HTML of reports: markup, pages, and the page of a build report with its timeline.

Every text is escaped unless it is `Markup`. A page makes no request and can be read without its script.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.build.jobs import PLAN_WORDS, REPORT_WORDS, CellStatus
from nxpipe.pipeline.build.report.summary import AWS_COMPILER, EXECUTION, clock, counted, duration
from nxpipe.pipeline.util.text import for_html, human_bytes

Child: TypeAlias = "Markup | str | int | Iterable[Child] | None"
_EMPTY = frozenset({"circle", "line", "meta", "polygon", "rect"})


class Markup(str):
    """HTML made by `tag`; it is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: str | int | float | None) -> Markup:
    """`class_` and `data_value` are spelled `class` and `data-value`; an attribute that is None is left out."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{for_html(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY:
        return Markup(f"<{name}{pairs}/>")
    return Markup(f"<{name}{pairs}>{text(children)}</{name}>")


def text(child: Child) -> Markup:
    """A child as HTML."""
    if isinstance(child, Markup):
        return child
    if child is None:
        return Markup()
    if isinstance(child, str | int):
        return Markup(for_html(str(child)))
    return Markup("".join(map(text, child)))


_STYLE: Final = Path(__file__).with_name("page.css")


def sheet(title: str, sections: Iterable[Markup], script: str = "") -> bytes:
    style = _STYLE.read_text()
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag("body", tag("main", sections), tag("script", Markup(script)) if script else None)
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n".encode("utf-8", "replace")


def moment(report: Mapping[str, Any]) -> str:
    """The time at which the build began."""
    return f"{report['began_at'][:19].replace('T', ' ')} UTC"


def _policy(style: str, script: str) -> str:
    """A Content-Security-Policy for this style and this script only: an unescaped text of a model could still not
    run."""
    allowed = f"default-src 'none'; style-src '{_digest(style)}'"
    return f"{allowed}; script-src '{_digest(script)}'" if script else allowed


def _digest(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


_SCRIPT: Final = Path(__file__).with_name("page.js")
_OPEN: Final = 8  # groups of cells that are listed without a click
# Words of the document, and the names of the statuses on this page.
_STATUS: Final = {word: status.value for status, word in REPORT_WORDS.items()}
_PLANNED: Final = {word: status.value for status, word in PLAN_WORDS.items()}
_IN_STORE: Final = tuple(REPORT_WORDS[status] for status in (CellStatus.CACHED, CellStatus.BUILT, CellStatus.BLOCKED))
_FAILED: Final = REPORT_WORDS[CellStatus.FAILED]
_COLUMNS: Final = (
    *("program", "of", "planned", "status", "attempts", "time", "memory"),
    *("device time", "this program", "AWS's compiler"),  # the two predictions, and the device's part of the first
)
_NUMBERS: Final = _COLUMNS[4:]

_ORDER: Final = (
    CellStatus.FAILED,
    CellStatus.RETRYING,
    CellStatus.SKIPPED,
    CellStatus.BLOCKED,
    CellStatus.BUILT,
    CellStatus.CACHED,
)

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
    details = [moment(report), duration(report["seconds"]), f"executor {report['executor']}", exit_code]
    return tag(
        "header",
        tag("h1", "Build report", tag("span", verdict, class_=f"verdict {verdict}")),
        tag("p", " · ".join(filter(None, details)), class_="about"),
        tag("p", "store ", tag("code", report["store"]), class_="about"),
    )


def _tiles(report: Report, cells: Sequence[tuple[Report, Report]]) -> Markup:
    published = sum(artifact["published"] for artifact in report["artifacts"])
    worked = sum(cell["seconds"] for _, cell in cells)
    most = max((cell["memory_bytes"] for _, cell in cells), default=0)
    figures = [
        (f"{published:,} / {len(report['artifacts']):,}", "artifacts published"),
        (f"{len(cells):,}", "programs"),
        *((f"{number:,}", label) for word, label in _STATUS.items() if (number := report["counts"].get(word))),
        (duration(worked), "of work"),
        (human_bytes(most) if most else "–", "peak memory of a job"),
    ]
    tiles = [tag("div", tag("strong", figure), tag("span", label)) for figure, label in figures]
    return tag("section", tiles, class_="tiles")


def _bar(counts: Mapping[str, int]) -> Markup:
    total, begun, parts = max(sum(counts.values()), 1), 0, []
    for word, label in _STATUS.items():
        if number := counts.get(word, 0):
            x, width = (f"{100 * share / total:.3f}%" for share in (begun, number))
            parts.append(tag("svg", tag("title", f"{number:,} {label}"), tag("rect", width="100%", height=10),
                             class_=_class(word), x=x, width=width, height=10))  # fmt: skip
            begun += number
    return tag("svg", parts, class_="shares", height=10, role="img", aria_label="shares")


def _missing(group: Report) -> Markup:
    items = [tag("li", tag("code", cells["programs"]), " of ", cells["title"]) for cells in group["lots"]]
    listed, word = tag("ul", items), group["became"]
    status = f"{_STATUS[word]}: {group['reason']}" if word == _FAILED else _STATUS[word]
    return tag(
        "article",
        tag("h3", status, tag("span", counted(group["cells"], "program"), class_="count")),
        tag("p", group["message"]),
        tag("p", "Fix: ", _quoted(group["way_out"]), class_="way-out"),
        listed if len(items) <= _OPEN else tag("details", tag("summary", "Programs"), listed),
        class_=_class(word),
    )


def _quoted(sentence: str) -> list[Markup]:
    """Text in backticks is code."""
    return [tag("code", part) if odd % 2 else text(part) for odd, part in enumerate(sentence.split("`"))]


def _artifacts(artifacts: Sequence[Report]) -> Markup:
    rows = []
    for artifact in artifacts:
        in_store = sum(cell["became"] in _IN_STORE for cell in artifact["cells"])
        state, word = ("built", "published") if artifact["published"] else ("failed", "missing")
        order = artifact["asked"]["order"]
        degree = order["tp"] or 1
        cells = (artifact["title"], order["target"], degree, f"{in_store:,} / {len(artifact['cells']):,}")
        key = tag("td", tag("code", artifact["key"][:12]))
        rows.append(tag("tr", [tag("td", cell) for cell in cells], key, tag("td", _pill(word, state))))
    return _table(("artifact", "target", "tp", "programs", "key", "state"), rows, ())


def _programs(cells: Sequence[tuple[Report, Report]]) -> Markup:
    """Failures first; the script can sort and filter."""
    order = [REPORT_WORDS[status] for status in _ORDER]
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
        _execution(predicted.get(EXECUTION) if predicted else None),
        _of_aws(predicted.get(AWS_COMPILER) if predicted else None),
    )
    return tag(
        "tr",
        tag("td", tag("code", cell["program"])),
        tag("td", artifact["title"]),
        tag("td", _PLANNED.get(before["state"], before["state"]), why),
        tag("td", _pill(_STATUS[cell["became"]], _class(cell["became"]))),
        [tag("td", shown, class_="number", data_value=value) for shown, value in figures],
    )


def _predicted(figures: Report) -> Markup:
    bound = tag("small", f"bound by {figures.get('limited_by') or figures['bound_by']}")
    floor = tag("small", f"{figures['over_floor']:.1f} × its floor") if figures.get("over_floor") else None
    return tag("span", f"{figures['latency_ns'] / 1e6:,.2f} ms", bound, floor, title=figures["in_short"])


def _execution(time: Report | None) -> tuple[Child, float]:
    """The time of this program with the host and collectives."""
    match time:
        case {"ms": value, "host_ms": host, "collectives_ms": exchanged}:
            parts = f"host {host:,.2f} ms" + (f", collectives {exchanged:,.2f} ms" if exchanged else "")
            return tag("span", f"{value:,.2f} ms", tag("small", parts)), value
        case _:
            return "–", 0


def _of_aws(time: Report | None) -> tuple[Child, float]:
    """The time of `AWS's compiler` with its interval; its reason if it has none."""
    match time:
        case {"covered": True, "ms": value, "low_ms": low, "high_ms": high}:
            return tag("span", f"{value:,.2f} ms", tag("small", f"{low:,.2f} to {high:,.2f} ms")), value
        case {"covered": False, "reason": reason}:
            return tag("span", "not covered", title=reason), 0
        case _:
            return "–", 0


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


def _class(word: str) -> str:
    return word.replace(" ", "-")


_ROW: Final = 24  # pixels from one worker to the next
_BAR: Final = 18
_AXIS: Final = 22
_WORKERS: Final = 48  # rows of the timeline; more would be unreadable
_BARS: Final = 3000
_TICKS: Final = 8
_STEPS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)  # seconds

Attempt = Mapping[str, Any]


def timeline(attempts: Sequence[Attempt], seconds: float) -> Markup:
    drawn = _drawn(attempts)
    end = max([seconds, *(attempt["over"] for attempt in drawn if attempt["over"] is not None), 0.001])
    workers = sorted({attempt["worker"] for attempt in drawn})
    rows = {worker: number for number, worker in enumerate(workers)}
    height = _ROW * len(workers) + _AXIS
    names = [tag("text", f"worker {worker}", x=0, y=rows[worker] * _ROW + 14) for worker in workers]
    bars = [_attempt_bar(attempt, rows[attempt["worker"]], end) for attempt in drawn]
    return tag(
        "figure",
        tag("svg", names, class_="names", width=84, height=height, aria_hidden="true"),
        tag("svg", list(_axis(end, height)), bars, class_="bars", height=height, role="img", aria_label="timeline"),
        _left_out(len(attempts) - len(drawn)),
        class_="timeline",
    )


def _drawn(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts to draw: the longest, if there are too many."""
    shown = [attempt for attempt in attempts if attempt["worker"] <= _WORKERS]
    longest = sorted(shown, key=lambda attempt: _over(attempt, float("inf")) - attempt["began"], reverse=True)
    return sorted(longest[:_BARS], key=lambda attempt: (attempt["began"], attempt["worker"]))


def _attempt_bar(attempt: Attempt, row: int, end: float) -> Markup:
    """A nested SVG, which clips the program's name to its bar."""
    took = _over(attempt, end) - attempt["began"]
    title = f"{attempt['program']} of {attempt['title']}\n"
    title += f"{attempt['outcome']} on worker {attempt['worker']}, {duration(took)}"
    steps = "".join(f"\n{clock(at)} {step}" for at, step in attempt["steps"])
    return tag(
        "svg",
        tag("title", title + steps),
        tag("rect", width="100%", height=_BAR, rx=2),
        tag("text", attempt["program"], x=5, y=13),
        class_=f"bar {attempt['outcome'].replace(' ', '-')}",
        x=_share(attempt["began"], end),
        y=row * _ROW,
        width=_share(max(took, end / 1000), end),
        height=_BAR,
    )


def _over(attempt: Attempt, end: float) -> float:
    """The end of an attempt; `end` if it was cut short."""
    over: float | None = attempt["over"]
    return end if over is None else over


def _axis(end: float, height: int) -> Iterator[Markup]:
    step = next((step for step in _STEPS if end / step <= _TICKS), _STEPS[-1])
    for number in range(int(end // step) + 1):
        x = _share(number * step, end)
        yield tag("line", x1=x, x2=x, y1=0, y2=height - _AXIS + 4)
        at_the_edge = number * step > 0.95 * end
        yield tag("text", clock(number * step), x=x, y=height - 4, text_anchor="end" if at_the_edge else None)


def _share(seconds: float, end: float) -> str:
    return f"{100 * seconds / end:.3f}%"


def _left_out(number: int) -> Markup | None:
    return tag("figcaption", f"{counted(number, 'attempt')} not drawn") if number else None
