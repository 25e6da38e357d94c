import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nxpipe.pipeline.canary.documents import RecordInvalid, canonical_json, digest_of
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.judge import Moment, judge
from nxpipe.pipeline.canary.metrics import Batch
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.canary.record import read, record_of, replay
from tests.canary.samples import PLAN, minute
from tests.pipeline.in_process import InProcess
from tests.pipeline.in_process import nxpipe as here

__all__ = ["here"]


def recorded(minutes: int = 12, plan: CanaryPlan = PLAN) -> list[dict[str, Any]]:
    """Two steps; some minutes arrive late, and one never."""
    evidence, records, previous = Evidence(), [], None
    for now in range(1, minutes + 1):
        at = Moment(0, 0, now) if now <= 6 else Moment(1, 6, now)
        batches = [] if now % 3 == 0 else [minute(now - 1, (150, 1), (2850, 14))]
        if now % 6 == 4:
            batches.append(minute(now - 2, (148, 0), (2790, 11)))
        judged = judge(plan, evidence, batches, at)
        records.append(record_of(plan, at, batches, judged, previous) | {"word": "continue"})
        evidence, previous = judged.evidence, digest_of(records[-1])
    return records


def lines(records: list[dict[str, Any]]) -> str:
    return "\n".join(map(canonical_json, [PLAN.as_json(), *records])) + "\n"


def test_a_record_is_derived_again_bit_for_bit() -> None:
    plan, records = read(lines(recorded()).splitlines())
    replayed = list(replay(plan, records))
    assert plan == PLAN
    assert len(replayed) == 12
    assert [entry.wrong for entry in replayed] == [None] * 12


def altered(name: str, record: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(record))
    if name == "count":
        changed["batches"][0]["canary"]["errors"] += 1
    elif name == "verdict":
        changed["verdict"]["worse"] += 1e-12
    elif name == "word":
        changed["word"] = "advance"
    else:
        changed[name] = "0" * 64
    return changed


@pytest.mark.parametrize(
    ("name", "first_wrong"),
    [("count", 5), ("verdict", 5), ("evidence", 5), ("plan", 5), ("previous", 5), ("word", 6)],
)
def test_the_first_judgement_that_differs_is_named(name: str, first_wrong: int) -> None:
    """What the judge does not derive, as somebody else's word, breaks the chain at the next one."""
    records = recorded()
    records[4] = altered(name, records[4])
    *same, wrong = replay(PLAN, records)
    assert [entry.wrong for entry in same] == [None] * (first_wrong - 1)
    assert wrong.number == first_wrong
    assert wrong.wrong is not None


def test_a_judgement_that_was_taken_out_is_missed() -> None:
    records = recorded()
    del records[2]
    assert [entry.number for entry in replay(PLAN, records) if entry.wrong] == [3]


def test_a_look_without_a_verdict_is_a_link_of_the_chain() -> None:
    records = recorded()
    records.append({"previous": digest_of(records[-1]), "verdict": None, "word": "advance"})
    assert len(list(replay(PLAN, records))) == 12


@pytest.mark.parametrize("text", ["", "{}", "not json", '"plan"', "[1]\n"])
def test_a_file_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(RecordInvalid, match="fetch it again"):
        read(text.splitlines())


def test_a_judgement_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(RecordInvalid, match="judgement 1"):
        list(replay(PLAN, [{"verdict": {}, "moment": {"step": 9}}]))


def test_the_command_replays_a_record_and_explains_each_step(here: InProcess, tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    file.write_text(lines(recorded()))
    answer = here("rollout", "replay", str(file))
    assert answer.code == 0, answer.err
    assert "12 evaluations, all reproduced" in answer.err
    assert answer.out.startswith("Not decided yet at 25 % after 6 min: ")
    figures = here("rollout", "replay", str(file), "--explain").out
    assert "step 1 of 4, 5 % of traffic, minute 6: " in figures
    assert "step 2 of 4, 25 % of traffic, minute 6: " in figures


def test_the_command_ends_in_its_own_code_at_a_difference(here: InProcess, tmp_path: Path) -> None:
    records = recorded()
    records[4] = altered("verdict", records[4])
    file = tmp_path / "record.jsonl"
    file.write_text(lines(records))
    answer = here("rollout", "replay", str(file), "--json")
    assert answer.code == 35
    assert "evaluation 5 of" in answer.err
    assert json.loads(answer.out)[4]["same"] is False


def test_counts_that_were_put_aside_are_replayed_too() -> None:
    batch = Batch(0, replace(minute(0, (15, 1), (285, 1)).canary, errors=-1), minute(0, (15, 1), (285, 1)).stable)
    judged = judge(PLAN, Evidence(), [batch], Moment(0, 0, 1))
    record = record_of(PLAN, Moment(0, 0, 1), [batch], judged, None)
    assert [entry.wrong for entry in replay(PLAN, json.loads(json.dumps([record])))] == [None]
