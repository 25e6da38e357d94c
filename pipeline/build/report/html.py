"""The page of a build report, from its document, with the timeline of its workers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nxpipe.pipeline.build.jobs import PLAN_WORDS, REPORT_WORDS, CellStatus
from nxpipe.pipeline.build.report.figures import figure_sections
from nxpipe.pipeline.build.report.summary import AWS_COMPILER, EXECUTION, clock, counted, duration
from nxpipe.pipeline.util.page.charts import drawing, scrolling, share_bar
from nxpipe.pipeline.util.page.html import Markup, tag, text
from nxpipe.pipeline.util.page.page import (
    Cell,
    Section,
    Site,
    definitions,
    heading,
    joined,
    moment,
    pill,
    sheet,
    table,
    tiles,
    two,
    verdict,
)
from nxpipe.pipeline.util.text import human_bytes

_OPEN: Final = 8  # groups of cells that are listed without a click
# Words of the document, and the names of the statuses on this page.
_STATUS: Final = {word: status.value for status, word in REPORT_WORDS.items()}
_PLANNED: Final = {word: status.value for status, word in PLAN_WORDS.items()}
_IN_STORE: Final = tuple(REPORT_WORDS[status] for status in (CellStatus.CACHED, CellStatus.BUILT, CellStatus.BLOCKED))
_FAILED: Final = REPORT_WORDS[CellStatus.FAILED]
_COLUMNS: Final = (
    *("program", "status", "AWS's compiler", "this program", "device time"),  # predictions, and a part of the second
    *("build time", "peak memory", "attempts", "planned", "artifact"),
)
_ORDER: Final = (
    CellStatus.FAILED,
    CellStatus.RETRYING,
    CellStatus.SKIPPED,
    CellStatus.BLOCKED,
    CellStatus.BUILT,
    CellStatus.CACHED,
)
# The style of each status.
_KINDS: Final = {
    REPORT_WORDS[status]: kind
    for status, kind in (
        (CellStatus.CACHED, "info"),
        (CellStatus.BUILT, "good"),
        (CellStatus.FAILED, "bad"),
        (CellStatus.RETRYING, "warn"),
        (CellStatus.SKIPPED, "warn"),
        (CellStatus.BLOCKED, "wait"),
    )
}
_OUTCOMES: Final = {"found": "info", "built": "good", "failed": "bad"}  # of an attempt; else it was cut short
# Names of exit codes that say less than a phrase.
_REASONS: Final = {"verification-failed": "accuracy check failed", "does-not-fit": "does not fit in memory"}
_VERDICTS: Final = {"complete": "good", "incomplete": "bad", "interrupted": "warn"}

Report = Mapping[str, Any]


def page(report: Report, site: Site | None = None) -> bytes:
    title = f"Build report, {moment(report['began_at'])}"
    return sheet(title, "Build report", _lead(report), _sections(report), script=True, site=site)


def _lead(report: Report) -> list[Markup]:
    cells = [cell for artifact in report["artifacts"] for cell in artifact["cells"]]
    exit_code = f"exit code {report['exit_code']}" if report["exit_code"] else ""
    word = report["verdict"]
    head = heading(
        "Build report",
        joined(moment(report["began_at"]), duration(report["seconds"]), f"executor {report['executor']}", exit_code),
        ["store ", tag("code", report["store"])],
        verdict=verdict(word, _VERDICTS.get(word, "wait")),
    )
    return [head, _tiles(report, cells), _shares(report["counts"])]


def _sections(report: Report) -> Iterator[Section | None]:
    cells = [(artifact, cell) for artifact in report["artifacts"] for cell in artifact["cells"]]
    if report["missing"]:
        yield Section("Missing", [_missing(group) for group in report["missing"]])
    yield Section("Artifacts", _artifacts(report["artifacts"]))
    yield from figure_sections(report["artifacts"], report.get("thresholds"))
    yield Section("Programs", _programs(cells))
    if report["attempts"]:
        yield Section("Timeline", timeline(report["attempts"], report["seconds"]))
    yield Section("Machine and versions", _made_with(report))


def _tiles(report: Report, cells: Sequence[Report]) -> Markup:
    published = sum(artifact["published"] for artifact in report["artifacts"])
    worked = sum(cell["seconds"] for cell in cells)
    most = max((cell["memory_bytes"] for cell in cells), default=0)
    return tiles(
        [
            (f"{published:,} / {len(report['artifacts']):,}", "artifacts published"),
            (f"{len(cells):,}", "programs"),
            *((f"{number:,}", label) for word, label in _STATUS.items() if (number := report["counts"].get(word))),
            (duration(worked), "time of all jobs"),
            (human_bytes(most) if most else "–", "peak memory of a job"),
        ]
    )


def _shares(counts: Mapping[str, int]) -> Markup:
    parts = [
        (f"k-{_KINDS[word]}", f"{counts[word]:,} {label}", counts[word])
        for word, label in _STATUS.items()
        if counts.get(word)
    ]
    return share_bar(parts, "programs by status")


def _missing(group: Report) -> Markup:
    items = [tag("li", tag("code", cells["programs"]), " of ", cells["title"]) for cells in group["lots"]]
    listed, word = tag("ul", items), group["became"]
    reason = _REASONS.get(group["reason"], f"{_STATUS[word]}: {group['reason'].replace('-', ' ')}")
    status = reason if word == _FAILED else _STATUS[word]
    return tag(
        "article",
        tag("h3", status, tag("span", counted(group["cells"], "program"), class_="count")),
        tag("p", group["message"]),
        tag("p", "Fix: ", _quoted(group["way_out"]), class_="way-out"),
        listed if len(items) <= _OPEN else tag("details", tag("summary", "Programs"), listed),
        class_=_KINDS[word],
    )


def _quoted(sentence: str) -> list[Markup]:
    """Text in backticks is code."""
    return [tag("code", part) if odd % 2 else text(part) for odd, part in enumerate(sentence.split("`"))]


def _artifacts(artifacts: Sequence[Report]) -> Markup:
    rows = []
    for artifact in artifacts:
        in_store = sum(cell["became"] in _IN_STORE for cell in artifact["cells"])
        state = pill("published", "good") if artifact["published"] else pill("missing", "bad")
        order = artifact["asked"]["order"]
        programs = f"{in_store:,} / {len(artifact['cells']):,}"
        key = tag("code", artifact["key"][:12])
        rows.append((artifact["title"], state, key, programs, order["tp"] or 1, order["target"]))
    columns = ("artifact", "state", "key", "programs", "tp", "target")
    return table(columns, rows, "Artifacts of the build", words=("state", "key", "target"))


def _programs(cells: Sequence[tuple[Report, Report]]) -> Markup:
    """Failures first; the script can sort and filter."""
    order = [REPORT_WORDS[status] for status in _ORDER]
    rows = [_program(*pair) for pair in sorted(cells, key=lambda pair: order.index(pair[1]["became"]))]
    return table(_COLUMNS, rows, "Programs of the build", words=("status", "planned", "artifact"), sortable=True)


def _program(artifact: Report, cell: Report) -> list[Cell]:
    before, predicted = cell["before"], cell["predicted"]
    why = tag("small", before["why"]) if before["why"] else None
    return [
        Cell(tag("code", cell["program"])),
        Cell(pill(_STATUS[cell["became"]], _KINDS[cell["became"]])),
        _of_aws(predicted.get(AWS_COMPILER) if predicted else None),
        _execution(predicted.get(EXECUTION) if predicted else None),
        _predicted(predicted) if predicted else Cell("–", 0),
        Cell(duration(cell["seconds"]) if cell["seconds"] else None, cell["seconds"]),
        Cell(human_bytes(cell["memory_bytes"]) if cell["memory_bytes"] else None, cell["memory_bytes"]),
        Cell(cell["attempts"] or None, cell["attempts"]),
        Cell([_PLANNED.get(before["state"], before["state"]), why], long=bool(why)),
        Cell(artifact["title"], long=True),
    ]


def _predicted(figures: Report) -> Cell:
    bound = tag("small", f"bound by {figures.get('limited_by') or figures['bound_by']}")
    floor = tag("small", f"{figures['over_floor']:.1f} × its floor") if figures.get("over_floor") else None
    shown = tag("span", f"{figures['latency_ns'] / 1e6:,.2f} ms", bound, floor, title=figures["in_short"])
    return Cell(shown, figures["latency_ns"])


def _execution(time: Report | None) -> Cell:
    """The time of this program with the host and collectives."""
    match time:
        case {"ms": value, "host_ms": host, "collectives_ms": exchanged}:
            parts = f"host {host:,.2f} ms" + (f", collectives {exchanged:,.2f} ms" if exchanged else "")
            return Cell(two(f"{value:,.2f} ms", parts), value)
        case _:
            return Cell("–", 0)


def _of_aws(time: Report | None) -> Cell:
    """The time of `AWS's compiler` with its interval; its reason if it has none."""
    match time:
        case {"covered": True, "ms": value, "low_ms": low, "high_ms": high}:
            return Cell(two(f"{value:,.2f} ms", f"{low:,.2f} to {high:,.2f} ms"), value)
        case {"covered": False, "reason": reason}:
            return Cell(tag("span", "not covered", title=reason), 0)
        case _:
            return Cell("–", 0)


def _made_with(report: Report) -> Markup:
    host = report["host"]
    memory = human_bytes(host["memory_bytes"])
    facts = {"machine": f"{counted(host['cores'], 'core')}, {memory}, {host['system']}", **report["versions"]}
    return definitions({name: tag("code", value) for name, value in facts.items()})


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
    described = (
        f"{counted(len(drawn), 'attempt')} of jobs by worker, over {duration(end)}; the table of programs has the times"
    )
    return scrolling(
        "Timeline of the workers",
        tag("svg", names, class_="names", width=84, height=height, aria_hidden="true"),
        drawing("Attempts", described, list(_axis(end, height)), bars, height=height, class_="bars"),
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
        tag("rect", width="100%", height=_BAR, rx=2, class_=f"k-{_OUTCOMES.get(attempt['outcome'], 'warn')}"),
        tag("text", attempt["program"], x=5, y=13),
        class_="bar",
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
