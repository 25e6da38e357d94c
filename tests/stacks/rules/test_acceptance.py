"""Acknowledgements: what they cover, how long, and that an idle one is a finding itself."""

from datetime import date

import pytest

from nxpipe.stacks.lint.finding import Accepted, Finding, sift
from nxpipe.stacks.lint.template import Resource

TODAY = date(2026, 11, 21)
PORT = Finding(
    "NXP-NET-1",
    Resource("search-serve-web", None, "GroupA1B2", "AWS::EC2::SecurityGroup", "search-serve-web/Balancer/Group", {}),
    "SecurityGroupIngress/0",
    "port 443 is open to the internet",
    "name the callers",
)


def accepted(resource: str = "*", rule: str = "NXP-NET-1", expires: date | None = date(2027, 6, 1)) -> Accepted:
    return Accepted(rule, resource, "behind the company's own proxy", expires)


@pytest.mark.parametrize(
    "pattern",
    ["*", "search-serve-web/*", "search-serve-web/Balancer/Group", "GroupA1B2", "search-serve-web/GroupA1B2"],
)
def test_a_finding_is_accepted_by_its_path_or_its_logical_id(pattern: str) -> None:
    assert sift([PORT], [accepted(pattern)], TODAY) == []


@pytest.mark.parametrize(
    ("pattern", "rule"), [("search-train-*", "NXP-NET-1"), ("*", "NXP-NET-3"), ("*", "NXP-NET-11")]
)
def test_what_covers_nothing_leaves_the_finding_and_is_one_itself(pattern: str, rule: str) -> None:
    left = sift([PORT], [accepted(pattern, rule)], TODAY)
    assert [entry.rule for entry in left] == ["NXP-NET-1", "NXP-ACK-1"]
    assert f"no finding needs the acknowledgement of {rule} for {pattern}; remove it" in str(left[1])


def test_an_acknowledgement_ends_on_its_day() -> None:
    assert sift([PORT], [accepted(expires=date(2026, 11, 22))], TODAY) == []
    left = sift([PORT], [accepted(expires=TODAY)], TODAY)
    assert [entry.rule for entry in left] == ["NXP-NET-1", "NXP-ACK-2"]
    assert "expired on 2026-11-21" in str(left[1])


def test_one_that_has_ended_and_covers_nothing_is_only_to_be_taken_away() -> None:
    assert [entry.rule for entry in sift([], [accepted(expires=TODAY)], TODAY)] == ["NXP-ACK-1"]


def test_what_the_stacks_themselves_accept_has_no_end_and_may_idle() -> None:
    own = Accepted("NXP-NET-1", "*", "decided in the code", optional=True)
    assert sift([PORT], [own], date(2099, 1, 1)) == []
    assert sift([], [own], TODAY) == []
