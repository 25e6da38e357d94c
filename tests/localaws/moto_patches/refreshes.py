"""Instance refreshes, which moto does not have.

There is no background work: a refresh takes its next step when it is described. The user data of launched instances
does not run; `hosts_answer` sets the result with which new instances complete their lifecycle hooks.
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

from tests.localaws.moto_patches.hooks import complete_action
from tests.localaws.moto_patches.scaling import current_template, end, group_of, waiting_for

Answer = Literal["CONTINUE", "ABANDON", "SILENCE"]
_USUAL: Final = {"MinHealthyPercentage": 90, "SkipMatching": False, "AutoRollback": False, "BakeTime": 0}
_UNDER_WAY: Final = ("Pending", "InProgress", "Cancelling", "RollbackInProgress", "Baking")


class Hosts:
    answer: ClassVar[Answer] = "CONTINUE"


@contextmanager
def hosts_answer(answer: Answer) -> Iterator[None]:
    before, Hosts.answer = Hosts.answer, answer
    try:
        yield
    finally:
        Hosts.answer = before


@dataclass
class Refresh:
    """An instance refresh, with the members of the service's description."""

    auto_scaling_group_name: str
    strategy: str
    preferences: dict[str, Any]
    desired_configuration: dict[str, Any] | None
    before: tuple[Any, Any, Any]  # the launch configuration before the refresh
    old: list[str]  # ids of the instances to replace
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
    refreshes: list[Refresh] = vars(backend).setdefault("instance_refreshes", {}).setdefault(name, [])
    return refreshes


def _under_way(backend: Any, name: str) -> Refresh:
    group_of(backend, name)
    for refresh in _refreshes(backend, name):
        if refresh.status in _UNDER_WAY:
            return refresh
    raise AutoscalingClientError("ActiveInstanceRefreshNotFound", f"No in progress instance refresh exists for {name}")


# The steps


def _step(group: FakeAutoScalingGroup, refresh: Refresh) -> None:
    waiting = [state for state in group.instance_states if waiting_for(state)]
    if refresh.status == "RollbackInProgress":
        refresh.finish("RollbackSuccessful") if _replaced(group, refresh) and not waiting else _answer_hooks(group)
    elif firing := _firing(group, refresh):
        _stop(group, refresh, f"CloudWatch alarm {', '.join(firing)} in ALARM state")
    elif waiting:
        _answer_hooks(group)
    elif refresh.status == "Baking":
        refresh.finish("Successful")
    elif _replaced(group, refresh):
        refresh.finish("Successful") if not refresh.preferences["BakeTime"] else setattr(refresh, "status", "Baking")
    else:
        refresh.status = "InProgress"


def _replaced(group: FakeAutoScalingGroup, refresh: Refresh) -> bool:
    """Terminate as many old instances as may be missing, and launch others; True if none was left."""
    old = [state for state in group.instance_states if state.instance.id in refresh.old]
    if not old:
        refresh.old = []
        return True
    spare = group.desired_capacity * (100 - int(refresh.preferences["MinHealthyPercentage"])) // 100
    batch = old[: max(1, spare)]
    end(group, batch)
    refresh.old = [state.instance.id for state in old if state not in batch]
    group.set_desired_capacity(group.desired_capacity)
    return False


def _answer_hooks(group: FakeAutoScalingGroup) -> None:
    for state in list(group.instance_states):
        for hook in sorted(waiting_for(state)):
            if Hosts.answer != "SILENCE":
                complete_action(group.autoscaling_backend, state, hook, Hosts.answer)


def _firing(group: FakeAutoScalingGroup, refresh: Refresh) -> list[str]:
    names = refresh.preferences.get("AlarmSpecification", {}).get("Alarms", [])
    if not names:
        return []
    response = boto3.client("cloudwatch", region_name=group.region).describe_alarms(
        AlarmNames=names, AlarmTypes=["MetricAlarm", "CompositeAlarm"]
    )
    alarms = [*response["MetricAlarms"], *response["CompositeAlarms"]]
    return sorted(alarm["AlarmName"] for alarm in alarms if alarm["StateValue"] == "ALARM")


def _stop(group: FakeAutoScalingGroup, refresh: Refresh, reason: str) -> None:
    if refresh.preferences["AutoRollback"]:
        _roll_back(group, refresh, reason)
    else:
        refresh.finish("Failed", reason)


def _roll_back(group: FakeAutoScalingGroup, refresh: Refresh, reason: str) -> None:
    refresh.rollback_details = {
        "RollbackReason": reason,
        "RollbackStartTime": utcnow(),
        "PercentageCompleteOnRollback": refresh.percentage_complete,
        "InstancesToUpdateOnRollback": refresh.instances_to_update,
    }
    group.ec2_launch_template, group.launch_template_version, group.mixed_instances_policy = refresh.before
    group.provided_launch_template_version = group.launch_template_version
    refresh.status, refresh.status_reason = "RollbackInProgress", reason
    refresh.old = _outdated_instances(group)
    refresh.count = len(refresh.old)


def _outdated_instances(group: FakeAutoScalingGroup) -> list[str]:
    """The instances that were not launched by the current launch configuration."""
    now = current_template(group)
    return [state.instance.id for state in group.instance_states if state.launch_template != now]


# The API


def start_instance_refresh(self: AutoScalingResponse) -> ActionResult:
    backend, name = self.autoscaling_backend, self._get_param("AutoScalingGroupName")
    group, desired = group_of(backend, name), self._get_param("DesiredConfiguration")
    if any(refresh.status in _UNDER_WAY for refresh in _refreshes(backend, name)):
        raise AutoscalingClientError("InstanceRefreshInProgress", "An Instance Refresh is already in progress.")
    preferences = _USUAL | self._get_param("Preferences", {})
    before = (group.ec2_launch_template, group.launch_template_version, group.mixed_instances_policy)
    if desired:
        template, policy = desired.get("LaunchTemplate", {}), desired.get("MixedInstancesPolicy")
        group.mixed_instances_policy = policy
        group._set_launch_configuration("", template, policy)
    old = (
        _outdated_instances(group)
        if preferences["SkipMatching"]
        else [state.instance.id for state in group.instance_states]
    )
    refresh = Refresh(name, self._get_param("Strategy", "Rolling"), preferences, desired, before, old, len(old))
    _refreshes(backend, name).insert(0, refresh)
    return ActionResult({"InstanceRefreshId": refresh.instance_refresh_id})


def describe_instance_refreshes(self: AutoScalingResponse) -> ActionResult:
    backend, name = self.autoscaling_backend, self._get_param("AutoScalingGroupName")
    group, ids = group_of(backend, name), self._get_param("InstanceRefreshIds", [])
    for refresh in _refreshes(backend, name):
        if refresh.status in _UNDER_WAY:
            _step(group, refresh)
    selected = [refresh for refresh in _refreshes(backend, name) if not ids or refresh.instance_refresh_id in ids]
    return ActionResult({"InstanceRefreshes": selected})


def cancel_instance_refresh(self: AutoScalingResponse) -> ActionResult:
    """Cancel the refresh; replaced instances stay."""
    refresh = _under_way(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    refresh.finish("Cancelled", "Cancelled by the caller.")
    return ActionResult({"InstanceRefreshId": refresh.instance_refresh_id})


def rollback_instance_refresh(self: AutoScalingResponse) -> ActionResult:
    name = self._get_param("AutoScalingGroupName")
    refresh = _under_way(self.autoscaling_backend, name)
    if not refresh.desired_configuration:
        raise AutoscalingClientError(
            "IrreversibleInstanceRefresh",
            "The instance refresh has no desired configuration, and cannot be rolled back.",
        )
    _roll_back(group_of(self.autoscaling_backend, name), refresh, "Rollback requested by the caller.")
    return ActionResult({"InstanceRefreshId": refresh.instance_refresh_id})


def apply() -> None:
    for call in (
        cancel_instance_refresh,
        describe_instance_refreshes,
        rollback_instance_refresh,
        start_instance_refresh,
    ):
        setattr(AutoScalingResponse, call.__name__, call)
