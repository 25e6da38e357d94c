"""A release's report as one page, in the style of a build's: no request to anywhere, and nothing in it that runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nxpipe.pipeline.build.report.html import Markup, moment, sheet, tag
from nxpipe.pipeline.build.report.summary import counted, duration

_PILLS: Final = {"passed": "built", "done": "found", "failed": "failed", "interrupted": "not-tried"}
_VERDICTS: Final = {"released": "complete", "not released": "incomplete", "interrupted": "interrupted"}
_OTHERWISE: Final = "waiting"

Report = Mapping[str, Any]


def page(report: Report) -> bytes:
    return sheet(f"Release to {report['channel']}, {moment(report)}", _sections(report))


def gates(report: Report) -> Markup:
    """The table that GitHub shows, too."""
    rows = [
        [tag("td", tag("code", one["gate"])), _state(one["state"]), tag("td", one["sentence"]), _seconds(one)]
        for one in report["gates"]
    ]
    return _table(("gate", "", "what it found", "time"), rows)


def _sections(report: Report) -> Iterator[Markup]:
    yield _header(report)
    yield tag("section", tag("h2", "Gates"), tag("div", gates(report), class_="wide"))
    if report["artifacts"]:
        yield tag("section", tag("h2", "Artifacts"), _figures(report["artifacts"]))
    if report["way_back"]:
        commands = [tag("p", tag("code", command)) for command in report["way_back"]]
        yield tag("section", tag("h2", "The way back"), commands)
    for one in report["gates"]:
        if one["figures"]:
            summary = tag("summary", f"{one['gate']}: {counted(len(one['figures']), 'row')}")
            yield tag("section", tag("details", summary, _figures(one["figures"])))
    made = [(tag("dt", name), tag("dd", tag("code", value))) for name, value in report["versions"].items()]
    yield tag("section", tag("h2", "Made with"), tag("dl", made))


def _header(report: Report) -> Markup:
    verdict, source = report["verdict"], report["from"]
    exit_code = f"exit code {report['exit_code']}" if report["exit_code"] else ""
    about = [moment(report), duration(report["seconds"]), f"from {source}" if source else "", exit_code]
    pill = tag("span", verdict, class_=f"verdict {_VERDICTS.get(verdict, _OTHERWISE)}")
    return tag(
        "header",
        tag("h1", f"Release to {report['channel']}", pill),
        tag("p", " · ".join(filter(None, about)), class_="about"),
        tag("p", "store ", tag("code", report["store"]), class_="about"),
        tag("p", report["reason"]) if report["reason"] else None,
    )


def _figures(rows: Sequence[Report]) -> Markup:
    """What a cell of a table can hold; all else is in the JSON."""
    columns = [name for name, value in rows[0].items() if isinstance(value, str | int | float | None)]
    cells = [[tag("td", _shown(row.get(name))) for name in columns] for row in rows]
    return tag("div", _table([name.replace("_", " ") for name in columns], cells), class_="wide")


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Markup]]) -> Markup:
    heads = [tag("th", name, scope="col") for name in columns]
    return tag("table", tag("thead", tag("tr", heads)), tag("tbody", [tag("tr", list(row)) for row in rows]))


def _state(state: str) -> Markup:
    return tag("td", tag("span", state, class_=f"pill {_PILLS.get(state, _OTHERWISE)}"))


def _seconds(one: Report) -> Markup:
    return tag("td", duration(one["seconds"]) if one["seconds"] else "", class_="number")
