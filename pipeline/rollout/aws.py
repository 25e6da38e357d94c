"""AWS resources of a fleet's rollouts: state machine, listener rule, record, CloudWatch metrics, operator signals.

The record is one DynamoDB item per fleet: the owner of the lock, the stable environment, an operator's signal. The
state machine accesses it by stacks/rollout/fleet_record.py, with the same attribute names.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Final

from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.pipeline.rollout.input import RolloutInput
from nxpipe.pipeline.util.aws import client, convert_sdk_errors
from nxpipe.pipeline.util.errors import RolloutRefused

RUNNING: Final = "RUNNING"
SUCCEEDED: Final = "SUCCEEDED"


@dataclass(frozen=True)
class RolloutExecution:
    """One execution of a fleet's state machine. `output` is set if it succeeded, else `fault`."""

    arn: str
    status: str
    started: datetime
    ended: datetime | None
    input: RolloutInput | None
    output: Mapping[str, Any]
    fault: tuple[str, str]  # the error's name and its cause

    @property
    def name(self) -> str:
        return self.arn.rpartition(":")[2]

    @property
    def running(self) -> bool:
        return self.status == RUNNING


@dataclass(frozen=True)
class ListenerRule:
    """The listener rule and the target groups, from the definition of the state machine."""

    rule: str
    balancer: str  # its CloudWatch dimension
    colours: Mapping[str, Mapping[str, str]]  # `group`, `targets` and `series` by environment

    @staticmethod
    def of(definition: str) -> "ListenerRule":
        fleet = json.loads(definition)["States"]["Open"]["Parameters"]["Payload"]["opens"]["fleet"]
        return ListenerRule(fleet["rule"], fleet["balancer"], fleet["colours"])


_KEY: Final = "fleet"
_NAMES: Final = {f"#{name}": name for name in ("owner", "since", "signal")}


@dataclass(frozen=True)
class RecordItem:
    """Attributes of the record; None if absent."""

    owner: str | None = None  # ARN of the execution that holds the lock
    since: datetime | None = None
    stable: str | None = None
    signal: str | None = None


@dataclass(frozen=True)
class FleetRecord:
    """The record of one fleet, with conditional writes."""

    client: Any
    table: str
    fleet: str

    def read(self) -> RecordItem:
        with convert_sdk_errors(f"read the record of fleet {self.fleet}"):
            item = self.client.get_item(TableName=self.table, Key=self._key, ConsistentRead=True).get("Item", {})
        values = {name: attribute["S"] for name, attribute in item.items()}
        since = values.get("since")
        return RecordItem(
            values.get("owner"), since and datetime.fromisoformat(since), values.get("stable"), values.get("signal")
        )

    def lock(self, me: str, *, after: str | None) -> bool:
        """Acquires the lock for an execution that does not exist yet, under its future ARN.

        The candidate's channel must move before the execution starts, and only the holder of the lock may move it. An
        execution's ARN follows from its name, so the command acquires the lock for it; the state machine then finds
        itself as the owner. `after` is an owner that was never started. False if another rollout was faster.
        """
        free = "attribute_not_exists(#owner) OR #owner = :me"
        values = {":me": me, ":now": datetime.now(UTC).isoformat(timespec="milliseconds")}
        if after is not None:
            return self._change("SET #owner = :me, #since = :now REMOVE #signal", "#owner = :dead", values, dead=after)
        return self._change("SET #owner = :me, #since = :now REMOVE #signal", free, values)

    def unlock(self, me: str) -> bool:
        return self._change("REMOVE #owner, #since, #signal", "#owner = :me", {":me": me})

    def set_signal(self, execution: str, signal: str | None, *, instead_of: str | None = None) -> bool:
        """Sets or removes the signal to a rollout. False if it does not run or has another signal."""
        condition, values = "#owner = :me", {":me": execution}
        if instead_of is not None:
            condition, values = f"{condition} AND #signal = :before", values | {":before": instead_of}
        if signal is None:
            return self._change("REMOVE #signal", condition, values)
        return self._change("SET #signal = :signal", condition, values | {":signal": signal})

    def _change(self, update: str, condition: str, values: dict[str, str], *, dead: str | None = None) -> bool:
        arguments = values | ({":dead": dead} if dead else {})
        with convert_sdk_errors(f"write the record of fleet {self.fleet}"), suppress(self._not_met):
            self.client.update_item(
                TableName=self.table,
                Key=self._key,
                UpdateExpression=update,
                ConditionExpression=condition,
                ExpressionAttributeNames={name: word for name, word in _NAMES.items() if name in update + condition},
                ExpressionAttributeValues={name: {"S": value} for name, value in arguments.items()},
            )
            return True
        return False

    @property
    def _key(self) -> dict[str, Any]:
        return {_KEY: {"S": self.fleet}}

    @property
    def _not_met(self) -> type[Exception]:
        found: type[Exception] = self.client.exceptions.ConditionalCheckFailedException
        return found


class StateMachine:
    """A fleet's state machine. Clients are created on first use; a failed call raises AwsError with one sentence."""

    def __init__(self, config: Config, fleet: ServingFleet) -> None:
        self.fleet = fleet.name
        self.region = config.project.region
        self._project = config.project.name
        self._account = config.project.account

    @cached_property
    def arn(self) -> str:
        """Built from the account of the credentials: no permission to list state machines is needed."""
        sts = client("sts", self.region)
        with convert_sdk_errors("identify the credentials"):
            me = sts.get_caller_identity()
        if self._account not in (None, me["Account"]):
            raise RolloutRefused(
                f"the credentials are of account {me['Account']}, but nxpipe.toml describes {self._account}; "
                "use credentials of that account"
            )
        partition = me["Arn"].split(":")[1]
        return f"arn:{partition}:states:{sts.meta.region_name}:{me['Account']}:stateMachine:{self._name('rollout')}"

    @cached_property
    def front(self) -> ListenerRule:
        states = self._states
        with convert_sdk_errors(f"describe the state machine {self.arn}"):
            try:
                response = states.describe_state_machine(stateMachineArn=self.arn)
            except states.exceptions.StateMachineDoesNotExist as missing:
                raise RolloutRefused(
                    f"fleet {self.fleet} has no state machine {self.arn}; deploy it with: "
                    f"npx cdk deploy {self._project}-rollout-{self.fleet}"
                ) from missing
        return ListenerRule.of(response["definition"])

    @cached_property
    def record(self) -> FleetRecord:
        return FleetRecord(client("dynamodb", self.region), self._name("rollout"), self.fleet)

    def weights(self) -> dict[str, int]:
        """Current weights of the load balancer, by environment."""
        balancing = client("elbv2", self.region)
        with convert_sdk_errors(f"read the weights of {self.front.rule}"):
            (rule,) = balancing.describe_rules(RuleArns=[self.front.rule])["Rules"]
        (action,) = rule["Actions"]
        by_targets = {group["TargetGroupArn"]: group["Weight"] for group in action["ForwardConfig"]["TargetGroups"]}
        return {colour: by_targets.get(group["targets"], 0) for colour, group in self.front.colours.items()}

    def metrics(self, queries: list[dict[str, Any]], since: datetime) -> dict[str, list[float]]:
        """Values of each CloudWatch query, by its id."""
        watching = client("cloudwatch", self.region)
        values: dict[str, list[float]] = {}
        with convert_sdk_errors(f"read the metrics of fleet {self.fleet}"):
            pages = watching.get_paginator("get_metric_data").paginate(
                MetricDataQueries=queries, StartTime=since, EndTime=datetime.now(UTC), ScanBy="TimestampAscending"
            )
            for page in pages:
                for result in page["MetricDataResults"]:
                    values.setdefault(result["Id"], []).extend(result["Values"])
        return values

    # Executions

    def execution_arn(self, name: str) -> str:
        return f"{self.arn.replace(':stateMachine:', ':execution:')}:{name}"

    def start(self, name: str, rollout: RolloutInput) -> None:
        """Starts the execution. A repetition changes nothing: Step Functions accepts a name once."""
        states = self._states
        with convert_sdk_errors(f"start the rollout {name}"):
            try:
                states.start_execution(stateMachineArn=self.arn, name=name, input=rollout.text())
            except states.exceptions.ExecutionAlreadyExists:
                return

    def execution(self, arn: str) -> RolloutExecution | None:
        states = self._states
        with convert_sdk_errors(f"describe the rollout {arn}"):
            try:
                response = states.describe_execution(executionArn=arn)
            except states.exceptions.ExecutionDoesNotExist:
                return None
        return _execution(response)

    def last(self) -> RolloutExecution | None:
        """The newest execution, in any status."""
        states = self._states
        with convert_sdk_errors(f"list the rollouts of fleet {self.fleet}"):
            executions = states.list_executions(stateMachineArn=self.arn, maxResults=1)["executions"]
        return self.execution(executions[0]["executionArn"]) if executions else None

    def failed_in(self, arn: str) -> str | None:
        """Name of the Fail state in which an execution ended."""
        with convert_sdk_errors(f"read the history of the rollout {arn}"):
            events = self._states.get_execution_history(executionArn=arn, reverseOrder=True, maxResults=5)["events"]
        return next(
            (
                event["stateEnteredEventDetails"]["name"]
                for event in events
                if "Fail" in event["type"] and "stateEnteredEventDetails" in event
            ),
            None,
        )

    @cached_property
    def _states(self) -> Any:
        return client("stepfunctions", self.region)

    def _name(self, what: str) -> str:
        return f"{self._project}-{self.fleet}-{what}"


def _execution(description: Mapping[str, Any]) -> RolloutExecution:
    return RolloutExecution(
        arn=description["executionArn"],
        status=description["status"],
        started=description["startDate"],
        ended=description.get("stopDate"),
        input=RolloutInput.from_text(description.get("input") or "{}"),
        output=json.loads(description.get("output") or "{}"),
        fault=(description.get("error") or "", description.get("cause") or ""),
    )


_DAY: Final = 86_400  # seconds; the longest period of a CloudWatch statistic
_QUANTILES: Final = ("p50", "p75", "p90", "p95", "p99")
_BEYOND: Final = (1.25, 1.6)  # factors of p99
MIN_TIMED_REQUESTS: Final = 1_000  # requests; ten of them are slower than p99
_MINUTES: Final = 180
_NAMESPACE: Final = "AWS/ApplicationELB"
_GOOD: Final = (2, 3, 4)  # status classes of good responses; every other request has failed
_LATENCY: Final = "TargetResponseTime"


@dataclass(frozen=True)
class BaselineHistory:
    """Recent metrics of the baseline. `latencies` is empty if there were too few requests to estimate them."""

    timed: int  # requests
    latencies: tuple[float, ...]  # seconds, as in a plan
    rps: float
    error_rate: float

    @property
    def known(self) -> bool:
        return bool(self.latencies)


def baseline_history(machine: StateMachine, colour: str, minute: int) -> BaselineHistory:
    """`minute` is the length of a minute of the plan, in seconds.

    Latency thresholds come from history and are frozen before the first minute: thresholds from the data under test
    would void the e-values.
    """
    timed, latencies = _latencies(machine, colour)
    metrics = {"requests": "RequestCount"} | {f"good{kind}": f"HTTPCode_Target_{kind}XX_Count" for kind in _GOOD}
    counts = machine.metrics(
        [_query(machine, colour, name, metric, "Sum", minute) for name, metric in metrics.items()],
        datetime.now(UTC) - timedelta(seconds=_MINUTES * minute),
    )
    requests, minutes = sum(counts["requests"]), sum(1 for count in counts["requests"] if count)
    good = sum(sum(counts[f"good{kind}"]) for kind in _GOOD)
    return BaselineHistory(
        timed,
        latencies,
        rps=requests / (minutes * minute) if minutes else 0.0,
        error_rate=max(0.0, 1 - good / requests) if requests else 0.0,
    )


def _latencies(machine: StateMachine, colour: str) -> tuple[int, tuple[float, ...]]:
    """Timed requests and latency thresholds of the busiest recent day; days cannot be combined."""
    statistics = {"timed": "SampleCount", **{name: name for name in _QUANTILES}}
    queries = [_query(machine, colour, name, _LATENCY, statistic, _DAY) for name, statistic in statistics.items()]
    days = machine.metrics(queries, datetime.now(UTC) - timedelta(days=2))
    if not days["timed"]:
        return 0, ()
    fullest = max(range(len(days["timed"])), key=days["timed"].__getitem__)
    timed = int(days["timed"][fullest])
    if timed < MIN_TIMED_REQUESTS:
        return timed, ()
    quantiles = [days[name][fullest] for name in _QUANTILES]
    # CloudWatch estimates each percentile separately, so a higher one may come out slightly smaller; hence the sort.
    return timed, tuple(sorted([*quantiles, *(quantiles[-1] * factor for factor in _BEYOND)]))


def _query(machine: StateMachine, colour: str, id_: str, metric: str, statistic: str, period: int) -> dict[str, Any]:
    dimensions = {"LoadBalancer": machine.front.balancer, "TargetGroup": machine.front.colours[colour]["series"]}
    return {
        "Id": id_,
        "MetricStat": {
            "Metric": {
                "Namespace": _NAMESPACE,
                "MetricName": metric,
                "Dimensions": [{"Name": name, "Value": value} for name, value in dimensions.items()],
            },
            "Period": period,
            "Stat": statistic,
        },
    }


APPROVE: Final = "approve"
PAUSE: Final = "pause"
ABORT: Final = "abort"


@dataclass(frozen=True)
class SignalResult:
    execution: str
    signal: str | None
    changed: bool
    sentence: str


def approve(machine: StateMachine) -> SignalResult:
    return _signal(machine, APPROVE, "is approved; it advances when its step is undecided")


def pause(machine: StateMachine) -> SignalResult:
    return _signal(machine, PAUSE, "is paused at its step; continue with: nxpipe rollout resume")


def abort(machine: StateMachine) -> SignalResult:
    return _signal(machine, ABORT, "is aborted; all traffic returns to the baseline at the next evaluation")


def resume(machine: StateMachine) -> SignalResult:
    execution, signal = _running(machine)
    name = execution.rpartition(":")[2]
    if signal != PAUSE:
        return SignalResult(name, signal, False, f"Rollout {name} is not paused.")
    changed = machine.record.set_signal(execution, None, instead_of=PAUSE)
    return SignalResult(name, None, changed, f"Rollout {name} is resumed.")


def _signal(machine: StateMachine, signal: str, effect: str) -> SignalResult:
    execution, before = _running(machine)
    name = execution.rpartition(":")[2]
    if before == ABORT != signal:
        raise RolloutRefused(f"rollout {name} is already aborted, which cannot be undone")
    if before != signal and not machine.record.set_signal(execution, signal):
        raise RolloutRefused(f"rollout {name} has just ended")
    return SignalResult(name, signal, before != signal, f"Rollout {name} {effect}.")


def _running(machine: StateMachine) -> tuple[str, str | None]:
    """ARN of the running execution, and its signal."""
    _ = machine.front  # raises for a fleet without a state machine
    item = machine.record.read()
    if item.owner is None:
        raise RolloutRefused(f"no rollout of fleet {machine.fleet} is running")
    return item.owner, item.signal
