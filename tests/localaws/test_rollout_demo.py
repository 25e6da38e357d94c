"""The story that `make demo-rollout` tells: two rollouts by the real commands, from an empty account to their ends."""

import pytest

from nxpipe.pipeline.util import exit_codes
from tests.localaws.rollout_demo import demo


@pytest.mark.slow
def test_a_good_version_is_promoted_and_a_bad_one_goes_back(sealed_environment: None) -> None:
    told: list[str] = []
    story = demo(told.append)
    assert (story.good, story.bad) == (exit_codes.OK.number, exit_codes.ROLLED_BACK.number), "\n".join(told)
    shares = [each["green"] for each in story.weights]
    assert shares[:5] == [0, 10, 50, 95, 100]
    assert shares[-1] == 100
    assert set(shares[5:]) == {90, 100}  # the bad one had a tenth of traffic, and no more
    assert story.served == story.versions[1]
    assert story.replayed > 0
