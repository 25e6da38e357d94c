"""The demonstration `make demo-rollout`: two rollouts by the real commands, starting with an empty account."""

import pytest

from nxpipe.pipeline.util import exit_codes
from tests.localaws.rollout_demo import demo


@pytest.mark.slow
def test_a_good_version_is_promoted_and_a_bad_one_goes_back(sealed_environment: None) -> None:
    result: list[str] = []
    story = demo(result.append)
    assert (story.good, story.bad) == (exit_codes.OK.number, exit_codes.ROLLED_BACK.number), "\n".join(result)
    shares = [weight["green"] for weight in story.weights]
    assert shares[:5] == [0, 10, 50, 95, 100]
    assert shares[-1] == 100
    assert set(shares[5:]) == {90, 100}  # the bad version had at most a tenth of the traffic
    assert story.served == story.versions[1]
    assert story.replayed > 0
