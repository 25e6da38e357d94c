"""What is said when a build is over: the counts, every missing cell by name, and where to read more."""

from collections.abc import Iterator
from pathlib import Path

from nxpipe.pipeline.build.report.reasons import Lack, missing, tallied
from nxpipe.pipeline.build.report.words import counted, duration, plain
from nxpipe.pipeline.build.results import Results
from nxpipe.pipeline.util.escape import style


def summary(results: Results, report: Path | None = None) -> list[str]:
    lines = [headline(results)]
    for lack in missing(results):
        lines += ["", *_missing(lack)]
    if report:
        lines += ["", f"report: {report}"]
    return lines


def headline(results: Results) -> str:
    """One sentence: is all there, and what it took."""
    if results.interrupted:
        word, colour = "interrupted", "yellow"
    else:
        word, colour = ("incomplete", "red") if results.missing() else ("complete", "green")
    took = f"{duration(results.seconds)} with the executor {results.executor}"
    return f"{style(word, fg=colour, bold=True)}: {tally(results)}; {published(results)}; {took}"


def tally(results: Results) -> str:
    counts = tallied(results)
    parts = ", ".join(f"{count:,} {word}" for word, count in counts.items())
    return f"{counted(sum(counts.values()), 'program')}: {parts or 'none was asked for'}"


def published(results: Results) -> str:
    lacking = {id(one.artifact) for one in results.missing()}
    whole = sum(id(artifact) not in lacking for artifact in results.plan.artifacts)
    return f"{whole:,} of {counted(len(results.plan.artifacts), 'artifact')} published"


def _missing(lack: Lack) -> Iterator[str]:
    why = lack.reason
    became = style(why.became, fg="red" if why.became == "failed" else "yellow")
    yield f"{became}{f' {why.name}' if why.became == 'failed' else ''}: {why.text}"
    for lot in lack.lots:
        one = lot.members[0]
        tries = f"  ({counted(one.attempts, 'attempt')})" if one.attempts > 1 else ""
        yield f"  {plain(one.artifact.title)}, {lot.name}{tries}"
    yield f"  way out: {why.way_out}"
