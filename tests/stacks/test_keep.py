"""The replacement guard: a changed logical id is refused, and so is an unregistered one."""

from typing import Any

import pytest

from nxpipe.stacks.lint.data_rules import RULE, STATEFUL_IDS, TEXT, stateful_ids
from nxpipe.stacks.lint.finding import Facts
from nxpipe.stacks.lint.rules import lint
from nxpipe.stacks.lint.template import Templates, read

RETAINED = {"DeletionPolicy": "Retain", "UpdateReplacePolicy": "Retain"}


def storage() -> dict[str, Any]:
    return {id_: {"Type": type_, "Properties": {}, **RETAINED} for id_, type_ in STATEFUL_IDS["storage"].items()}


def told(resources: dict[str, Any], stack: str = "search-storage", project: str | None = "search") -> list[str]:
    found = lint(Templates((read(stack, {"Resources": resources}),)), Facts(project=project))
    return [str(entry) for entry in found if entry.rule == "NXP-KEEP-1"]


def test_what_keeps_its_ids_is_not_told() -> None:
    assert told(storage()) == []


@pytest.mark.parametrize("id_", STATEFUL_IDS["storage"])
def test_a_moved_id_is_told_as_what_is_left_behind_and_as_what_would_be_new(id_: str) -> None:
    moved = storage()
    moved["Renamed"] = moved.pop(id_)
    gone, new = told(moved)
    assert f"{id_} is no longer in the template" in gone
    assert "Renamed is retained, but not listed as a stateful resource" in new


def test_another_type_under_the_same_id_is_another_resource() -> None:
    changed = storage()
    changed["Key961B73FD"]["Type"] = "AWS::S3::Bucket"
    assert any("Key961B73FD is no longer in the template" in entry for entry in told(changed))


@pytest.mark.parametrize("policy", RETAINED)
def test_what_is_guarded_is_retained(policy: str) -> None:
    loose = storage()
    loose["Artifacts82DD59A1"][policy] = "Delete"
    (said,) = told(loose)
    assert "it would be deleted with its stack" in said


def test_resources_that_can_be_made_again_may_come_and_go() -> None:
    assert told({**storage(), "Topic": {"Type": "AWS::SNS::Topic", "Properties": {}}}) == []


def test_stacks_of_others_are_not_judged() -> None:
    assert told({}, stack="other-storage") == []
    assert told({}, project=None) == []
    assert stateful_ids("search-network", "search") == {}


def test_a_bucket_that_only_some_fleets_have_is_guarded_where_it_is() -> None:
    bucket = {"Type": "AWS::S3::Bucket", "Properties": {}, **RETAINED}
    assert told({}, stack="search-train-tuning") == []
    assert told({"Checkpoints620E2F20": bucket}, stack="search-train-tuning") == []
    assert told({"Checkpoints00000000": bucket}, stack="search-train-tuning")
    assert told({"Checkpoints620E2F20": bucket | {"DeletionPolicy": "Delete"}}, stack="search-train-tuning")


def told_of_weights(rule: dict[str, Any] | None, project: str | None = "search") -> list[str]:
    resources = (
        {} if rule is None else {RULE: {"Type": "AWS::ElasticLoadBalancingV2::ListenerRule", "Properties": rule}}
    )
    found = lint(Templates((read("search-serve-web", {"Resources": resources}),)), Facts(project=project))
    return [str(entry) for entry in found if entry.rule == "NXP-KEEP-2"]


def test_the_rule_that_weighs_is_not_told_as_long_as_its_text_stays() -> None:
    assert told_of_weights({**TEXT}) == []


@pytest.mark.parametrize(
    ("what", "value"),
    [("Tags", [{"Key": "team", "Value": "search"}]), ("Priority", 99), ("Actions", []), ("Conditions", None)],
)
def test_any_other_text_of_it_would_put_its_weights_back_and_is_told(what: str, value: Any) -> None:
    (said,) = told_of_weights({**TEXT, what: value})
    assert f", {what})" in said
    assert "would reset the traffic weights to the initial ones; restore its text" in said


def test_a_fleet_whose_rule_has_gone_is_told_and_a_stack_of_somebody_else_is_not() -> None:
    assert len(told_of_weights(None)) == 1
    assert told_of_weights(None, project="other") == []
