"""The evaluator decides as IAM's documentation states, and as a second, simpler formulation."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.iam.evaluator import Principal, Request, UnknownElement, allowed, decides, like, like_arn
from tests.iam.templates import Templates, managed_policy

KEY = "arn:aws:kms:us-east-2:123456789012:key/k"
ROLE = Principal("AWS", "arn:aws:iam::123456789012:role/nxpipe/r")
SHORT = st.text("ab:*?", max_size=6)


def by_hand(pattern: str, text: str) -> bool:
    """Wildcards by the set of positions that each prefix of the pattern can reach."""
    reached = {0}
    for char in pattern:
        if char == "*":
            reached = set(range(min(reached), len(text) + 1)) if reached else set()
        else:
            reached = {at + 1 for at in reached if at < len(text) and char in ("?", text[at])}
    return len(text) in reached


@given(SHORT, st.text("ab:", max_size=6))
def test_wildcards_match_as_in_a_second_formulation(pattern: str, text: str) -> None:
    assert like(pattern, text) == by_hand(pattern, text)


@given(
    st.lists(
        st.tuples(st.sampled_from(["Allow", "Deny"]), st.sampled_from(["s3:Get*", "s3:Put?", "*"]), SHORT), max_size=5
    ),
    st.sampled_from(["s3:GetA", "s3:PutB"]),
    st.text("ab", max_size=4),
)
def test_a_deny_wins_over_every_allow_and_nothing_is_allowed_by_default(
    entries: list[tuple[str, str, str]], action: str, key: str
) -> None:
    statements = [
        {"Effect": effect, "Action": pattern, "Resource": f"arn:aws:s3:::b/{objects}"}
        for effect, pattern, objects in entries
    ]
    effects = [
        effect
        for effect, pattern, objects in entries
        if by_hand(pattern.lower(), action.lower()) and by_hand(f"b/{objects}", f"b/{key}")
    ]
    assert allowed(statements, action, f"arn:aws:s3:::b/{key}") == (max(effects, default="Deny") == "Allow")


def test_a_wildcard_of_an_arn_stays_within_its_part() -> None:
    assert like_arn("arn:aws:sns:*:123456789012:*", "arn:aws:sns:us-east-2:123456789012:topic:more")
    assert not like_arn("arn:aws:s*::123456789012:topic", "arn:aws:sns:us-east-2:123456789012:topic")


def when(condition: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"Effect": "Allow", "Action": "kms:Sign", "Resource": KEY, "Condition": condition}]


@pytest.mark.parametrize(
    ("condition", "context", "result"),
    [
        ({"StringEquals": {"a:b": ["x", "y"]}}, {"A:B": "y"}, True),
        ({"StringEquals": {"a:b": "x"}}, {}, False),
        ({"StringEquals": {"a:b": "x*"}}, {"a:b": "xy"}, False),
        ({"StringLike": {"a:b": "x*"}}, {"a:b": "xy"}, True),
        ({"StringLike": {"a:b": "[x]*"}}, {"a:b": "x"}, False),
        ({"StringNotEquals": {"a:b": "x"}}, {}, True),
        ({"StringNotEquals": {"a:b": ["x", "y"]}}, {"a:b": "y"}, False),
        ({"StringEqualsIfExists": {"a:b": "x"}}, {}, True),
        ({"StringEqualsIfExists": {"a:b": "x"}}, {"a:b": "z"}, False),
        ({"Null": {"a:b": "false"}}, {}, False),
        ({"Null": {"a:b": "false"}}, {"a:b": "x"}, True),
        ({"Null": {"a:b": True}}, {}, True),
        ({"Bool": {"a:b": True}}, {"a:b": "TRUE"}, True),
        ({"NumericLessThan": {"a:b": 1.2}}, {"a:b": "1.1"}, True),
        ({"NumericLessThan": {"a:b": 1.2}}, {"a:b": "1.2"}, False),
        ({"ForAllValues:StringEquals": {"a:b": ["x", "y"]}}, {}, True),
        ({"ForAllValues:StringEquals": {"a:b": ["x", "y"]}}, {"a:b": ("x", "y")}, True),
        ({"ForAllValues:StringEquals": {"a:b": ["x", "y"]}}, {"a:b": ("x", "z")}, False),
        ({"ForAnyValue:StringEquals": {"a:b": ["x"]}}, {"a:b": ("x", "z")}, True),
        ({"ForAnyValue:StringEquals": {"a:b": ["x"]}}, {}, False),
        ({"StringEquals": {"a:b": "x"}, "Null": {"c:d": "true"}}, {"a:b": "x", "c:d": "e"}, False),
    ],
)
def test_conditions_hold_as_the_documentation_states(
    condition: dict[str, Any], context: dict[str, Any], result: bool
) -> None:
    assert allowed(when(condition), "kms:Sign", KEY, context) == result


@pytest.mark.parametrize(
    "statement",
    [
        {"Effect": "Allow", "Action": "kms:Sign", "Resource": KEY, "Condition": {"DateLessThan": {"a:b": "2026"}}},
        {"Effect": "Allow", "Action": "kms:Sign", "Resource": KEY, "Condition": {"ForMost:Bool": {"a:b": "true"}}},
        {"Effect": "Allow", "Action": "kms:Sign", "Resource": "key/k"},
        {"Effect": "Allow", "Action": "kms:Sign"},
        {"Effect": "Allow", "Action": "kms:Sign", "Resource": KEY, "NotPrincipal": "*"},
        {"Effect": "Audit", "Action": "kms:Sign", "Resource": KEY},
        {"Effect": "Allow", "Action": "kms:Sign", "Resource": "arn:aws:kms:*:*:key/${aws:username}"},
    ],
)
def test_what_the_evaluator_does_not_implement_is_an_error(statement: dict[str, Any]) -> None:
    with pytest.raises(UnknownElement):
        allowed([statement], "kms:Sign", KEY)


def test_not_action_and_not_resource_are_about_all_others() -> None:
    others = [{"Effect": "Allow", "NotAction": "kms:Sign", "NotResource": KEY}]
    assert allowed(others, "kms:Verify", KEY + "2")
    assert not allowed(others, "kms:Sign", KEY + "2")
    assert not allowed(others, "kms:Verify", KEY)


def test_a_resource_policy_allows_by_itself_delegates_by_the_account_and_denies_everybody() -> None:
    request = Request("kms:Sign", KEY)
    identity = [{"Effect": "Allow", "Action": "kms:Sign", "Resource": KEY}]

    def policy(principal: Any, effect: str = "Allow") -> list[dict[str, Any]]:
        return [{"Effect": effect, "Action": "kms:*", "Resource": "*", "Principal": principal}]

    root = {"AWS": "arn:aws:iam::123456789012:root"}
    assert decides(request, ROLE, [], policy({"AWS": ROLE.id}), needs_both=True)
    assert decides(request, ROLE, identity, policy(root), needs_both=True)
    assert not decides(request, ROLE, [], policy(root), needs_both=True)
    assert not decides(request, ROLE, [], policy(root))
    assert not decides(request, ROLE, identity, policy({"AWS": "arn:aws:iam::210987654321:root"}), needs_both=True)
    assert decides(request, ROLE, identity)
    for principal in ("*", {"AWS": "*"}, root, {"AWS": [ROLE.id]}):
        assert not decides(request, ROLE, identity, policy(principal, "Deny")), principal


def test_references_in_a_template_are_resolved_to_names_and_arns() -> None:
    resources = {"Topic": {"Type": "AWS::SNS::Topic", "Properties": {"TopicName": {"Fn::Sub": "of-${AWS::Region}"}}}}
    templates = Templates({"stack": {"Resources": resources}})
    text = "${Topic} ${Topic.TopicName} ${Given} ${!Plain}"
    resolved = templates.resolve("stack", {"Fn::Sub": [text, {"Given": {"Ref": "AWS::AccountId"}}]})
    arn = "arn:aws:sns:us-east-2:123456789012:of-us-east-2"
    assert resolved == f"{arn} stack.Topic.TopicName 123456789012 ${{Plain}}"


def test_an_aws_managed_policy_has_the_statements_of_aws() -> None:
    pull = managed_policy("AmazonEC2ContainerRegistryPullOnly")
    repository = "arn:aws:ecr:us-east-2:123456789012:repository/a"
    assert allowed(pull, "ecr:BatchGetImage", repository)
    assert not allowed(pull, "ecr:PutImage", repository)
