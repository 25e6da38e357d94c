"""Report of a release: JSON document, HTML page, text, GitHub job summary, and the commands that undo it."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.builds import timestamp_of
from nxpipe.artifact_store.channel.generation import Generation
from nxpipe.pipeline import VERSION
from nxpipe.pipeline.artifacts.channels import ENVIRONMENTS, environment_channel
from nxpipe.pipeline.build.report.figures import accuracy
from nxpipe.pipeline.build.report.github import append_summary
from nxpipe.pipeline.build.report.result_pages import changes
from nxpipe.pipeline.build.report.summary import counted, duration
from nxpipe.pipeline.models.versions import compiler_digest
from nxpipe.pipeline.release.gates import GateResult
from nxpipe.pipeline.release.state import fleets_with_rollouts, rollout_slots
from nxpipe.pipeline.util.exit_codes import UNDECIDED
from nxpipe.pipeline.util.files import write_whole
from nxpipe.pipeline.util.page.html import Markup, tag
from nxpipe.pipeline.util.page.page import (
    Cell,
    Row,
    Section,
    definitions,
    heading,
    joined,
    moment,
    pill,
    sheet,
    verdict,
)
from nxpipe.pipeline.util.page.page import table as html_table
from nxpipe.pipeline.util.text import for_terminal, plain, style, table

if TYPE_CHECKING:
    from nxpipe.pipeline.config import ServingFleet
    from nxpipe.pipeline.release.run import ReleaseRun
    from nxpipe.pipeline.release.state import ReleaseCandidate, ReleaseContext


FORMAT: Final = "nxpipe.release-report/1"


def report_document(release: "ReleaseContext", run: "ReleaseRun") -> dict[str, Any]:
    results = run.all()
    # A release that failed before it served anything has nothing to undo, and its store may be unreachable.
    undone = undo_commands(release, results) if run.is_over and _has_served(results) else []
    return {
        "format": FORMAT,
        "verdict": _verdict(run),
        "exit_code": run.code,
        "began_at": run.began_at,
        "seconds": round(run.seconds, 3),
        **report_header(release),
        "artifacts": _artifacts(release) if run.results and run.results[0].code == 0 else [],
        "thresholds": asdict(release.thresholds),
        "gates": [asdict(result) for result in results],
        "way_back": undone,
        "versions": {"nxpipe": VERSION, "compiler": compiler_digest()},
    }


def report_header(release: "ReleaseContext") -> dict[str, Any]:
    options = release.options
    return {
        "channel": options.channel,
        "from": options.source,
        "store": release.store.url,
        "reason": options.reason,
        "threshold": options.threshold,
    }


def _verdict(run: "ReleaseRun") -> str:
    if not run.is_over:
        return "under way"
    if run.code == 0:
        return "released"
    return "interrupted" if run.results[-1].state == "interrupted" else "not released"


def _has_served(results: Sequence[GateResult]) -> bool:
    return any(result.gate in ("promote", "rollout") and result.state in ("passed", "done") for result in results)


def _artifacts(release: "ReleaseContext") -> list[dict[str, Any]]:
    """Candidates, with manifests that were read before: the store may have become unreachable."""
    rows = []
    for candidate in release.candidates:
        published = release.known.get(candidate)
        rows.append(
            {
                "name": candidate.name,
                "model_id": candidate.model_id,
                "target": candidate.target,
                "manifest": published.manifest_digest if published else None,
            }
        )
    return rows


_STARTED: Final = (0, UNDECIDED.number)  # exit codes of a rollout that has started
_HISTORY: Final = 100  # generations to search for the previous one


def undo_commands(release: "ReleaseContext", results: "Sequence[GateResult]") -> list[str]:
    """Commands that undo a release, from the channel's log: first for traffic, then for the channel. None compiles."""
    rollout = next((result for result in results if result.gate == "rollout" and result.code in _STARTED), None)
    fleets = {figures["fleet"] for figures in rollout.figures} if rollout else set()
    undo_rollouts = [
        _undo_rollout(release, fleet, candidate)
        for fleet, candidate in fleets_with_rollouts(release)
        if fleet.name in fleets
    ]
    return [_command(release, arguments) for arguments in [*undo_rollouts, _undo_promotion(release)] if arguments]


def _undo_rollout(release: "ReleaseContext", fleet: "ServingFleet", candidate: "ReleaseCandidate") -> list[str]:
    if not release.is_served(candidate):
        return ["rollout", "abort", fleet.name]
    for colour in ENVIRONMENTS:
        tip = release.tip(environment_channel(fleet.name, colour))
        for served in tip.artifacts if tip else ():
            if served.slot == candidate.slot and served.request_key != candidate.request_key:
                return ["rollout", "start", fleet.name, served.name, "--wait"]
    return []


def _undo_promotion(release: "ReleaseContext") -> list[str]:
    """A rollback to the previous generation if the release was the last change, else a promotion of the previous
    artifacts.
    """
    by_rollout = rollout_slots(release)
    direct = [candidate for candidate in release.candidates if candidate.slot not in by_rollout]
    tip = release.tip()
    if tip is None or not direct or not all(_serves(tip, candidate) for candidate in direct):
        return []
    first, before = _change(_history(release), direct)
    if before is None:
        return []
    channel = release.options.channel
    if first == tip:
        return ["rollback", "--channel", channel, "--to", str(before.generation), "--expect", str(tip.generation)]
    slots = {candidate.slot for candidate in direct}
    names = [served.name for served in before.artifacts if served.slot in slots and served not in tip.artifacts]
    return ["promote", *names, "--channel", channel] if names else []


def _history(release: "ReleaseContext") -> Iterator[Generation]:
    return islice(release.trust.history(release.store, release.options.channel), _HISTORY)


def _change(
    history: Iterator[Generation], direct: "list[ReleaseCandidate]"
) -> tuple[Generation | None, Generation | None]:
    """The first generation with all candidates, and its predecessor if it is among the last _HISTORY."""
    first = None
    for generation in history:
        if not all(_serves(generation, candidate) for candidate in direct):
            return first, generation
        first = generation
    return first, None


def _serves(generation: Generation, candidate: "ReleaseCandidate") -> bool:
    return any(
        served.request_key == candidate.request_key and served.slot == candidate.slot for served in generation.artifacts
    )


def _command(release: "ReleaseContext", arguments: list[str]) -> str:
    # A signal goes to the fleet's record, without the store.
    known = ("--config",) if arguments[:2] == ["rollout", "abort"] else ("--store", "--config")
    place = [word for option, value in release.options.place.items() if option in known for word in (option, value)]
    return shlex.join(["nxpipe", *arguments, *place])


_PILLS: Final = {"passed": "good", "done": "info", "failed": "bad", "interrupted": "warn"}
_VERDICTS: Final = {"released": "good", "not released": "bad", "interrupted": "warn"}

Report = Mapping[str, Any]


def html_page(report: Report) -> bytes:
    title = f"Release to {report['channel']}, {moment(report['began_at'])}"
    return sheet(title, "Release report", _lead(report), _sections(report), script=True)


def gate_table(report: Report) -> Markup:
    """The table of gates in the GitHub summary, which has no style sheet."""
    rows = [
        tag(
            "tr",
            [tag("td", cell) for cell in (tag("code", gate["gate"]), gate["state"], gate["sentence"], _seconds(gate))],
        )
        for gate in report["gates"]
    ]
    heads = [tag("th", name, scope="col") for name in _GATES]
    return tag("table", tag("thead", tag("tr", heads)), tag("tbody", rows))


_GATES: Final = ("gate", "state", "result", "time")


def _sections(report: Report) -> Iterator[Section]:
    rows = [_gate(gate) for gate in report["gates"]]
    yield Section("Gates", html_table(_GATES, rows, "Gates of the release", words=("state", "result")))
    if report["artifacts"]:
        yield Section("Artifacts", _figures(report["artifacts"], "Artifacts of the release"))
    yield from _drawn(report)
    for gate in report["gates"]:
        if gate["figures"]:
            summary = tag("summary", counted(len(gate["figures"]), "row"))
            shown = _figures(gate["figures"], f"Figures of the gate {gate['gate']}")
            yield Section(f"Figures of {gate['gate']}", tag("details", summary, shown))
    if report["way_back"]:
        commands = [tag("pre", command) for command in report["way_back"]]
        yield Section("Undo", [tag("p", "These commands undo the release; nothing is compiled."), commands])
    yield Section("Versions", definitions({name: tag("code", value) for name, value in report["versions"].items()}))


def _drawn(report: Report) -> Iterator[Section]:
    """The accuracy that the gate verify found, and the changes that the gate bench found."""
    figures = {gate["gate"]: gate["figures"] for gate in report["gates"]}
    compared = [
        (f"{row['artifact']} {row['program']}", _numbers(output), row["against"])
        for row in figures.get("verify", ())
        for output in row.get("near", ())
    ]
    if compared:
        yield Section("Accuracy", accuracy(compared, report.get("thresholds")))
    changed = [row for row in figures.get("bench", ()) if row.get("before_ns") and row.get("predicted_ns")]
    if changed:
        yield Section("Change against the channel", changes(changed))


def _numbers(output: Report) -> Report:
    """The figures of an output, which the document has as rounded texts."""
    return {name: value if name == "output" else float(value) for name, value in output.items()}


def _lead(report: Report) -> Markup:
    word, source = report["verdict"], report["from"]
    exit_code = f"exit code {report['exit_code']}" if report["exit_code"] else ""
    return heading(
        f"Release to {report['channel']}",
        joined(moment(report["began_at"]), duration(report["seconds"]), f"from {source}" if source else "", exit_code),
        ["store ", tag("code", report["store"])],
        f"reason: {report['reason']}" if report["reason"] else None,
        verdict=verdict(word, _VERDICTS.get(word, "wait")),
    )


def _gate(gate: Report) -> Row:
    state = pill(gate["state"], _PILLS.get(gate["state"], "wait"))
    return (tag("code", gate["gate"]), state, Cell(gate["sentence"], long=True), _seconds(gate))


def _figures(rows: Sequence[Report], caption: str) -> Markup:
    """Scalar columns only; the JSON document has everything."""
    columns = [name for name, value in rows[0].items() if isinstance(value, str | int | float | None)]
    words = [name for name in columns if not all(isinstance(row.get(name), int | float) for row in rows)]
    cells = [[_shown(row.get(name)) for name in columns] for row in rows]
    spelled = {name: name.replace("_", " ") for name in columns}
    return html_table(list(spelled.values()), cells, caption, words=[spelled[name] for name in words])


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _seconds(gate: Report) -> str:
    return duration(gate["seconds"]) if gate["seconds"] else ""


def write_report(report: dict[str, Any], folder: Path) -> Path:
    """Writes release.json and release.html to a folder named after the start time; returns the path of the page."""
    target = folder / timestamp_of(report["began_at"])
    write_whole(target / "release.json", json.dumps(report, indent=2).encode())
    write_whole(target / "release.html", html_page(report))
    return target / "release.html"


_COLOURS: Final = {"passed": "green", "done": "green", "failed": "red", "interrupted": "yellow"}
_SHOWN: Final = 2000  # characters of a sentence


def result_line(result: GateResult) -> str:
    """One line, printed when a gate ends."""
    seconds = style(f"  {duration(result.seconds)}", dim=True) if result.seconds >= 0.1 else ""
    return f"{result.gate:8} {_coloured_state(result)} {plain(result.sentence)}{seconds}"


def result_table(results: Sequence[GateResult]) -> str:
    rows = [(result.gate, _coloured_state(result), plain(result.sentence)) for result in results]
    return table(("gate", "", ""), rows)


def report_text(report: Mapping[str, Any], results: Sequence[GateResult]) -> str:
    lines = [result_table(results)]
    if report["artifacts"]:
        lines += [
            "",
            *(for_terminal(f"{artifact['name']} for {artifact['target']}") for artifact in report["artifacts"]),
        ]
    if report["verdict"] == "released" and not report["way_back"]:
        lines += ["", f"nothing to undo: channel {report['channel']} served none of it before"]
    if report["way_back"]:
        lines += ["", *(for_terminal(f"undo with: {command}") for command in report["way_back"])]
    return "\n".join(lines)


def write_summary(report: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    append_summary(lambda _: _summary(report), environ)


def _summary(report: Mapping[str, Any]) -> str:
    """One HTML block without an empty line, which Markdown passes through unchanged."""
    mark = "✅" if report["verdict"] == "released" else "❌"
    gates = [{**gate, "sentence": plain(gate["sentence"])[:_SHOWN]} for gate in report["gates"]]
    shortened = {**report, "gates": gates}
    undo: list[Markup] = [tag("pre", command) for command in map(plain, report["way_back"])]
    head = tag("h2", f"{mark} nxpipe release to {report['channel']}: {report['verdict']}")
    return f"{tag('div', head, gate_table(shortened), undo)}\n\n"


def _coloured_state(result: GateResult) -> str:
    return style(f"{result.state:11}", fg=_COLOURS.get(result.state))
