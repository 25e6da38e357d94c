"""Alarms of alarms, states that change as on AWS, filters that hold together, and actions that are taken.

Nothing watches the metrics: a test says `set_alarm_state`, and composite alarms follow at once.
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


def mend() -> None:
    around(CloudWatchBackend, "put_metric_alarm", _put)
    around(CloudWatchBackend, "set_alarm_state", _set_state)
    around(CloudWatchBackend, "tag_resource", _tag)
    around(Statistics, "get_statistics_for_type", _statistic)
    CloudWatchResponse.put_composite_alarm = put_composite_alarm
    CloudWatchResponse.describe_alarms = describe_alarms


_TRIMMED: Final = re.compile(r"TC\((?P<above>[\d.]*):(?P<up_to>[\d.]*)\)")
_PERCENTILE: Final = re.compile(r"p(\d+(?:\.\d+)?)")


def _statistic(stock: Any, of: Statistics, name: str) -> Any:
    """Trimmed counts, of the values above one bound and up to the other; and percentiles."""
    if percent := _PERCENTILE.fullmatch(name):
        ranked = sorted(each.value for each in of.metric_data if isinstance(each, MetricDatum))
        return float(ranked[min(len(ranked) - 1, int(len(ranked) * float(percent[1]) / 100))])
    found = _TRIMMED.fullmatch(name)
    if found is None:
        return stock(of, name)
    above, up_to = float(found["above"] or "-inf"), float(found["up_to"] or "inf")
    values = [each.value for each in of.metric_data if isinstance(each, MetricDatum)]
    return float(sum(above < value <= up_to for value in values))


def _tag(stock: Any, backend: CloudWatchBackend, arn: str, tags: dict[str, str]) -> None:
    """Dashboards have tags too."""
    if ":dashboard/" in arn:
        backend.tagger.tag_resource(arn, backend.tagger.convert_dict_to_tags_input(tags))
    else:
        stock(backend, arn, tags)


def holds(rule: str, is_in: Callable[[str, str], bool]) -> bool:
    """Whether a composite alarm's rule is met; `is_in` knows of an alarm, by its name, whether it is in a state."""
    tokens = _tokens(rule)
    found, left = _either(list(tokens), is_in)
    if left:
        raise ValidationError(f"AlarmRule is not understood: {rule}")
    return found


def _tokens(rule: str) -> Iterator[re.Match[str]]:
    at, text = 0, rule.rstrip()
    while at < len(text):
        found = _TOKENS.match(text, at)
        if found is None:
            raise ValidationError(f"AlarmRule is not understood from character {at}: {rule}")
        yield found
        at = found.end()


_Left = list[re.Match[str]]
_IsIn = Callable[[str, str], bool]


def _either(left: _Left, is_in: _IsIn) -> tuple[bool, _Left]:
    found, left = _both(left, is_in)
    while left and left[0]["word"] == "OR":
        other, left = _both(left[1:], is_in)
        found = found or other
    return found, left


def _both(left: _Left, is_in: _IsIn) -> tuple[bool, _Left]:
    found, left = _one(left, is_in)
    while left and left[0]["word"] == "AND":
        other, left = _one(left[1:], is_in)
        found = found and other
    return found, left


def _one(left: _Left, is_in: _IsIn) -> tuple[bool, _Left]:
    if not left:
        raise ValidationError("AlarmRule ends too early")
    first, rest = left[0], left[1:]
    if first["state"]:
        name = (first["quoted"] or first["bare"]).rpartition(":alarm:")[2]
        return is_in(name, first["state"]), rest
    if first["word"] == "NOT":
        found, rest = _one(rest, is_in)
        return not found, rest
    if first["word"] in ("TRUE", "FALSE"):
        return first["word"] == "TRUE", rest
    if first["word"] == "(":
        found, rest = _either(rest, is_in)
        if rest and rest[0]["word"] == ")":
            return found, rest[1:]
    raise ValidationError("AlarmRule is not well formed")


# The service


def _put(stock: Any, backend: CloudWatchBackend, *, name: str, rule: str | None = None, **given: Any) -> Alarm:
    """A new alarm has no data; one that is changed stays in the state that it is in."""
    before = backend.alarms.get(name)
    if rule is not None:
        holds(rule, lambda other, _: _known(backend, other))
    made: Alarm = stock(backend, name=name, rule=rule, **given)
    made.state_value = before.state_value if before else "INSUFFICIENT_DATA"
    _settle(backend)
    return made


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
    _settle(backend)


def _settle(backend: CloudWatchBackend) -> None:
    """Composite alarms follow, those of composite alarms behind them."""

    def is_in(name: str, state: str) -> bool:
        return name in backend.alarms and backend.alarms[name].state_value == state

    composites = [one for one in backend.alarms.values() if one.rule is not None]
    for _ in composites:
        changed = False
        for one in composites:
            before, after = one.state_value, "ALARM" if holds(one.rule, is_in) else "OK"
            if before != after:
                one.update_state(f"{one.rule} is now {after}", "{}", after)
                _act(backend, one, before)
                changed = True
        if not changed:
            return


def _act(backend: CloudWatchBackend, alarm: Alarm, before: str | None) -> None:
    """Tells the topics. Other kinds of actions are not taken here."""
    actions = {
        "ALARM": alarm.alarm_actions,
        "OK": alarm.ok_actions,
        "INSUFFICIENT_DATA": alarm.insufficient_data_actions,
    }
    for arn in actions[alarm.state_value] if alarm.actions_enabled else ():
        if ":sns:" in arn:
            said = {
                "AlarmName": alarm.name,
                "NewStateReason": alarm.state_reason,
                "NewStateValue": alarm.state_value,
                "OldStateValue": before,
            }
            client_of("sns", backend.region_name).publish(TopicArn=arn, Message=json.dumps(said))


def describe_alarms(self: Any) -> ActionResult:
    """All filters together; composite alarms only for those who ask for them."""
    names, prefix = self._get_param("AlarmNames", []), self._get_param("AlarmNamePrefix", "")
    state, action = self._get_param("StateValue"), self._get_param("ActionPrefix")
    kinds = self._get_param("AlarmTypes") or ["MetricAlarm"]
    found = [
        one
        for one in self.cloudwatch_backend.alarms.values()
        if (not names or one.name in names)
        and one.name.startswith(prefix)
        and (not state or one.state_value == state)
        and (not action or any(each.startswith(action) for each in one.alarm_actions))
    ]
    return ActionResult(
        {
            "MetricAlarms": [one for one in found if one.rule is None and "MetricAlarm" in kinds],
            "CompositeAlarms": [one for one in found if one.rule is not None and "CompositeAlarm" in kinds],
        }
    )
