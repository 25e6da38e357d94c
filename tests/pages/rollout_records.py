"""Evaluation records of a rollout in a store, as the judge of a fleet stores them."""

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.handler import stored_document
from nxpipe.pipeline.canary.judge import Decision, Moment, judge
from nxpipe.pipeline.canary.metrics import Arm, Batch
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.canary.record import record_of


def store_rollout(store: Store, plan: CanaryPlan, fleet: str, rollout: str, failed: int, minutes: int = 40) -> str:
    """A rollout of which `failed` of 60 requests fail each minute, against 1 of 240; its last decision."""
    name = f"rollouts/{fleet}/{rollout}"
    documents = [stored_document(name, 0, plan.as_json())]
    evidence, previous, step, begun, word = Evidence(), None, 0, 0, ""
    for minute in range(minutes):
        at = Moment(step, begun, minute + 1)
        batches = [Batch(minute, Arm(60, failed), Arm(240, 1))]
        judged = judge(plan, evidence, batches, at)
        evidence, word = judged.evidence, str(judged.verdict.decision)
        record = record_of(plan, at, batches, judged, previous)
        when = f"2026-11-21T19:{minute:02}:47.250000Z"
        record |= {"number": minute + 1, "at": when, "word": word, "reason": f"{word}: by the judge\nfigures"}
        documents.append(stored_document(name, minute + 1, record))
        if judged.verdict.decision is Decision.ADVANCE and step + 1 < len(plan.phases):
            step, begun = step + 1, minute + 1
        elif judged.verdict.decision in (Decision.ADVANCE, Decision.ROLL_BACK, Decision.UNDECIDED):
            break
    for document in documents:
        store.backend.replace(document["key"], Payload.of(canonical_json(document["record"])))
    return word
