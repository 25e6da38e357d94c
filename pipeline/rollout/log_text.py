"""The looks of a rollout as a table."""

from collections.abc import Sequence
from typing import Final

from nxpipe.pipeline.canary.explain import odds
from nxpipe.pipeline.rollout.looks import Look
from nxpipe.pipeline.rollout.machine import Execution
from nxpipe.pipeline.util.text import table

_HEADER: Final = ("at", "step", "new: bad of all", "old: bad of all", "for it", "against", "word", "because")


def log_text(execution: Execution, looks: Sequence[Look]) -> str:
    """The counts are of the minutes that a look took in; the evidence is all that there was by then."""
    asked = execution.asked
    title = f"{execution.name}: {asked.candidate.name}, {asked.old} -> {asked.new}" if asked else execution.name
    if not looks:
        return f"{title}\nNothing was looked at yet."
    return f"{title}\n{table(_HEADER, [_row(look) for look in looks])}"


def _row(look: Look) -> tuple[str, ...]:
    arms = [(batch.canary, batch.stable) for batch in look.batches]
    new, old = ([pair[side] for pair in arms] for side in (0, 1))
    counts = [f"{sum(arm.errors for arm in side):g} of {sum(arm.requests for arm in side):g}" for side in (new, old)]
    verdict = look.verdict
    evidence = (odds(verdict.better), odds(verdict.worse)) if verdict else ("", "")
    at = look.at.replace("T", " ")[:19]
    step = "all" if look.step is None else str(look.step + 1)
    return (at, step, *(counts if arms else ("", "")), *evidence, look.word, look.reason.split("\n")[0])
