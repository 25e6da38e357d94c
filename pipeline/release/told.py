"""A release in words: a table on the terminal, and one on the page of a run on GitHub."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nxpipe.pipeline.build.report.github import append_summary
from nxpipe.pipeline.build.report.html import Markup, tag
from nxpipe.pipeline.build.report.summary import duration
from nxpipe.pipeline.release.gate import Passage
from nxpipe.pipeline.release.page import gates
from nxpipe.pipeline.util.console import table
from nxpipe.pipeline.util.escape import for_terminal, plain, style

_COLOURS: Final = {"passed": "green", "done": "green", "failed": "red", "interrupted": "yellow"}
_SHOWN: Final = 2000  # characters of a sentence


def as_line(one: Passage) -> str:
    """As a gate is left."""
    took = style(f"  {duration(one.seconds)}", dim=True) if one.seconds >= 0.1 else ""
    return f"{one.gate:8} {_state(one)} {plain(one.sentence)}{took}"


def as_table(passages: Sequence[Passage]) -> str:
    return table(("gate", "", ""), [(one.gate, _state(one), plain(one.sentence)) for one in passages])


def as_text(report: Mapping[str, Any], passages: Sequence[Passage]) -> str:
    lines = [as_table(passages)]
    if report["artifacts"]:
        lines += ["", *(for_terminal(f"{one['name']} for {one['target']}") for one in report["artifacts"])]
    if report["verdict"] == "released" and not report["way_back"]:
        lines += ["", f"nothing to go back to: channel {report['channel']} served none of it before"]
    if report["way_back"]:
        lines += ["", *(for_terminal(f"undo with: {command}") for command in report["way_back"])]
    return "\n".join(lines)


def write_summary(report: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    append_summary(lambda _: _summary(report), environ)


def _summary(report: Mapping[str, Any]) -> str:
    """HTML in a block of its own, of which markdown reads nothing up to the next empty line; and there is none."""
    mark = "✅" if report["verdict"] == "released" else "❌"
    said = {**report, "gates": [{**one, "sentence": plain(one["sentence"])[:_SHOWN]} for one in report["gates"]]}
    back: list[Markup] = [tag("pre", command) for command in map(plain, report["way_back"])]
    head = tag("h2", f"{mark} nxpipe release to {report['channel']}: {report['verdict']}")
    return f"{tag('div', head, gates(said), back)}\n\n"


def _state(one: Passage) -> str:
    return style(f"{one.state:11}", fg=_COLOURS.get(one.state))
