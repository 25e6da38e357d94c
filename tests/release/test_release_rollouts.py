"""A release to a channel of a running fleet: the traffic first, then the channel.

The fleet's machine waits, or ends as a test orders: tests/pipeline/rollout_world.py. The artifacts are small samples,
so `verify`, which would run them, is omitted.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from nxpipe.pipeline.util import exit_codes
from tests.pipeline.rollout_world import Fleet, fleet, front
from tests.release.world import gate, states

__all__ = ["fleet", "front"]

WORDS = ("release", "--to", "production", "--from", "staging", "--skip", "verify", "--json")


@pytest.fixture(autouse=True)
def second_on_staging(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Production serves the first artifact."""
    monkeypatch.setattr("nxpipe.pipeline.rollout.follow._INTERVAL", 0.05)
    assert fleet.nxpipe("promote", fleet.name(1), "--channel", "staging").code == 0


def released(fleet: Fleet, *words: str, code: int = 0) -> dict[str, Any]:
    answer = fleet.nxpipe(*WORDS, *words)
    assert answer.code == code, answer.err
    report: dict[str, Any] = json.loads(answer.out)
    return report


def test_a_fleets_channel_moves_when_its_rollout_has_promoted_and_not_before(fleet: Fleet) -> None:
    under_way = released(fleet, "--no-wait")
    assert (states(under_way)["promote"], states(under_way)["rollout"]) == ("skipped", "passed")
    assert under_way["way_back"] == ["nxpipe rollout abort search"]
    assert [fleet.served(name) for name in ("production", "search--green")] == [fleet.name(0), fleet.name(1)]
    released(fleet, "--no-wait")
    assert len(fleet.running()) == 1  # followed, and not begun again


def test_a_rollout_that_promotes_is_a_release_and_is_taken_back_by_another(fleet: Fleet) -> None:
    fleet.says("promoted", "all steps went well")
    report = released(fleet)
    assert report["verdict"] == "released"
    assert "promoted" in gate(report, "rollout")["sentence"]
    assert fleet.served("production") == fleet.name(1)
    assert report["way_back"] == [f"nxpipe rollout start search {fleet.name(0)} --wait"]


def test_a_rollout_that_goes_back_fails_the_release_and_leaves_the_channel(fleet: Fleet) -> None:
    fleet.says("rolled_back", "errors doubled")
    report = released(fleet, code=exit_codes.ROLLED_BACK.number)
    assert (report["verdict"], states(report)["rollout"]) == ("not released", "failed")
    assert "errors doubled" in gate(report, "rollout")["sentence"]
    assert fleet.served("production") == fleet.name(0)
    assert report["way_back"] == []
    again = released(fleet, code=exit_codes.ROLLED_BACK.number)  # it was judged: nobody begins it anew unasked
    assert "errors doubled" in gate(again, "rollout")["sentence"]


def test_of_two_fleets_of_a_channel_the_second_keeps_what_it_runs_until_its_turn(fleet: Fleet) -> None:
    text = Path("nxpipe.toml").read_text()
    twin = text[text.index("[[fleets]]") :].replace('"search"', '"ranking"')
    Path("nxpipe.toml").write_text(text + twin)
    report = released(fleet, "--no-wait")
    assert "not started: fleet ranking" in gate(report, "rollout")["sentence"]
    assert [fleet.served(f"ranking--{colour}") for colour in ("blue", "green")] == [fleet.name(0)] * 2
    assert report["way_back"] == ["nxpipe rollout abort search"]


def test_without_the_gate_the_channel_moves_by_itself(fleet: Fleet) -> None:
    report = released(fleet, "--skip", "rollout")
    assert (states(report)["promote"], states(report)["rollout"]) == ("passed", "skipped")
    assert fleet.served("production") == fleet.name(1)
    assert fleet.running() == []


def test_a_channel_that_has_served_nothing_has_no_traffic_to_move(fleet: Fleet) -> None:
    text = Path("nxpipe.toml").read_text()
    Path("nxpipe.toml").write_text(text.replace('channel = "production"', 'channel = "eu"'))
    answer = fleet.nxpipe(*["eu" if word == "production" else word for word in WORDS])
    assert answer.code == 0, answer.err
    assert states(json.loads(answer.out))["rollout"] == "skipped"
    assert (fleet.served("eu"), fleet.running()) == (fleet.name(1), [])
