"""A fleet's rollouts as AWS keeps them: the machine that runs them, its record, the rule whose weights it moves."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Final

from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.pipeline.rollout.input import RolloutInput
from nxpipe.pipeline.util.aws import asking, client
from nxpipe.pipeline.util.errors import RolloutRefused

RUNNING: Final = "RUNNING"
SUCCEEDED: Final = "SUCCEEDED"


@dataclass(frozen=True)
class RolloutExecution:
    """One rollout. `output` is what the machine says at its end, `fault` why it did not come to that."""

    arn: str
    status: str
    started: datetime
    ended: datetime | None
    asked: RolloutInput | None
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
    """The listener rule, and the colours behind it, as the machine's own text has them."""

    rule: str
    balancer: str  # as metrics call it
    colours: Mapping[str, Mapping[str, str]]  # group, targets, series of each

    @staticmethod
    def of(definition: str) -> "ListenerRule":
        told = json.loads(definition)["States"]["Open"]["Parameters"]["Payload"]["opens"]["fleet"]
        return ListenerRule(told["rule"], told["balancer"], told["colours"])


_KEY: Final = "fleet"
_NAMES: Final = {f"#{name}": name for name in ("owner", "since", "signal")}


@dataclass(frozen=True)
class RecordItem:
    owner: str | None = None  # the execution, by its ARN
    since: datetime | None = None
    stable: str | None = None
    signal: str | None = None


@dataclass(frozen=True)
class FleetRecord:
    client: Any
    table: str
    fleet: str

    def read(self) -> RecordItem:
        with asking(f"read the record of fleet {self.fleet}"):
            found = self.client.get_item(TableName=self.table, Key=self._key, ConsistentRead=True).get("Item", {})
        said = {name: value["S"] for name, value in found.items()}
        since = said.get("since")
        return RecordItem(
            said.get("owner"), since and datetime.fromisoformat(since), said.get("stable"), said.get("signal")
        )

    def lock(self, me: str, *, after: str | None) -> bool:
        """For an execution that will be; the machine then finds its own name there. `after` is an owner that never
        came to be. False: somebody else was faster.
        """
        free = "attribute_not_exists(#owner) OR #owner = :me"
        values = {":me": me, ":now": datetime.now(UTC).isoformat(timespec="milliseconds")}
        if after is not None:
            return self._change("SET #owner = :me, #since = :now REMOVE #signal", "#owner = :dead", values, dead=after)
        return self._change("SET #owner = :me, #since = :now REMOVE #signal", free, values)

    def unlock(self, me: str) -> bool:
        return self._change("REMOVE #owner, #since, #signal", "#owner = :me", {":me": me})

    def ask(self, execution: str, signal: str | None, *, instead_of: str | None = None) -> bool:
        """Says something to a rollout, or takes it back; False: it is not under way, or hears something else."""
        condition, values = "#owner = :me", {":me": execution}
        if instead_of is not None:
            condition, values = f"{condition} AND #signal = :before", values | {":before": instead_of}
        if signal is None:
            return self._change("REMOVE #signal", condition, values)
        return self._change("SET #signal = :signal", condition, values | {":signal": signal})

    def _change(self, update: str, condition: str, values: dict[str, str], *, dead: str | None = None) -> bool:
        given = values | ({":dead": dead} if dead else {})
        with asking(f"write the record of fleet {self.fleet}"), suppress(self._not_met):
            self.client.update_item(
                TableName=self.table,
                Key=self._key,
                UpdateExpression=update,
                ConditionExpression=condition,
                ExpressionAttributeNames={name: word for name, word in _NAMES.items() if name in update + condition},
                ExpressionAttributeValues={name: {"S": value} for name, value in given.items()},
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
    """Clients are made when they are needed; each call is one sentence when it fails."""

    def __init__(self, config: Config, fleet: ServingFleet) -> None:
        self.fleet = fleet.name
        self.region = config.project.region
        self._project = config.project.name
        self._account = config.project.account

    @cached_property
    def arn(self) -> str:
        """By whose credentials are at hand: no list of machines need be asked for."""
        sts = client("sts", self.region)
        with asking("say whose credentials these are"):
            me = sts.get_caller_identity()
        if self._account not in (None, me["Account"]):
            raise RolloutRefused(
                f"nxpipe.toml describes account {self._account}, and the credentials at hand are of {me['Account']}; "
                "take those of the other account"
            )
        partition = me["Arn"].split(":")[1]
        return f"arn:{partition}:states:{sts.meta.region_name}:{me['Account']}:stateMachine:{self._name('rollout')}"

    @cached_property
    def front(self) -> ListenerRule:
        states = self._states
        with asking(f"describe the machine {self.arn}"):
            try:
                found = states.describe_state_machine(stateMachineArn=self.arn)
            except states.exceptions.StateMachineDoesNotExist as missing:
                raise RolloutRefused(
                    f"fleet {self.fleet} has no machine for rollouts, {self.arn}; deploy it with: "
                    f"npx cdk deploy {self._project}-rollout-{self.fleet}"
                ) from missing
        return ListenerRule.of(found["definition"])

    @cached_property
    def record(self) -> FleetRecord:
        return FleetRecord(client("dynamodb", self.region), self._name("rollout"), self.fleet)

    def weights(self) -> dict[str, int]:
        """By colour, as the load balancer has them now."""
        balancing = client("elbv2", self.region)
        with asking(f"tell the weights of {self.front.rule}"):
            (found,) = balancing.describe_rules(RuleArns=[self.front.rule])["Rules"]
        (action,) = found["Actions"]
        by_targets = {each["TargetGroupArn"]: each["Weight"] for each in action["ForwardConfig"]["TargetGroups"]}
        return {colour: by_targets.get(each["targets"], 0) for colour, each in self.front.colours.items()}

    def metrics(self, queries: list[dict[str, Any]], since: datetime) -> dict[str, list[float]]:
        """What CloudWatch answers to each query, by its id."""
        watching = client("cloudwatch", self.region)
        values: dict[str, list[float]] = {}
        with asking(f"tell how fleet {self.fleet} has done"):
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

    def start(self, name: str, asked: RolloutInput) -> None:
        """Harmless when it was started already: a name is one execution's."""
        states = self._states
        with asking(f"start the rollout {name}"):
            try:
                states.start_execution(stateMachineArn=self.arn, name=name, input=asked.text())
            except states.exceptions.ExecutionAlreadyExists:
                return

    def execution(self, arn: str) -> RolloutExecution | None:
        states = self._states
        with asking(f"describe the rollout {arn}"):
            try:
                told = states.describe_execution(executionArn=arn)
            except states.exceptions.ExecutionDoesNotExist:
                return None
        return _told(told)

    def last(self) -> RolloutExecution | None:
        """The newest one, whatever became of it."""
        states = self._states
        with asking(f"list the rollouts of fleet {self.fleet}"):
            found = states.list_executions(stateMachineArn=self.arn, maxResults=1)["executions"]
        return self.execution(found[0]["executionArn"]) if found else None

    def failed_in(self, arn: str) -> str | None:
        """The state of the machine that ended a rollout as failed."""
        with asking(f"tell the end of the rollout {arn}"):
            events = self._states.get_execution_history(executionArn=arn, reverseOrder=True, maxResults=5)["events"]
        return next(
            (
                each["stateEnteredEventDetails"]["name"]
                for each in events
                if "Fail" in each["type"] and "stateEnteredEventDetails" in each
            ),
            None,
        )

    @cached_property
    def _states(self) -> Any:
        return client("stepfunctions", self.region)

    def _name(self, what: str) -> str:
        return f"{self._project}-{self.fleet}-{what}"


def _told(told: Mapping[str, Any]) -> RolloutExecution:
    return RolloutExecution(
        arn=told["executionArn"],
        status=told["status"],
        started=told["startDate"],
        ended=told.get("stopDate"),
        asked=RolloutInput.from_text(told.get("input") or "{}"),
        output=json.loads(told.get("output") or "{}"),
        fault=(told.get("error") or "", told.get("cause") or ""),
    )


_DAY: Final = 86_400  # seconds; the longest period that CloudWatch counts over
_QUANTILES: Final = ("p50", "p75", "p90", "p95", "p99")
_BEYOND: Final = (1.25, 1.6)  # of p99
MIN_TIMED_REQUESTS: Final = 1_000  # requests, of which ten are slower than p99
_MINUTES: Final = 180
_NAMESPACE: Final = "AWS/ApplicationELB"
_GOOD: Final = (2, 3, 4)  # hundreds: answers of targets; what is none of them has failed
_LATENCY: Final = "TargetResponseTime"


@dataclass(frozen=True)
class BaselineHistory:
    """`latencies` are none where there were too few requests to know them."""

    timed: int  # requests
    latencies: tuple[float, ...]  # seconds, in the order that a plan has them
    rps: float
    error_rate: float

    @property
    def known(self) -> bool:
        return bool(self.latencies)


def baseline_history(machine: StateMachine, colour: str, minute: int) -> BaselineHistory:
    """`minute` is how many seconds a minute of the plan has."""
    timed, latencies = _latencies(machine, colour)
    asked = {"requests": "RequestCount"} | {f"good{kind}": f"HTTPCode_Target_{kind}XX_Count" for kind in _GOOD}
    counts = machine.metrics(
        [_query(machine, colour, name, metric, "Sum", minute) for name, metric in asked.items()],
        datetime.now(UTC) - timedelta(seconds=_MINUTES * minute),
    )
    requests, minutes = sum(counts["requests"]), sum(1 for each in counts["requests"] if each)
    good = sum(sum(counts[f"good{kind}"]) for kind in _GOOD)
    return BaselineHistory(
        timed,
        latencies,
        rps=requests / (minutes * minute) if minutes else 0.0,
        error_rate=max(0.0, 1 - good / requests) if requests else 0.0,
    )


def _latencies(machine: StateMachine, colour: str) -> tuple[int, tuple[float, ...]]:
    """Of the fullest day among the last: percentiles of several days cannot be put together."""
    statistics = {"timed": "SampleCount", **{name: name for name in _QUANTILES}}
    asked = [_query(machine, colour, name, _LATENCY, each, _DAY) for name, each in statistics.items()]
    days = machine.metrics(asked, datetime.now(UTC) - timedelta(days=2))
    if not days["timed"]:
        return 0, ()
    fullest = max(range(len(days["timed"])), key=days["timed"].__getitem__)
    timed = int(days["timed"][fullest])
    if timed < MIN_TIMED_REQUESTS:
        return timed, ()
    quantiles = [days[name][fullest] for name in _QUANTILES]
    # Percentiles are estimated one by one: of nearly equal ones the higher may come out lower.
    return timed, tuple(sorted([*quantiles, *(quantiles[-1] * each for each in _BEYOND)]))


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
    return _say(machine, APPROVE, "is approved, and goes on as soon as its step is undecided")


def pause(machine: StateMachine) -> SignalResult:
    return _say(machine, PAUSE, "stays at its step until: nxpipe rollout resume")


def abort(machine: StateMachine) -> SignalResult:
    return _say(machine, ABORT, "is told to end; all traffic goes back to the old version at the next look")


def resume(machine: StateMachine) -> SignalResult:
    execution, signal = _under_way(machine)
    name = execution.rpartition(":")[2]
    if signal != PAUSE:
        return SignalResult(name, signal, False, f"Rollout {name} is not paused.")
    changed = machine.record.ask(execution, None, instead_of=PAUSE)
    return SignalResult(name, None, changed, f"Rollout {name} goes on.")


def _say(machine: StateMachine, signal: str, means: str) -> SignalResult:
    execution, before = _under_way(machine)
    name = execution.rpartition(":")[2]
    if before == ABORT != signal:
        raise RolloutRefused(f"rollout {name} was told to end already, and nothing can take that back")
    if before != signal and not machine.record.ask(execution, signal):
        raise RolloutRefused(f"rollout {name} has ended at this moment")
    return SignalResult(name, signal, before != signal, f"Rollout {name} {means}.")


def _under_way(machine: StateMachine) -> tuple[str, str | None]:
    """The execution, and what it was told already."""
    _ = machine.front  # a fleet without a machine has no record either
    item = machine.record.read()
    if item.owner is None:
        raise RolloutRefused(f"no rollout of fleet {machine.fleet} is under way")
    return item.owner, item.signal
