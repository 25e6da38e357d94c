"""EventBridge: rules start state machines, publish to topics, and are counted.

Scheduled rules start state machines when a test calls `strike`.
"""

import json
import uuid
from collections.abc import Mapping
from typing import Any

from moto.cloudwatch.models import cloudwatch_backends
from moto.core.utils import utcnow
from moto.events.models import Rule, events_backends

from tests.localaws.formation.provider import client_of
from tests.localaws.moto_patches._around import around


def apply() -> None:
    around(Rule, "send_to_targets", _send)


def strike(rule: str, *, account: str = "123456789012", region: str = "us-east-2") -> None:
    """Fire a scheduled rule; a disabled rule does nothing."""
    response = events_backends[account][region].describe_rule(rule, None)
    if response.state == "ENABLED":
        _start_machines(response, {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}})


def _send(stock: Any, rule: Rule, event: Any, *args: Any, **more: Any) -> None:
    """Send an event to the targets of enabled rules with a pattern; moto includes disabled and scheduled rules."""
    if rule.state == "DISABLED" or not rule.event_pattern.get_pattern():
        return
    if rule.event_pattern.matches_event(event):
        _count(rule)
        _start_machines(rule, event)
        _publish(rule, event)
    remaining = [target for target in rule.targets if not _is_ours(target)]
    rule.targets, deliver = remaining, rule.targets
    try:
        stock(rule, event, *args, **more)
    finally:
        rule.targets = deliver


def _is_ours(target: Mapping[str, Any]) -> bool:
    return ":stateMachine:" in target["Arn"] or ":sns:" in target["Arn"]


def _count(rule: Rule) -> None:
    datum = {
        "MetricName": "TriggeredRules",
        "Dimensions": [{"Name": "RuleName", "Value": rule.name}],
        "Timestamp": utcnow(),
        "Value": 1.0,
        "Unit": "Count",
    }
    cloudwatch_backends[rule.account_id][rule.region_name].put_metric_data("AWS/Events", [datum])


def _publish(rule: Rule, event: Mapping[str, Any]) -> None:
    for target in rule.targets:
        if ":sns:" in target["Arn"]:
            client_of("sns", rule.region_name).publish(TopicArn=target["Arn"], Message=_transformed(target, event))


def _transformed(target: Mapping[str, Any], event: Mapping[str, Any]) -> str:
    """The message for a target; an input template is a JSON string here, as the stacks write it."""
    if (transformer := target.get("InputTransformer")) is None:
        return json.dumps(event, default=str)
    text = str(json.loads(transformer["InputTemplate"]))
    for name, path in transformer["InputPathsMap"].items():
        value: Any = event
        for key in path.removeprefix("$.").split("."):
            value = value[key]
        text = text.replace(f"<{name}>", str(value))
    return text


def _start_machines(rule: Rule, event: Any) -> None:
    for target in rule.targets:
        if ":stateMachine:" in target["Arn"]:
            client_of("stepfunctions", rule.region_name).start_execution(
                stateMachineArn=target["Arn"], name=str(uuid.uuid4()), input=target.get("Input") or json.dumps(event)
            )
