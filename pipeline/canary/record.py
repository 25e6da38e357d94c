"""Record of a rollout: the digest chain of its evaluations, and their replay.

Invalid counts are not an error: the judge sets such a minute aside and counts it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nxpipe.pipeline.canary.documents import CanaryError, RecordInvalid, canonical_json, digest_of
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.judge import Judgement, Moment, judge
from nxpipe.pipeline.canary.metrics import Batch
from nxpipe.pipeline.canary.plan import CanaryPlan


def record_of(
    plan: CanaryPlan, at: Moment, batches: Sequence[Batch], judged: Judgement, previous: str | None
) -> dict[str, Any]:
    """The decision record of an evaluation; `previous` is the digest of the one before it."""
    return {
        "plan": plan.digest,
        "moment": asdict(at),
        "batches": [batch.as_json() for batch in batches],
        "evidence": judged.evidence.digest,
        "verdict": judged.verdict.as_json(),
        "previous": previous,
    }


def read(lines: Sequence[str]) -> tuple[CanaryPlan, list[dict[str, Any]]]:
    """The plan and the decision records of a file."""
    try:
        documents = [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError) as error:
        raise RecordInvalid(f"the record is not JSON: {error}; fetch it again") from error
    if not documents or not all(isinstance(document, dict) for document in documents) or "steps" not in documents[0]:
        raise RecordInvalid("the record does not begin with the plan of its rollout; fetch it again")
    return CanaryPlan.from_json(documents[0]), documents[1:]


@dataclass(frozen=True)
class ReplayedJudgement:
    """A repeated judgement; `wrong` describes its difference from the record, if any."""

    number: int
    judged: Judgement
    wrong: str | None


def replay(plan: CanaryPlan, records: Iterable[Mapping[str, Any]]) -> Iterable[ReplayedJudgement]:
    """Repeat all judgements, up to the first that differs from its record."""
    evidence, previous = Evidence(), None
    for number, record in enumerate(records, 1):
        if record.get("verdict") is not None:
            judged, wrong = _repeat(plan, evidence, record, previous, number)
            yield ReplayedJudgement(number, judged, wrong)
            if wrong:
                return
            evidence = judged.evidence
        previous = digest_of(record)


def _repeat(
    plan: CanaryPlan, evidence: Evidence, record: Mapping[str, Any], previous: str | None, number: int
) -> tuple[Judgement, str | None]:
    try:
        at, batches = Moment(**record["moment"]), [Batch.from_json(batch) for batch in record["batches"]]
        judged = judge(plan, evidence, batches, at)
        recorded = {name: record[name] for name in ("plan", "evidence", "verdict", "previous")}
    except (KeyError, TypeError, AttributeError, CanaryError) as error:
        raise RecordInvalid(f"judgement {number} of the record cannot be parsed: {error!r}; fetch it again") from error
    repeated = record_of(plan, at, batches, judged, previous)
    wrong = next((name for name in recorded if canonical_json(recorded[name]) != canonical_json(repeated[name])), None)
    return (
        judged,
        wrong and f"its {wrong} is {_short(recorded[wrong])}, but the judge computes {_short(repeated[wrong])}",
    )


def _short(value: object) -> str:
    return canonical_json(value)[:200]
