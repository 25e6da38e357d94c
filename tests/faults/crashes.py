"""Assertions after each crash: no partial result is visible, and a repetition completes the work."""

from collections.abc import Mapping

from tests.faults.invariants import Objects, Visible, breaches, visible
from tests.faults.operations import Attempt


def assert_nothing_half_done(before: Visible, objects: Objects, attempt: Attempt, *, finished: bool) -> None:
    """The objects keep every invariant, and readers see the former state, or that and the whole attempt."""
    broken = breaches(objects)
    assert not broken, broken
    now = visible(objects)
    news = {key for key, answer in now.answers.items() if before.answers.get(key) != answer}
    assert news <= {attempt.key}
    assert before.answers.keys() - attempt.gives_up <= now.answers.keys()
    grown = _grown(before.histories, now.histories)
    assert grown.keys() <= {attempt.channel}
    if finished:
        assert attempt.key is None or attempt.key in now.answers
        # Exactly one: crash and repetition must not promote twice.
        assert attempt.channel is None or grown == {attempt.channel: 1}


def assert_the_first_answer_stood(crashed: Objects, repeated: Objects, attempt: Attempt) -> None:
    """A repetition finds what was visible, byte by byte; abandoned objects are gone.

    Only after the repetition: a collection spares uncertain objects, and the next one removes them.
    """
    first, second = visible(crashed), visible(repeated)
    assert not attempt.gives_up & second.answers.keys()
    for key in first.answers.keys() - attempt.gives_up:
        assert second.answers[key] == first.answers[key]
        assert repeated[f"ac/{key}"] == crashed[f"ac/{key}"]
    for channel, history in first.histories.items():
        assert second.histories[channel][: len(history)] == history


def _grown(before: Mapping[str, tuple[str, ...]], now: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """The number of new entries of each history; existing ones must not change."""
    assert before.keys() <= now.keys()
    for channel, entries in before.items():
        assert now[channel][: len(entries)] == entries
    lengths = {channel: len(entries) - len(before.get(channel, ())) for channel, entries in now.items()}
    return {channel: length for channel, length in lengths.items() if length}
