"""Instance refreshes, which moto does not know.

Nothing goes on behind anybody's back here: a refresh takes its next step whenever somebody looks at it. Nobody runs the
user data of what it launches either, so that `hosts_answer` is what new instances tell the hooks that hold them.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Final, Literal

import boto3
from moto.autoscaling.exceptions import AutoscalingClientError
from moto.autoscaling.models import FakeAutoScalingGroup
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult
from moto.core.utils import utcnow

from tests.localaws.moto_patches.hooks import answer
from tests.localaws.moto_patches.scaling import current_template, end, group_of, waiting_for

Answer = Literal["CONTINUE", "ABANDON", "SILENCE"]
_USUAL: Final = {"MinHealthyPercentage": 90, "SkipMatching": False, "AutoRollback": False, "BakeTime": 0}
_UNDER_WAY: Final = ("Pending", "InProgress", "Cancelling", "RollbackInProgress", "Baking")


class Hosts:
    answer: ClassVar[Answer] = "CONTINUE"


@contextmanager
def hosts_answer(what: Answer) -> Iterator[None]:
    before, Hosts.answer = Hosts.answer, what
    try:
        yield
    finally:
        Hosts.answer = before


@dataclass
class Refresh:
    """The members are those of the service's own description."""

    auto_scaling_group_name: str
    strategy: str
    preferences: dict[str, Any]
    desired_configuration: dict[str, Any] | None
    before: tuple[Any, Any, Any]  # what the group was launched by until then
    old: list[str]  # instances that are to go
    count: int
    instance_refresh_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    status: str = "Pending"
    status_reason: str | None = None
    start_time: datetime = field(default_factory=utcnow)
    end_time: datetime | None = None
    rollback_details: dict[str, Any] | None = None

    @property
    def instances_to_update(self) -> int:
        return len(self.old)

    @property
    def percentage_complete(self) -> int:
        return 100 if not self.count else 100 * (self.count - len(self.old)) // self.count

    def finish(self, status: str, reason: str | None = None) -> None:
        self.status, self.end_time = status, utcnow()
        self.status_reason = reason or self.status_reason


def _refreshes(backend: Any, name: str) -> list[Refresh]:
    found: list[Refresh] = vars(backend).setdefault("instance_refreshes", {}).setdefault(name, [])
    return found


def _under_way(backend: Any, name: str) -> Refresh:
    group_of(backend, name)
    for one in _refreshes(backend, name):
        if one.status in _UNDER_WAY:
            return one
    raise AutoscalingClientError("ActiveInstanceRefreshNotFound", f"No in progress instance refresh exists for {name}")


# The steps


def _step(group: FakeAutoScalingGroup, one: Refresh) -> None:
    held = [state for state in group.instance_states if waiting_for(state)]
    if one.status == "RollbackInProgress":
        one.finish("RollbackSuccessful") if _replaced(group, one) and not held else _let_go(group)
    elif firing := _firing(group, one):
        _stop(group, one, f"CloudWatch alarm {', '.join(firing)} in ALARM state")
    elif held:
        _let_go(group)
    elif one.status == "Baking":
        one.finish("Successful")
    elif _replaced(group, one):
        one.finish("Successful") if not one.preferences["BakeTime"] else setattr(one, "status", "Baking")
    else:
        one.status = "InProgress"


def _replaced(group: FakeAutoScalingGroup, one: Refresh) -> bool:
    """Ends as many of the old instances as may be missing, and has others launched. True if there were none left."""
    old = [state for state in group.instance_states if state.instance.id in one.old]
    if not old:
        one.old = []
        return True
    spare = group.desired_capacity * (100 - int(one.preferences["MinHealthyPercentage"])) // 100
    batch = old[: max(1, spare)]
    end(group, batch)
    one.old = [state.instance.id for state in old if state not in batch]
    group.set_desired_capacity(group.desired_capacity)
    return False


def _let_go(group: FakeAutoScalingGroup) -> None:
    for state in list(group.instance_states):
        for hook in sorted(waiting_for(state)):
            if Hosts.answer != "SILENCE":
                answer(group.autoscaling_backend, state, hook, Hosts.answer)


def _firing(group: FakeAutoScalingGroup, one: Refresh) -> list[str]:
    names = one.preferences.get("AlarmSpecification", {}).get("Alarms", [])
    if not names:
        return []
    told = boto3.client("cloudwatch", region_name=group.region).describe_alarms(
        AlarmNames=names, AlarmTypes=["MetricAlarm", "CompositeAlarm"]
    )
    every = [*told["MetricAlarms"], *told["CompositeAlarms"]]
    return sorted(alarm["AlarmName"] for alarm in every if alarm["StateValue"] == "ALARM")


def _stop(group: FakeAutoScalingGroup, one: Refresh, reason: str) -> None:
    if one.preferences["AutoRollback"]:
        _roll_back(group, one, reason)
    else:
        one.finish("Failed", reason)


def _roll_back(group: FakeAutoScalingGroup, one: Refresh, reason: str) -> None:
    one.rollback_details = {
        "RollbackReason": reason,
        "RollbackStartTime": utcnow(),
        "PercentageCompleteOnRollback": one.percentage_complete,
        "InstancesToUpdateOnRollback": one.instances_to_update,
    }
    group.ec2_launch_template, group.launch_template_version, group.mixed_instances_policy = one.before
    group.provided_launch_template_version = group.launch_template_version
    one.status, one.status_reason = "RollbackInProgress", reason
    one.old = _other(group)
    one.count = len(one.old)


def _other(group: FakeAutoScalingGroup) -> list[str]:
    """The instances that were not launched by what the group is launched by now."""
    now = current_template(group)
    return [state.instance.id for state in group.instance_states if state.launch_template != now]


# The calls, as the service names them


def start_instance_refresh(self: AutoScalingResponse) -> ActionResult:
    backend, name = self.autoscaling_backend, self._get_param("AutoScalingGroupName")
    group, wanted = group_of(backend, name), self._get_param("DesiredConfiguration")
    if any(one.status in _UNDER_WAY for one in _refreshes(backend, name)):
        raise AutoscalingClientError("InstanceRefreshInProgress", "An Instance Refresh is already in progress.")
    preferences = _USUAL | self._get_param("Preferences", {})
    before = (group.ec2_launch_template, group.launch_template_version, group.mixed_instances_policy)
    if wanted:
        template, policy = wanted.get("LaunchTemplate", {}), wanted.get("MixedInstancesPolicy")
        group.mixed_instances_policy = policy
        group._set_launch_configuration("", template, policy)
    old = _other(group) if preferences["SkipMatching"] else [state.instance.id for state in group.instance_states]
    one = Refresh(name, self._get_param("Strategy", "Rolling"), preferences, wanted, before, old, len(old))
    _refreshes(backend, name).insert(0, one)
    return ActionResult({"InstanceRefreshId": one.instance_refresh_id})


def describe_instance_refreshes(self: AutoScalingResponse) -> ActionResult:
    backend, name = self.autoscaling_backend, self._get_param("AutoScalingGroupName")
    group, ids = group_of(backend, name), self._get_param("InstanceRefreshIds", [])
    for one in _refreshes(backend, name):
        if one.status in _UNDER_WAY:
            _step(group, one)
    found = [one for one in _refreshes(backend, name) if not ids or one.instance_refresh_id in ids]
    return ActionResult({"InstanceRefreshes": found})


def cancel_instance_refresh(self: AutoScalingResponse) -> ActionResult:
    """What has been replaced stays replaced."""
    one = _under_way(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    one.finish("Cancelled", "Cancelled by the caller.")
    return ActionResult({"InstanceRefreshId": one.instance_refresh_id})


def rollback_instance_refresh(self: AutoScalingResponse) -> ActionResult:
    name = self._get_param("AutoScalingGroupName")
    one = _under_way(self.autoscaling_backend, name)
    if not one.desired_configuration:
        raise AutoscalingClientError(
            "IrreversibleInstanceRefresh",
            "The instance refresh has no desired configuration, and cannot be rolled back.",
        )
    _roll_back(group_of(self.autoscaling_backend, name), one, "Rollback requested by the caller.")
    return ActionResult({"InstanceRefreshId": one.instance_refresh_id})


def mend() -> None:
    for call in (
        cancel_instance_refresh,
        describe_instance_refreshes,
        rollback_instance_refresh,
        start_instance_refresh,
    ):
        setattr(AutoScalingResponse, call.__name__, call)
