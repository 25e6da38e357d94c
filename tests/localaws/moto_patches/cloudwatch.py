"""CloudWatch: composite alarms, state changes as on AWS, combined filters, and alarm actions.

Alarms do not evaluate metrics: a test calls `set_alarm_state`, and composite alarms follow at once.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from moto.cloudwatch.exceptions import ValidationError
from moto.cloudwatch.models import Alarm, CloudWatchBackend, MetricDatum, Statistics
from moto.cloudwatch.responses import CloudWatchResponse
from moto.core.responses import ActionResult, EmptyResult

from tests.localaws.formation.provider import client_of
from tests.localaws.moto_patches._around import around

_TOKENS: Final = re.compile(
    r"\s*(?:(?P<state>ALARM|OK|INSUFFICIENT_DATA)\s*\(\s*(?:\"(?P<quoted>[^\"]+)\"|(?P<bare>[^()\"]+?))\s*\)"
    r"|(?P<word>AND|OR|NOT|TRUE|FALSE|\(|\)))"
)


def apply() -> None:
    around(CloudWatchBackend, "put_metric_alarm", _put)
    around(CloudWatchBackend, "set_alarm_state", _set_state)
    around(CloudWatchBackend, "tag_resource", _tag)
    around(Statistics, "get_statistics_for_type", _statistic)
    CloudWatchResponse.put_composite_alarm = put_composite_alarm
    CloudWatchResponse.describe_alarms = describe_alarms


_TRIMMED: Final = re.compile(r"TC\((?P<above>[\d.]*):(?P<up_to>[\d.]*)\)")
_PERCENTILE: Final = re.compile(r"p(\d+(?:\.\d+)?)")


def _statistic(stock: Any, data: Statistics, name: str) -> Any:
    """Trimmed counts (values above one bound and up to the other) and percentiles."""
    if percent := _PERCENTILE.fullmatch(name):
        ranked = sorted(datum.value for datum in data.metric_data if isinstance(datum, MetricDatum))
        return float(ranked[min(len(ranked) - 1, int(len(ranked) * float(percent[1]) / 100))])
    trimmed = _TRIMMED.fullmatch(name)
    if trimmed is None:
        return stock(data, name)
    above, up_to = float(trimmed["above"] or "-inf"), float(trimmed["up_to"] or "inf")
    values = [datum.value for datum in data.metric_data if isinstance(datum, MetricDatum)]
    return float(sum(above < value <= up_to for value in values))


def _tag(stock: Any, backend: CloudWatchBackend, arn: str, tags: dict[str, str]) -> None:
    """Tag a dashboard, which moto does not support."""
    if ":dashboard/" in arn:
        backend.tagger.tag_resource(arn, backend.tagger.convert_dict_to_tags_input(tags))
    else:
        stock(backend, arn, tags)


def holds(rule: str, is_in: Callable[[str, str], bool]) -> bool:
    """Whether a composite alarm's rule is met; `is_in(name, state)` returns whether an alarm is in a state."""
    tokens = _tokens(rule)
    result, remaining = _parse_or(list(tokens), is_in)
    if remaining:
        raise ValidationError(f"AlarmRule cannot be parsed: {rule}")
    return result


def _tokens(rule: str) -> Iterator[re.Match[str]]:
    position, text = 0, rule.rstrip()
    while position < len(text):
        token = _TOKENS.match(text, position)
        if token is None:
            raise ValidationError(f"AlarmRule cannot be parsed from character {position}: {rule}")
        yield token
        position = token.end()


_Tokens = list[re.Match[str]]
_IsIn = Callable[[str, str], bool]


def _parse_or(tokens: _Tokens, is_in: _IsIn) -> tuple[bool, _Tokens]:
    value, tokens = _parse_and(tokens, is_in)
    while tokens and tokens[0]["word"] == "OR":
        operand, tokens = _parse_and(tokens[1:], is_in)
        value = value or operand
    return value, tokens


def _parse_and(tokens: _Tokens, is_in: _IsIn) -> tuple[bool, _Tokens]:
    value, tokens = _parse_operand(tokens, is_in)
    while tokens and tokens[0]["word"] == "AND":
        operand, tokens = _parse_operand(tokens[1:], is_in)
        value = value and operand
    return value, tokens


def _parse_operand(tokens: _Tokens, is_in: _IsIn) -> tuple[bool, _Tokens]:
    if not tokens:
        raise ValidationError("AlarmRule ends too early")
    first, remaining = tokens[0], tokens[1:]
    if first["state"]:
        name = (first["quoted"] or first["bare"]).rpartition(":alarm:")[2]
        return is_in(name, first["state"]), remaining
    if first["word"] == "NOT":
        value, remaining = _parse_operand(remaining, is_in)
        return not value, remaining
    if first["word"] in ("TRUE", "FALSE"):
        return first["word"] == "TRUE", remaining
    if first["word"] == "(":
        value, remaining = _parse_or(remaining, is_in)
        if remaining and remaining[0]["word"] == ")":
            return value, remaining[1:]
    raise ValidationError("AlarmRule is not well formed")


# The service


def _put(stock: Any, backend: CloudWatchBackend, *, name: str, rule: str | None = None, **settings: Any) -> Alarm:
    """Put an alarm: a new one is in INSUFFICIENT_DATA, a changed one keeps its state."""
    before = backend.alarms.get(name)
    if rule is not None:
        holds(rule, lambda other, _: _known(backend, other))
    alarm: Alarm = stock(backend, name=name, rule=rule, **settings)
    alarm.state_value = before.state_value if before else "INSUFFICIENT_DATA"
    _update_composites(backend)
    return alarm


def _known(backend: CloudWatchBackend, name: str) -> bool:
    if name not in backend.alarms:
        raise ValidationError(f"AlarmRule refers to an alarm that does not exist: {name}")
    return True


def put_composite_alarm(self: Any) -> EmptyResult:
    self.put_metric_alarm()
    return EmptyResult()


def _set_state(stock: Any, backend: CloudWatchBackend, name: str, reason: str, data: str, state: str) -> None:
    before = backend.alarms[name].state_value if name in backend.alarms else None
    stock(backend, name, reason, data, state)
    if before != state:
        _act(backend, backend.alarms[name], before)
    _update_composites(backend)


def _update_composites(backend: CloudWatchBackend) -> None:
    """Update the composite alarms, and then those that refer to composite alarms."""

    def is_in(name: str, state: str) -> bool:
        return name in backend.alarms and backend.alarms[name].state_value == state

    composites = [alarm for alarm in backend.alarms.values() if alarm.rule is not None]
    for _ in composites:
        changed = False
        for alarm in composites:
            before, after = alarm.state_value, "ALARM" if holds(alarm.rule, is_in) else "OK"
            if before != after:
                alarm.update_state(f"{alarm.rule} is now {after}", "{}", after)
                _act(backend, alarm, before)
                changed = True
        if not changed:
            return


def _act(backend: CloudWatchBackend, alarm: Alarm, before: str | None) -> None:
    """Publish to the alarm's topics; other kinds of actions are ignored."""
    actions = {
        "ALARM": alarm.alarm_actions,
        "OK": alarm.ok_actions,
        "INSUFFICIENT_DATA": alarm.insufficient_data_actions,
    }
    for arn in actions[alarm.state_value] if alarm.actions_enabled else ():
        if ":sns:" in arn:
            message = {
                "AlarmName": alarm.name,
                "NewStateReason": alarm.state_reason,
                "NewStateValue": alarm.state_value,
                "OldStateValue": before,
            }
            client_of("sns", backend.region_name).publish(TopicArn=arn, Message=json.dumps(message))


def describe_alarms(self: Any) -> ActionResult:
    """The alarms that match all filters; composite alarms only if AlarmTypes has them."""
    names, prefix = self._get_param("AlarmNames", []), self._get_param("AlarmNamePrefix", "")
    state, action = self._get_param("StateValue"), self._get_param("ActionPrefix")
    kinds = self._get_param("AlarmTypes") or ["MetricAlarm"]
    alarms = [
        alarm
        for alarm in self.cloudwatch_backend.alarms.values()
        if (not names or alarm.name in names)
        and alarm.name.startswith(prefix)
        and (not state or alarm.state_value == state)
        and (not action or any(alarm_action.startswith(action) for alarm_action in alarm.alarm_actions))
    ]
    return ActionResult(
        {
            "MetricAlarms": [alarm for alarm in alarms if alarm.rule is None and "MetricAlarm" in kinds],
            "CompositeAlarms": [alarm for alarm in alarms if alarm.rule is not None and "CompositeAlarm" in kinds],
        }
    )
