"""EventBridge: rules start state machines. Scheduled rules do so when a test calls `strike`."""

import json
import uuid
from typing import Any

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
        _start_machines(rule, event)
    machines = [target for target in rule.targets if ":stateMachine:" in target["Arn"]]
    remaining = [target for target in rule.targets if target not in machines]
    rule.targets, deliver = remaining, rule.targets
    try:
        stock(rule, event, *args, **more)
    finally:
        rule.targets = deliver


def _start_machines(rule: Rule, event: Any) -> None:
    for target in rule.targets:
        if ":stateMachine:" in target["Arn"]:
            client_of("stepfunctions", rule.region_name).start_execution(
                stateMachineArn=target["Arn"], name=str(uuid.uuid4()), input=target.get("Input") or json.dumps(event)
            )
