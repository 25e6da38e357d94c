"""Lifecycle hooks have their own settings and hold instances until they are completed. Moto returns fixed settings, and
its hooks hold nothing."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from moto.autoscaling.exceptions import ValidationError
from moto.autoscaling.models import AutoScalingBackend, InstanceState, LifecycleHook
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult, EmptyResult
from moto.core.utils import camelcase_to_underscores

from tests.localaws.moto_patches import capacity
from tests.localaws.moto_patches._around import around
from tests.localaws.moto_patches.scaling import announce_failed_launch, end, group_of, record, waiting_for

_OPTIONAL: Final = ("NotificationMetadata", "NotificationTargetARN", "RoleARN")
_HEARTBEAT: Final = range(30, 7201)  # seconds


def _put_hook(stock: Any, self: AutoScalingResponse) -> ActionResult:
    backend, name = self.autoscaling_backend, self._get_param("AutoScalingGroupName")
    group_of(backend, name)
    keep_hook(backend, name, self._get_params())
    return EmptyResult()


def keep_hook(backend: AutoScalingBackend, group: str, settings: Mapping[str, Any]) -> None:
    """Store a hook; settings that the request omits keep their values, as on AWS."""
    if int(settings.get("HeartbeatTimeout", _HEARTBEAT.start)) not in _HEARTBEAT:
        raise ValidationError("HeartbeatTimeout must be between 30 and 7200 seconds")
    key = f"{group}_{settings['LifecycleHookName']}"
    hook = backend.lifecycle_hooks.get(key) or LifecycleHook(settings["LifecycleHookName"], group, None, None, None)
    if key not in backend.lifecycle_hooks:
        for name in _OPTIONAL:
            setattr(hook, camelcase_to_underscores(name), None)
    for name in ("LifecycleTransition", "DefaultResult", "HeartbeatTimeout", *_OPTIONAL):
        if name in settings:
            setattr(hook, camelcase_to_underscores(name), settings[name])
    hook.global_timeout = min(172800, 100 * int(hook.heartbeat_timeout))
    backend.lifecycle_hooks[key] = hook


def complete_lifecycle_action(self: AutoScalingResponse) -> ActionResult:
    state, hook = _held_instance(self)
    complete_action(self.autoscaling_backend, state, hook, self._get_param("LifecycleActionResult"))
    return EmptyResult()


def record_lifecycle_action_heartbeat(self: AutoScalingResponse) -> ActionResult:
    state, _ = _held_instance(self)
    state.held_since = capacity.now()
    return EmptyResult()


def _held_instance(self: AutoScalingResponse) -> tuple[InstanceState, str]:
    group = group_of(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    hook, instance = self._get_param("LifecycleHookName"), self._get_param("InstanceId")
    for state in group.instance_states:
        if state.instance.id == instance and hook in waiting_for(state):
            return state, hook
    raise ValidationError(f"No active Lifecycle Action found with instance ID {instance}")


def complete_action(backend: AutoScalingBackend, state: InstanceState, hook: str, result: str) -> None:
    """Complete a hook of an instance. After the last CONTINUE the instance goes into service; ABANDON terminates it,
    and a new one is launched."""
    if result not in ("CONTINUE", "ABANDON"):
        raise ValidationError(f"LifecycleActionResult {result} is neither CONTINUE nor ABANDON")
    group = state.auto_scaling_group
    waiting_for(state).discard(hook)
    if result == "ABANDON":
        reason = f"hook {hook} was abandoned"
        record(group, f"Launching a new EC2 instance: {state.instance.id}", "Cancelled", reason)
        end(group, [state])
        announce_failed_launch(group, state.instance.id, reason)
        group.set_desired_capacity(group.desired_capacity)
    elif not waiting_for(state):
        state.lifecycle_state = "InService"
        backend.update_attached_target_groups(group.name)


def _run_out(stock: Any, self: AutoScalingResponse) -> ActionResult:
    """Complete expired hooks with their default result before groups or instances are described."""
    backend = self.autoscaling_backend
    for state in [
        instance_state for group in backend.autoscaling_groups.values() for instance_state in group.instance_states
    ]:
        for hook in backend.describe_lifecycle_hooks(state.auto_scaling_group.name, sorted(waiting_for(state)) or [""]):
            if capacity.now() - state.held_since > timedelta(seconds=int(hook.heartbeat_timeout)):
                complete_action(backend, state, hook.name, hook.default_result)
    result: ActionResult = stock(self)
    return result


def apply() -> None:
    for name in ("describe_auto_scaling_groups", "describe_auto_scaling_instances"):
        around(AutoScalingResponse, name, _run_out)
    around(AutoScalingResponse, "put_lifecycle_hook", _put_hook)
    for call in (complete_lifecycle_action, record_lifecycle_action_heartbeat):
        setattr(AutoScalingResponse, call.__name__, call)
