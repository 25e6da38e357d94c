"""A fleet's rollouts as AWS keeps them: the machine that runs them, its record, the rule whose weights it moves."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.pipeline.rollout.asked import Asked
from nxpipe.pipeline.rollout.errors import RolloutRefused
from nxpipe.pipeline.rollout.lock import Record
from nxpipe.pipeline.util.aws import asking, client

RUNNING: Final = "RUNNING"
SUCCEEDED: Final = "SUCCEEDED"


@dataclass(frozen=True)
class Execution:
    """One rollout. `output` is what the machine says at its end, `fault` why it did not come to that."""

    arn: str
    status: str
    started: datetime
    ended: datetime | None
    asked: Asked | None
    output: Mapping[str, Any]
    fault: tuple[str, str]  # the error's name and its cause

    @property
    def name(self) -> str:
        return self.arn.rpartition(":")[2]

    @property
    def running(self) -> bool:
        return self.status == RUNNING


@dataclass(frozen=True)
class Front:
    """The listener rule, and the colours behind it, as the machine's own text has them."""

    rule: str
    balancer: str  # as metrics call it
    colours: Mapping[str, Mapping[str, str]]  # group, targets, series of each

    @staticmethod
    def of(definition: str) -> "Front":
        told = json.loads(definition)["States"]["Open"]["Parameters"]["Payload"]["opens"]["fleet"]
        return Front(told["rule"], told["balancer"], told["colours"])


class Machine:
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
    def front(self) -> Front:
        states = self._states
        with asking(f"describe the machine {self.arn}"):
            try:
                found = states.describe_state_machine(stateMachineArn=self.arn)
            except states.exceptions.StateMachineDoesNotExist as missing:
                raise RolloutRefused(
                    f"fleet {self.fleet} has no machine for rollouts, {self.arn}; deploy it with: "
                    f"npx cdk deploy {self._project}-rollout-{self.fleet}"
                ) from missing
        return Front.of(found["definition"])

    @cached_property
    def record(self) -> Record:
        return Record(client("dynamodb", self.region), self._name("rollout"), self.fleet)

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

    def start(self, name: str, asked: Asked) -> None:
        """Harmless when it was started already: a name is one execution's."""
        states = self._states
        with asking(f"start the rollout {name}"):
            try:
                states.start_execution(stateMachineArn=self.arn, name=name, input=asked.text())
            except states.exceptions.ExecutionAlreadyExists:
                return

    def execution(self, arn: str) -> Execution | None:
        states = self._states
        with asking(f"describe the rollout {arn}"):
            try:
                told = states.describe_execution(executionArn=arn)
            except states.exceptions.ExecutionDoesNotExist:
                return None
        return _told(told)

    def last(self) -> Execution | None:
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


def _told(told: Mapping[str, Any]) -> Execution:
    return Execution(
        arn=told["executionArn"],
        status=told["status"],
        started=told["startDate"],
        ended=told.get("stopDate"),
        asked=Asked.from_text(told.get("input") or "{}"),
        output=json.loads(told.get("output") or "{}"),
        fault=(told.get("error") or "", told.get("cause") or ""),
    )
