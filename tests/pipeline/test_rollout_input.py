"""The input of a rollout: how long it waits for new instances."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.canary.plan import Schedule
from nxpipe.pipeline.rollout.input import schedule_of

MINUTES = st.sampled_from([1, 5, 10, 30, 60])
READY = st.integers(60, 7200).map(lambda seconds: timedelta(seconds=seconds))


@given(MINUTES, READY)
def test_a_rollout_waits_longer_than_the_fleet_permits_its_instances_to_take(minute: int, ready: timedelta) -> None:
    pace = schedule_of(minute, ready)
    assert pace.warm * pace.warm_tries >= (ready + timedelta(minutes=15)) / timedelta(minutes=1) * minute
    assert pace.warm_tries >= Schedule().warm_tries


@given(MINUTES)
def test_a_fleet_that_is_ready_within_half_an_hour_is_waited_for_as_by_default(minute: int) -> None:
    assert schedule_of(minute, timedelta(minutes=30)).warm_tries == Schedule().warm_tries


def test_instances_that_may_take_two_hours_are_waited_for_two_and_a_quarter() -> None:
    pace = schedule_of(60, timedelta(hours=2))
    assert (pace.warm, pace.warm_tries) == (15, 540)
