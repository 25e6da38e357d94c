"""What a rollout leaves behind: every verdict with all that it was made of, each chained to the one before.

A file of it has the plan in its first line, and one judgement in each other. A judgement may carry more than is named
here; whatever it carries, the next one has its digest.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nxpipe.pipeline.canary.counts import Batch
from nxpipe.pipeline.canary.documents import CanaryError, RecordInvalid, canonical_json, digest_of
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.judge import Judgement, Moment, judge
from nxpipe.pipeline.canary.plan import CanaryPlan


def record_of(
    plan: CanaryPlan, at: Moment, batches: Sequence[Batch], judged: Judgement, previous: str | None
) -> dict[str, Any]:
    return {
        "plan": plan.digest,
        "moment": asdict(at),
        "batches": [batch.as_json() for batch in batches],
        "evidence": judged.evidence.digest,
        "verdict": judged.verdict.as_json(),
        "previous": previous,
    }


def read(lines: Sequence[str]) -> tuple[CanaryPlan, list[dict[str, Any]]]:
    """The plan and the judgements of a file."""
    try:
        documents = [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError) as error:
        raise RecordInvalid(f"The record is no JSON: {error}; fetch it again.") from error
    if not documents or not all(isinstance(each, dict) for each in documents) or "steps" not in documents[0]:
        raise RecordInvalid("The record does not begin with the plan of its rollout; fetch it again.")
    return CanaryPlan.from_json(documents[0]), documents[1:]


@dataclass(frozen=True)
class ReplayedJudgement:
    """One judgement, and what is wrong with its record, if anything is."""

    number: int
    judged: Judgement
    wrong: str | None


def replay(plan: CanaryPlan, records: Iterable[Mapping[str, Any]]) -> Iterable[ReplayedJudgement]:
    """Judge again, from the first judgement to the first that differs."""
    evidence, previous = Evidence(), None
    for number, record in enumerate(records, 1):
        if record.get("verdict") is not None:
            judged, wrong = _again(plan, evidence, record, previous, number)
            yield ReplayedJudgement(number, judged, wrong)
            if wrong:
                return
            evidence = judged.evidence
        previous = digest_of(record)


def _again(
    plan: CanaryPlan, evidence: Evidence, record: Mapping[str, Any], previous: str | None, number: int
) -> tuple[Judgement, str | None]:
    try:
        at, batches = Moment(**record["moment"]), [Batch.from_json(each) for each in record["batches"]]
        judged = judge(plan, evidence, batches, at)
        said = {name: record[name] for name in ("plan", "evidence", "verdict", "previous")}
    except (KeyError, TypeError, AttributeError, CanaryError) as error:
        raise RecordInvalid(f"Judgement {number} of the record cannot be read: {error!r}; fetch it again.") from error
    again = record_of(plan, at, batches, judged, previous)
    wrong = next((name for name in said if canonical_json(said[name]) != canonical_json(again[name])), None)
    return judged, wrong and f"its {wrong} is {_short(said[wrong])}, and the judge says {_short(again[wrong])}"


def _short(value: object) -> str:
    return canonical_json(value)[:200]
