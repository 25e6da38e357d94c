"""What the stacks accept of the packs' findings: each once, with a decision, and never of our own rules."""

from collections import Counter

import pytest

from nxpipe.stacks.lint.rules import RULES
from nxpipe.stacks.lint.validation import ACKNOWLEDGED


def test_each_has_a_reason_that_says_something_and_no_twin() -> None:
    assert all(len(entry.reason) >= 20 for entry in ACKNOWLEDGED)
    assert max(Counter((entry.rule, entry.resource) for entry in ACKNOWLEDGED).values()) == 1


def test_none_is_of_our_own_rules() -> None:
    assert not {entry.rule for entry in ACKNOWLEDGED} & {rule.id for rule in RULES}


@pytest.mark.parametrize("pack", ["AwsSolutions", "CKV", "NIST"])
def test_they_are_sorted_by_rule(pack: str) -> None:
    rules = [entry.rule for entry in ACKNOWLEDGED if entry.rule.startswith(pack)]
    assert rules
    assert rules == sorted(rules)
