"""An instance in its Auto Scaling group: its metadata, its lifecycle hook, and its turn to leave service.

Auto Scaling keeps a new instance out of service until the agent completes the lifecycle hook.
"""

import http.client
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

from nxpipe.pipeline.fleet.agent.logs import deliver_last_words
from nxpipe.pipeline.util.aws import client, convert_sdk_errors
from nxpipe.pipeline.util.errors import AwsError, NotReady
from nxpipe.pipeline.util.exit_codes import INTERNAL, exit_code_of

if TYPE_CHECKING:
    from nxpipe.pipeline.config.serving_fleet import ServingFleet

_ENDPOINT: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # as in the AWS SDKs
_DEFAULT: Final = "http://169.254.169.254"
_TOKEN: Final = "X-aws-ec2-metadata-token"  # noqa: S105, the name of a header
_LIFETIME: Final = f"{_TOKEN}-ttl-seconds"
_SECONDS: Final = 5
_MAX_BYTES: Final = 1024  # of a response: a group's name has 255 characters
_NAME: Final = re.compile("[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class FleetInstance:
    id: str
    type: str
    region: str
    group: str | None  # the Auto Scaling group that launched it
    address: str  # of its primary network interface, to which a load balancer sends requests


def this_instance(environ: Mapping[str, str]) -> FleetInstance:
    endpoint = environ.get(_ENDPOINT) or _DEFAULT
    try:
        with closing(_Metadata(endpoint)) as metadata:
            return FleetInstance(
                id=metadata.require("instance-id"),
                type=metadata.require("instance-type"),
                region=metadata.require("placement/region"),
                group=metadata.get("tags/instance/aws:autoscaling:groupName"),
                address=metadata.require("local-ipv4"),
            )
    except (OSError, ValueError, http.client.HTTPException) as problem:
        raise NotReady(
            f"the instance metadata service at {endpoint} does not answer ({problem}); run the agent "
            "on an EC2 instance, outside of containers, or set its hop limit to 2"
        ) from problem


class _Metadata:
    """One session with the service."""

    def __init__(self, endpoint: str) -> None:
        where = urlsplit(endpoint)
        self._endpoint = endpoint
        self._connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_SECONDS)
        self._token = self._request("PUT", "/latest/api/token", {_LIFETIME: "60"}) or ""

    def get(self, path: str) -> str | None:
        return self._request("GET", f"/latest/meta-data/{path}", {_TOKEN: self._token})

    def require(self, path: str) -> str:
        value = self.get(path)
        if value is None:
            raise NotReady(f"the instance metadata service at {self._endpoint} has no {path}; is this an EC2 instance?")
        if not _NAME.fullmatch(value):
            raise self._invalid(path)
        return value

    def close(self) -> None:
        self._connection.close()

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> str | None:
        self._connection.request(method, path, headers=dict(headers))
        answer = self._connection.getresponse()
        body = answer.read(_MAX_BYTES + 1)
        if answer.status == http.client.NOT_FOUND:
            return None
        if answer.status != http.client.OK:
            raise NotReady(f"the instance metadata service at {self._endpoint} answers {path} with {answer.status}")
        text = body.decode(errors="replace")
        if len(body) > _MAX_BYTES or not text.isprintable() or "\N{REPLACEMENT CHARACTER}" in text:
            raise self._invalid(path)
        return text

    def _invalid(self, path: str) -> NotReady:
        return NotReady(
            f"the instance metadata service at {self._endpoint} returns no valid {path}; check which service listens "
            f"there, and {_ENDPOINT}"
        )


class HookNotCompleted(NotReady):
    """Auto Scaling did not take the answer, so that it would not take another one."""


@dataclass
class LifecycleGate:
    """The lifecycle hook of an instance that is getting ready. `require` raises if it must not go into service."""

    instance: FleetInstance
    require: Callable[[], object] = lambda: None


class GivenUp(SystemExit):
    """The end of an agent that has written why it gives its instance up."""


@contextmanager
def lifecycle_gate(name: str | None, environ: Mapping[str, str]) -> Iterator[LifecycleGate]:
    """Completes the hook with CONTINUE at the end of the block, and with ABANDON on any exception, after its log.

    An abandoned instance is replaced at once. SIGTERM abandons it too: systemd stops the agent with it when the
    instance is shut down before it could serve. An instance that is past its hook, as after a restart of the agent in
    service, is not given up. Without a name there is no hook.
    """
    gate = LifecycleGate(this_instance(environ))
    hook = LifecycleHook(name, gate.instance) if name else None
    try:
        yield gate
        gate.require()
        if hook:
            hook.answer("CONTINUE", gate.require)
    except HookNotCompleted:
        raise
    except BaseException as cause:
        if hook is None or (isinstance(cause, Exception) and not hook.is_ahead()):
            raise
        written = deliver_last_words(gate.instance.id, cause, environ)
        abandoned = hook.give_up()
        if written:
            if abandoned and (mark := environ.get(_GIVEN_UP)):
                _leave(Path(mark))
            raise GivenUp((exit_code_of(cause) or INTERNAL).number) from cause
        raise


_GIVEN_UP: Final = "NXPIPE_GIVEN_UP"  # environment variable: the file that an agent leaves on an abandoned instance


def _leave(mark: Path) -> None:
    """Leave the file with which systemd does not start the agent again, and user data reports nothing."""
    try:
        mark.touch()
    except OSError as failed:
        sys.stderr.write(f"nxpipe: {mark} cannot be written ({failed.strerror}); the agent may start again\n")


# States in which the hook's action is still to come: the launch, the entry to a warm pool, and the start of an instance
# that leaves it.
_BEFORE_THE_ACTION: Final = frozenset(
    ["Pending", "Pending:Wait", "Warmed:Pending", "Warmed:Pending:Wait", "Warmed:Stopped", "Warmed:Hibernated"]
)
_ACTION_WITHIN: Final = 300  # seconds
_PAUSES: Final = (0.5, 1, 2, 5)  # seconds between two attempts; the last one repeats


@dataclass(frozen=True)
class LifecycleHook:
    name: str
    instance: FleetInstance

    def answer(self, result: Literal["CONTINUE", "ABANDON"], require: Callable[[], object] = lambda: None) -> bool:
        """Completes the hook. False if none is pending, as after a restart on an instance that already serves.

        An agent may be faster than Auto Scaling, above all on an instance that leaves a warm pool: then it waits until
        the action is pending.
        """
        deadline, attempt = time.monotonic() + _ACTION_WITHIN, 0
        while not self._complete(result):
            state = self._state(result)
            if state not in _BEFORE_THE_ACTION:
                return False
            if time.monotonic() > deadline:
                raise HookNotCompleted(
                    f"hook {self.name} of group {self._group} has no pending action for instance {self.instance.id}, "
                    f"which is in state {state} for {_ACTION_WITHIN} s; check the name of the hook"
                )
            time.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
            attempt += 1
            require()
        return True

    def is_ahead(self) -> bool:
        """False if the instance is past the hook or terminated. Without an answer of AWS it counts as ahead."""
        try:
            return self._state("ABANDON") in _BEFORE_THE_ACTION
        except NotReady:
            return True

    def _complete(self, result: str) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client().complete_lifecycle_action(
                AutoScalingGroupName=self._group,
                LifecycleHookName=self.name,
                InstanceId=self.instance.id,
                LifecycleActionResult=result,
            )
        except ClientError as refused:
            if "No active Lifecycle Action" in refused.response["Error"]["Message"]:
                return False
            raise self._failure(result, refused) from refused
        except BotoCoreError as failed:
            raise self._failure(result, failed) from failed
        return True

    def _state(self, result: str) -> str | None:
        """The instance's lifecycle state; None if it is in no group."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            response = self._client().describe_auto_scaling_instances(InstanceIds=[self.instance.id])
        except (BotoCoreError, ClientError) as failed:
            raise self._failure(result, failed) from failed
        return next((str(entry["LifecycleState"]) for entry in response["AutoScalingInstances"]), None)

    def give_up(self) -> bool:
        """Abandons the instance; a failure to do so is printed, because the caller reports the cause."""
        try:
            return self.answer("ABANDON")
        except NotReady as failure:
            sys.stderr.write(f"{failure}\n")
            return False

    @property
    def _group(self) -> str:
        if self.instance.group is None:
            raise NotReady(
                f"instance {self.instance.id} has no Auto Scaling group in its metadata, so hook {self.name} cannot be "
                "completed; its launch template must allow instance tags in the metadata, or run without --hook"
            )
        return self.instance.group

    def _client(self) -> Any:
        from botocore.config import Config
        from botocore.session import Session

        retries = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard", "total_max_attempts": 5})
        return Session().create_client("autoscaling", region_name=self.instance.region, config=retries)

    def _failure(self, result: str, problem: Exception) -> HookNotCompleted:
        return HookNotCompleted(
            f"hook {self.name} of group {self._group} was not completed with {result} for instance {self.instance.id}: "
            f"{problem}; allow autoscaling:CompleteLifecycleAction and DescribeAutoScalingInstances in the instance's "
            "role, and a route to its endpoint"
        )


_CLAIM: Final = 2.0  # seconds after which a change of the group is visible to all, and a load balancer has followed it
_POLL: Final = 1.0  # seconds between two looks at an instance that leaves service
_LEAVING: Final = 300.0  # seconds to leave service, beyond `draining`


@dataclass
class GroupTurn:
    """The turn of one instance of an Auto Scaling group to leave service. Outside of a group it is always its turn.

    At most `max_unavailable` instances are out of service, for any reason. The protection from scale-in is the
    claim of a turn: all see it, and it ends with its instance. Of instances that claim at the same moment, each of
    which saw no claim before, those with the lowest ids go. An instance counts as available once it was seen in service
    for as long as the load balancer's health checks take.
    """

    instance: FleetInstance
    fleet: "ServingFleet"
    hook: str | None
    settle: float = _CLAIM
    _seen: dict[str, float] = field(default_factory=dict)  # instances in service, since when

    def take(self) -> bool:
        """Claim a turn; False, without a claim, if it is not this instance's turn."""
        if self.instance.group is None:
            return True
        if not self._is_free(self._group(), claims=lambda other: True):
            return False
        self._protect(protected=True)
        time.sleep(self.settle)
        if self._is_free(self._group(), claims=lambda other: other < self.instance.id):
            return True
        self._protect(protected=False)
        return False

    def leave(self) -> None:
        """Leave service for a while: no request comes any more, and nothing replaces the instance."""
        if self.instance.group is None:
            return
        with convert_sdk_errors(f"put instance {self.instance.id} on standby"):
            self._client.enter_standby(ShouldDecrementDesiredCapacity=True, **self._member)
        until = time.monotonic() + self.fleet.draining.total_seconds() + _LEAVING
        while (state := self._own()["LifecycleState"]) != "Standby":
            if time.monotonic() > until:
                raise AwsError(f"instance {self.instance.id} has not left service in time: it is {state}")
            time.sleep(_POLL)
        time.sleep(self.settle)

    def end(self) -> None:
        """Terminate the instance, for a successor."""
        with convert_sdk_errors(f"terminate instance {self.instance.id}"):
            self._client.terminate_instance_in_auto_scaling_group(
                InstanceId=self.instance.id, ShouldDecrementDesiredCapacity=False
            )

    def give_back(self) -> None:
        """End the claim, and the standby if there is one."""
        if self.instance.group is None:
            return
        own = self._own()
        if own.get("LifecycleState") in ("EnteringStandby", "Standby"):
            with convert_sdk_errors(f"return instance {self.instance.id} to service"):
                self._client.exit_standby(**self._member)
            if self.hook:  # on the way back the instance is pending, as after its launch
                LifecycleHook(self.hook, self.instance).answer("CONTINUE")
        if own.get("ProtectedFromScaleIn"):
            self._protect(protected=False)

    def _is_free(self, group: Any, claims: Callable[[str], bool]) -> bool:
        """True if enough other instances are available; `claims` says whose claims count."""
        now, hold = time.monotonic(), self._checks_take
        states = {entry["InstanceId"]: entry for entry in group["Instances"]}
        serving = {name for name, entry in states.items() if _serves(entry)}
        self._seen = {name: self._seen.get(name, now) for name in serving}
        standby = sum(entry["LifecycleState"] in ("EnteringStandby", "Standby") for entry in states.values())
        available = [
            name
            for name in serving
            if name != self.instance.id
            and now - self._seen[name] >= hold
            and not (states[name].get("ProtectedFromScaleIn") and claims(name))
        ]
        wanted = int(group["DesiredCapacity"]) + standby
        return self.instance.id in serving and len(available) >= wanted - self.fleet.updates.max_unavailable

    @property
    def _checks_take(self) -> float:
        check = self.fleet.health_check
        return check.healthy * check.interval.total_seconds()

    def _own(self) -> dict[str, Any]:
        return next((each for each in self._group()["Instances"] if each["InstanceId"] == self.instance.id), {})

    def _group(self) -> dict[str, Any]:
        with convert_sdk_errors(f"describe the group {self.instance.group}"):
            found = self._client.describe_auto_scaling_groups(AutoScalingGroupNames=[self.instance.group])
        groups: list[dict[str, Any]] = found["AutoScalingGroups"]
        if not groups:
            raise AwsError(f"AWS has no Auto Scaling group {self.instance.group}, of which this instance was a member")
        return groups[0]

    def _protect(self, *, protected: bool) -> None:
        with convert_sdk_errors(f"claim a turn in the group {self.instance.group}"):
            self._client.set_instance_protection(ProtectedFromScaleIn=protected, **self._member)

    @property
    def _member(self) -> dict[str, Any]:
        return {"AutoScalingGroupName": self.instance.group, "InstanceIds": [self.instance.id]}

    @property
    def _client(self) -> Any:
        return client("autoscaling", self.instance.region)


def _serves(entry: dict[str, Any]) -> bool:
    state, health = str(entry["LifecycleState"]), str(entry["HealthStatus"])
    return state == "InService" and health.lower() == "healthy"
