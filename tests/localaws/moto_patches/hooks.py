"""Lifecycle hooks that tell their own settings, and hold instances until somebody answers. Moto's tell canned ones, and
hold nothing."""

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
from tests.localaws.moto_patches.scaling import end, group_of, record, waiting_for

_OPTIONAL: Final = ("NotificationMetadata", "NotificationTargetARN", "RoleARN")


def _put_hook(stock: Any, self: AutoScalingResponse) -> ActionResult:
    backend, name = self.autoscaling_backend, self._get_param("AutoScalingGroupName")
    group_of(backend, name)
    keep_hook(backend, name, self._get_params())
    return EmptyResult()


def keep_hook(backend: AutoScalingBackend, group: str, given: Mapping[str, Any]) -> None:
    """What is not given stays as it was, as AWS has it."""
    key = f"{group}_{given['LifecycleHookName']}"
    hook = backend.lifecycle_hooks.get(key) or LifecycleHook(given["LifecycleHookName"], group, None, None, None)
    if key not in backend.lifecycle_hooks:
        for name in _OPTIONAL:
            setattr(hook, camelcase_to_underscores(name), None)
    for name in ("LifecycleTransition", "DefaultResult", "HeartbeatTimeout", *_OPTIONAL):
        if name in given:
            setattr(hook, camelcase_to_underscores(name), given[name])
    hook.global_timeout = min(172800, 100 * int(hook.heartbeat_timeout))
    backend.lifecycle_hooks[key] = hook


def complete_lifecycle_action(self: AutoScalingResponse) -> ActionResult:
    state, hook = _held(self)
    answer(self.autoscaling_backend, state, hook, self._get_param("LifecycleActionResult"))
    return EmptyResult()


def record_lifecycle_action_heartbeat(self: AutoScalingResponse) -> ActionResult:
    state, _ = _held(self)
    state.held_since = capacity.now()
    return EmptyResult()


def _held(self: AutoScalingResponse) -> tuple[InstanceState, str]:
    group = group_of(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    hook, instance = self._get_param("LifecycleHookName"), self._get_param("InstanceId")
    for state in group.instance_states:
        if state.instance.id == instance and hook in waiting_for(state):
            return state, hook
    raise ValidationError(f"No active Lifecycle Action found with instance ID {instance}")


def answer(backend: AutoScalingBackend, state: InstanceState, hook: str, result: str) -> None:
    """The last hook that goes on puts the instance to work; one that gives up ends it, and another one is launched."""
    if result not in ("CONTINUE", "ABANDON"):
        raise ValidationError(f"LifecycleActionResult {result} is neither CONTINUE nor ABANDON")
    group = state.auto_scaling_group
    waiting_for(state).discard(hook)
    if result == "ABANDON":
        record(group, f"Launching a new EC2 instance: {state.instance.id}", "Cancelled", f"hook {hook} was abandoned")
        end(group, [state])
        group.set_desired_capacity(group.desired_capacity)
    elif not waiting_for(state):
        state.lifecycle_state = "InService"
        backend.update_attached_target_groups(group.name)


def _run_out(stock: Any, self: AutoScalingResponse) -> ActionResult:
    """Whoever looks sees what the hooks say by themselves that nobody has answered in time."""
    backend = self.autoscaling_backend
    for state in [each for group in backend.autoscaling_groups.values() for each in group.instance_states]:
        for hook in backend.describe_lifecycle_hooks(state.auto_scaling_group.name, sorted(waiting_for(state)) or [""]):
            if capacity.now() - state.held_since > timedelta(seconds=int(hook.heartbeat_timeout)):
                answer(backend, state, hook.name, hook.default_result)
    told: ActionResult = stock(self)
    return told


def mend() -> None:
    for name in ("describe_auto_scaling_groups", "describe_auto_scaling_instances"):
        around(AutoScalingResponse, name, _run_out)
    around(AutoScalingResponse, "put_lifecycle_hook", _put_hook)
    for call in (complete_lifecycle_action, record_lifecycle_action_heartbeat):
        setattr(AutoScalingResponse, call.__name__, call)
