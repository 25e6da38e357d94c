"""The demonstration `make demo-rollout`: rollouts by the real commands and servers, starting with an empty account."""

import pytest

from nxpipe.pipeline.util import exit_codes
from tests.localaws.rollout_demo import CANDIDATES, demo


@pytest.mark.slow
def test_a_good_version_is_promoted_and_a_wrong_a_slow_and_a_crashing_one_go_back(sealed_environment: None) -> None:
    result: list[str] = []
    story = demo(result.append)
    played = {each.candidate.name: each for each in story.played}
    ended = {name: each.code for name, each in played.items()}
    bad = exit_codes.ROLLED_BACK.number
    assert ended == {"wrong": bad, "slow": bad, "crashing": bad, "good": exit_codes.OK.number}, "\n".join(result)
    assert [*played] == [each.name for each in CANDIDATES]
    # The wrong one had no traffic, and the others went back in their first steps.
    assert (played["wrong"].shares, played["wrong"].requests) == ([0], 0)
    assert played["slow"].shares[:2] == [0, 50]
    assert played["slow"].shares[-1] == 0
    assert played["crashing"].crashes > 0  # in the shadow phase or in the first step
    assert played["crashing"].shares[-1] == 0
    assert played["good"].shares == [0, 50, 95, 100]
    assert (played["good"].failed, played["good"].crashes) == (0, 0)
    assert story.served == story.promoted
    assert story.replayed > 0
