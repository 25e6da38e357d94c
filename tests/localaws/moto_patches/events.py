"""Rules start state machines. Those with a clock do when a test says that it strikes."""

import json
import uuid
from typing import Any

from moto.events.models import Rule, events_backends

from tests.localaws.formation.provider import client_of
from tests.localaws.moto_patches._around import around


def mend() -> None:
    around(Rule, "send_to_targets", _send)


def strike(rule: str, *, account: str = "123456789012", region: str = "us-east-2") -> None:
    """What happens when the time of a rule has come; nothing if it is disabled."""
    found = events_backends[account][region].describe_rule(rule, None)
    if found.state == "ENABLED":
        _start_machines(found, {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}})


def _send(stock: Any, rule: Rule, event: Any, *args: Any, **more: Any) -> None:
    """Moto sends to the targets of disabled rules too, and of those that have a clock instead of a pattern."""
    if rule.state == "DISABLED" or not rule.event_pattern.get_pattern():
        return
    if rule.event_pattern.matches_event(event):
        _start_machines(rule, event)
    machines = [each for each in rule.targets if ":stateMachine:" in each["Arn"]]
    others = [each for each in rule.targets if each not in machines]
    rule.targets, kept = others, rule.targets
    try:
        stock(rule, event, *args, **more)
    finally:
        rule.targets = kept


def _start_machines(rule: Rule, event: Any) -> None:
    for target in rule.targets:
        if ":stateMachine:" in target["Arn"]:
            client_of("stepfunctions", rule.region_name).start_execution(
                stateMachineArn=target["Arn"], name=str(uuid.uuid4()), input=target.get("Input") or json.dumps(event)
            )
