"""Smoke test of an account: a project of its own is deployed, serves one request, and is removed.

The steps are the user's own: `cdk deploy`, `nxpipe build`, `nxpipe promote`. A signal or the limit ends them, and what
exists is removed in every case.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import Any, Final

from nxpipe.pipeline.fleet.account import Account
from nxpipe.pipeline.fleet.smoke_project import CHANNEL, MODEL, TYPE, SmokeProject
from nxpipe.pipeline.fleet.teardown import (
    FLEET,
    SmokeRow,
    SmokeSteps,
    StepFailed,
    Teardown,
    smoke_stacks,
)
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.exit_codes import FINDINGS, INTERRUPTED, OK, TERMINATED, ExitCode
from nxpipe.stacks.names import PROBE, SMOKE_END, fleet_log

_MADE_BY_THE_TEST: Final = ("store", "agent", "channel")  # checks of the preflight that fail before the first step
_FAILED_LAUNCHES: Final = 3
_LOGGED_WITHIN: Final = 120  # seconds


class SmokeStopped(BaseException):
    """A signal, or the limit, ends the test. No handler of errors on the way may keep it."""

    def __init__(self, cause: str, code: ExitCode) -> None:
        super().__init__(cause)
        self.code = code


@contextmanager
def stop_at_signals() -> Iterator[None]:
    """Raise `SmokeStopped` in this thread at Ctrl-C and SIGTERM, also while it waits."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SmokeStopped(*_SIGNALS[signal.Signals(signum)])

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def hard_stop(limit: float) -> Iterator[None]:
    """Raise `SmokeStopped` in this thread after `limit` seconds, also while it waits."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SmokeStopped(f"the limit of {_minutes(limit)} is reached", FINDINGS)

    before, began = signal.signal(signal.SIGALRM, stop), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # a timer that was running
            signal.setitimer(signal.ITIMER_REAL, max(0.1, left - (time.monotonic() - began)), interval)


_SIGNALS: Final = {signal.SIGINT: ("interrupted by Ctrl-C", INTERRUPTED), signal.SIGTERM: ("terminated", TERMINATED)}


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:g}m"


@dataclass(frozen=True)
class SmokeReport:
    """The rows of all steps, and what ended the test before its end."""

    rows: tuple[SmokeRow, ...]
    stopped: SmokeStopped | None = None
    left: bool = False  # the removal was interrupted

    @property
    def exit_code(self) -> ExitCode:
        if self.stopped is not None and self.stopped.code is not FINDINGS:
            return self.stopped.code
        failed = self.stopped is not None or any(row.state == "fails" for row in self.rows)
        return FINDINGS if failed else OK


@dataclass
class SmokeTest:
    """The smoke test of one project's account."""

    project: SmokeProject
    limit: float  # seconds
    steps: SmokeSteps
    manifest: str = ""  # digest of the artifact
    instance: str = ""
    _end: datetime = datetime.max  # of the instances, also if this process is killed

    @property
    def account(self) -> Account:
        return self.project.account

    @property
    def name(self) -> str:
        return self.project.name

    @property
    def teardown(self) -> Teardown:
        return Teardown(self.account, self.name, self.steps)

    def check_stacks(self, *, may_exist: bool) -> None:
        """Refuse foreign stacks in any case: a deployment would change them."""
        stacks = smoke_stacks(self.account, self.name)
        if stacks and not may_exist:
            raise InputInvalid(
                f"stacks of a smoke test exist: {', '.join(stack['StackName'] for stack in stacks)}; continue it with "
                "--resume, or delete them with --destroy"
            )

    def run(self) -> SmokeReport:
        """Run the steps until one fails, a signal or the limit, and remove what exists in each of these cases."""
        self._end = datetime.now(UTC) + timedelta(seconds=self.limit)
        if not self.steps.run("preflight", "check the account", self._examine):
            return SmokeReport(tuple(self.steps.rows))
        stopped: SmokeStopped | None = None
        fault: Exception | None = None
        try:
            with stop_at_signals():
                try:
                    with hard_stop(self.limit):
                        self._deploy_and_check()
                except SmokeStopped as stop:
                    stopped = stop
                    self.steps.say(f"{stop}: deleting what exists. Ctrl-C leaves it as it is.")
                except Exception as error:  # one of this program, which is raised after the removal
                    fault = error
                self.teardown.run()
        except SmokeStopped as again:
            return SmokeReport(tuple(self.steps.rows), again, left=True)
        if fault is not None:
            raise fault
        return SmokeReport(tuple(self.steps.rows), stopped)

    def remove(self) -> SmokeReport:
        """Remove what an earlier test has left."""
        try:
            with stop_at_signals():
                self.teardown.run()
        except SmokeStopped as stop:
            return SmokeReport(tuple(self.steps.rows), stop, left=True)
        return SmokeReport(tuple(self.steps.rows))

    def _deploy_and_check(self) -> None:
        steps: tuple[tuple[str, str, Callable[[], str]], ...] = (
            ("storage", "deploy the store", self._storage),
            ("agent", "copy the agent's bundle", self.project.copy_agent),
            ("artifact", "compile and promote a tiny model", self._artifact),
            ("fleet", f"deploy the network, one {TYPE} and the probe", self._fleet),
            ("instance", "wait for the instance", self._instance),
            ("target", "wait for the load balancer's health check", self._target),
            ("request", "send one request through the load balancer", self._request),
            ("logs", "look for the log of the instance", self._logs),
        )
        for name, title, action in steps:
            if not self.steps.run(name, title, action):
                return

    def _examine(self) -> str:
        from nxpipe.pipeline.fleet.preflight import preflight

        rows = [row for row in preflight(self.project.toml).rows if row.check not in _MADE_BY_THE_TEST]
        if failing := [f"{row.what}: {row.found}; {row.remedy}" for row in rows if row.state == "fails"]:
            raise StepFailed(". ".join(failing))
        unknown = sum(row.state == "unknown" for row in rows)
        return f"{len(rows) - unknown} checks pass, {unknown} are unknown"

    def _storage(self) -> str:
        self.project.deploy("storage")
        self.project.write(f"s3://{self._output('storage', 'BucketName')}")
        return self._output("storage", "BucketName")

    def _artifact(self) -> str:
        self.project.nxpipe("build")
        self.project.nxpipe("promote", MODEL, "--channel", CHANNEL, "--reason", "smoke test")
        (channel,) = json.loads(self.project.nxpipe("channel", "show", CHANNEL, "--json"))
        (artifact,) = channel["artifacts"]
        self.manifest = artifact["manifest"]["sha256"]
        name = f"{artifact['model_id']}@{artifact['request_key'][:12]}"
        return f"rehearsal: {name} has programs of the emulator, which no Neuron device runs"

    def _fleet(self) -> str:
        serving = f"{self.name}-serve-{FLEET}"
        end = f"{self._end:%Y-%m-%dT%H:%M:%SZ}"
        self.project.deploy("probe", "--parameters", f"{serving}:{SMOKE_END}={end}")
        # A group that an earlier hard stop has emptied stays empty in an update of the stack.
        self.account.call(
            "autoscaling",
            "update_auto_scaling_group",
            AutoScalingGroupName=self._group,
            MaxSize=1,
            DesiredCapacity=1,
        )
        return f"{self._group}; EC2 Auto Scaling ends its instances at {end}"

    @property
    def _group(self) -> str:
        return f"{self.name}-{FLEET}-blue"

    def _instance(self) -> str:
        def look() -> str | None:
            for entry in self._described()["Instances"]:
                self.steps.latest = f"{entry['InstanceId']} is {entry['LifecycleState']}"
                if entry["LifecycleState"] == "InService":
                    self.instance = entry["InstanceId"]
                    return f"{self.instance} in {entry['AvailabilityZone']} is InService"
            self._require_launches()
            return None

        return self.steps.until(look)

    def _described(self) -> dict[str, Any]:
        names = [self._group]
        groups = self.account.call("autoscaling", "describe_auto_scaling_groups", AutoScalingGroupNames=names)
        found: dict[str, Any] = groups["AutoScalingGroups"][0]
        return found

    def _require_launches(self) -> None:
        """End the wait early if launches fail: Auto Scaling would repeat them until the limit."""
        activities = self.account.call("autoscaling", "describe_scaling_activities", AutoScalingGroupName=self._group)
        failed = [entry for entry in activities["Activities"] if entry["StatusCode"] in ("Failed", "Cancelled")]
        if failed:
            self.steps.latest = failed[0].get("StatusMessage") or failed[0]["Description"]
        if len(failed) >= _FAILED_LAUNCHES:
            raise StepFailed(f"{len(failed)} launches failed, the last one with: {self.steps.latest}")

    def _target(self) -> str:
        arn = self._described()["TargetGroupARNs"][0]

        def look() -> str | None:
            for entry in self.account.call("elbv2", "describe_target_health", TargetGroupArn=arn)[
                "TargetHealthDescriptions"
            ]:
                health = entry["TargetHealth"]
                self.steps.latest = f"{entry['Target']['Id']} is {health['State']}: {health.get('Description', '')}"
                if health["State"] == "healthy":
                    return f"{entry['Target']['Id']} is healthy"
            return None

        return self.steps.until(look)

    def _request(self) -> str:
        name = self._output("probe", PROBE)
        answer = self.account.call("lambda", "invoke", FunctionName=name)
        payload = json.loads(answer["Payload"].read())
        if "FunctionError" in answer:
            raise StepFailed(f"the probe failed: {payload.get('errorMessage', payload)}")
        found = f"status {payload['status']}, {payload['bytes']} bytes in {payload['seconds']} s"
        if payload["status"] != 200:
            raise StepFailed(found)
        if payload["sha256"] != self.manifest:
            raise StepFailed(f"{found}, but not the manifest of the promoted artifact")
        return f"{found}: the manifest of the promoted artifact"

    def _logs(self) -> str:
        """Lines of user data and agent. Device metrics in embedded metric format are no lines."""
        group = fleet_log(self.name, FLEET)
        ends = time.monotonic() + _LOGGED_WITHIN

        def look() -> str | None:
            if lines := self._lines(group):
                return f"{group} has lines of {self.instance}: {len(lines)}"
            if time.monotonic() < ends:
                return None
            raise StepFailed(f"{group} has no line of {self.instance}")

        return self.steps.until(look)

    def _lines(self, group: str) -> list[str]:
        streams = self.account.items("logs", "describe_log_streams", "logStreams", logGroupName=group)
        names = [stream["logStreamName"] for stream in streams if self.instance in stream["logStreamName"]]
        events = [
            event["message"]
            for name in names
            for event in self.account.call("logs", "get_log_events", logGroupName=group, logStreamName=name)["events"]
        ]
        return [message for message in events if '"_aws"' not in message]

    def _output(self, part: str, key: str) -> str:
        return self._outputs(f"{self.name}-{part}")[key]

    def _outputs(self, stack: str) -> Mapping[str, str]:
        found = self.account.call("cloudformation", "describe_stacks", StackName=stack)["Stacks"][0]
        return {entry["OutputKey"]: entry["OutputValue"] for entry in found.get("Outputs", [])}
