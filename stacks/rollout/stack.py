"""Rollout stack of one fleet: the judge function, the state machines, the record table, their IAM roles."""

import json
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aws_cdk import (
    CfnOutput,
    RemovalPolicy,
    Stack,
    aws_dynamodb,
    aws_events,
    aws_iam,
    aws_lambda,
    aws_s3_assets,
    aws_stepfunctions,
)
from constructs import Construct

from nxpipe.pipeline.config import ServingFleet
from nxpipe.stacks.handles import ObserveHandle, RolloutHandle, ServeHandle, StoreHandle
from nxpipe.stacks.iam import own_account_service
from nxpipe.stacks.project import log_group, tag_project
from nxpipe.stacks.rollout.fleet_record import COLOURS, KEY, WRITABLE, Fleet, Record, TargetGroup
from nxpipe.stacks.rollout.state_machine import MachineResources, release, watch, watchdog

_ROOT: Final = Path(__file__).parents[3]  # the folder that holds the package nxpipe
_PACKAGE: Final = "nxpipe/pipeline"
RUNTIME: Final = "python3.13"
_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)


class Judge(Construct):
    """It may write its log, and nothing else: whatever it is told, it can only answer."""

    def __init__(self, scope: Construct, id_: str, *, name: str) -> None:
        super().__init__(scope, id_)
        logs = log_group(self, "Logs")
        role = aws_iam.Role(
            self,
            "Role",
            description=f"The judge {name}",
            path="/nxpipe/",
            assumed_by=aws_iam.ServicePrincipal("lambda.amazonaws.com"),
        )
        logs.grant_write(role)
        code = aws_s3_assets.Asset(self, "Code", path=str(archive()))
        made = aws_lambda.CfnFunction(
            self,
            "Function",
            function_name=name,
            description="Says what the counts of a rollout mean",
            runtime=RUNTIME,
            architectures=["arm64"],
            handler="nxpipe.pipeline.canary.handler.handle",
            code=aws_lambda.CfnFunction.CodeProperty(s3_bucket=code.s3_bucket_name, s3_key=code.s3_object_key),
            role=role.role_arn,
            logging_config=aws_lambda.CfnFunction.LoggingConfigProperty(log_group=logs.log_group_name),
            memory_size=512,
            timeout=20,
        )
        self.arn: str = made.attr_arn


def archive() -> Path:
    """Not compressed: what a compressor makes of a text differs from one version of it to the next."""
    path = Path(tempfile.mkdtemp(), "judge.zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
        for source in [_ROOT / _PACKAGE / "__init__.py", *sorted((_ROOT / _PACKAGE / "canary").glob("*.py"))]:
            entry = zipfile.ZipInfo(str(source.relative_to(_ROOT)), _LONG_AGO)
            entry.external_attr = 0o644 << 16
            packed.writestr(entry, source.read_bytes())
    return path


# By this rule of its own Step Functions hears that an execution has ended for which another one waits.
_ITS_RULE: Final = "rule/StepFunctionsGetEventsForStepFunctionsExecutionRule"


@dataclass(frozen=True)
class RolloutResources:
    """What the machines work on, by ARN."""

    rule: str
    groups: Sequence[str]
    table: str
    judge: str
    evidence: str  # the objects of one folder
    evidence_key: str
    topic: str
    topic_key: str
    clock: str
    release: str  # machines
    watch: str
    watchdog: str


class Roles(Construct):
    """One for each machine, and a policy for whoever releases: roles of people and of jobs are others' to make."""

    def __init__(self, scope: Construct, id_: str, things: RolloutResources, *, fleet: str) -> None:
        super().__init__(scope, id_)
        self._things = things
        self.release, self.watch, self.watchdog = map(self._role, ("Release", "Watch", "Watchdog"))
        self._move_traffic(self.release)
        self._judge(self.release)
        self._start_watches(self.release)
        _let(self.release, ("autoscaling:DescribeAutoScalingGroups", "elasticloadbalancing:DescribeTargetHealth"), "*")
        _let(self.release, ("cloudwatch:DescribeAlarms",), "*")
        self._judge(self.watch)
        _let(self.watch, ("dynamodb:GetItem",), things.table)
        _let(self.watch, ("cloudwatch:DescribeAlarms", "cloudwatch:GetMetricData"), "*")
        self._move_traffic(self.watchdog)
        _let(self.watchdog, ("elasticloadbalancing:DescribeTargetHealth",), "*")
        _let(self.watchdog, ("states:DescribeExecution",), *map(_executions, (things.release, things.watchdog)))
        self.releasing = aws_iam.ManagedPolicy(
            self,
            "Releasing",
            description="Start, watch, pause, approve and end the rollouts of one fleet",
            path="/nxpipe/",
            statements=_releasing(things, fleet),
        )

    def _role(self, machine: str) -> aws_iam.Role:
        return aws_iam.Role(
            self,
            machine,
            description=f"{machine} of a rollout",
            path="/nxpipe/",
            assumed_by=own_account_service(self, "states"),
        )

    def _move_traffic(self, role: aws_iam.Role) -> None:
        things = self._things
        _let(role, ("elasticloadbalancing:ModifyRule",), things.rule)
        _let(role, ("elasticloadbalancing:DescribeRules",), "*")
        _let(role, ("autoscaling:SetDesiredCapacity",), *things.groups)
        _let(role, ("dynamodb:GetItem", "dynamodb:UpdateItem"), things.table)
        _let(role, ("events:EnableRule", "events:DisableRule"), things.clock)
        _let(role, ("sns:Publish",), things.topic)
        self._seal(role, "sns", things.topic_key)

    def _judge(self, role: aws_iam.Role) -> None:
        _let(role, ("lambda:InvokeFunction",), self._things.judge)
        _let(role, ("s3:PutObject",), self._things.evidence)
        self._seal(role, "s3", self._things.evidence_key)

    def _start_watches(self, role: aws_iam.Role) -> None:
        things, stack = self._things, Stack.of(self)
        _let(role, ("states:StartExecution",), things.watch)
        _let(role, ("states:DescribeExecution", "states:StopExecution"), _executions(things.watch))
        its = stack.format_arn(service="events", resource=_ITS_RULE)
        _let(role, ("events:DescribeRule", "events:PutRule", "events:PutTargets"), its)

    def _seal(self, role: aws_iam.Role, service: str, key: str) -> None:
        """For what that service writes on the role's behalf."""
        via = {"StringEquals": {"kms:ViaService": f"{service}.{Stack.of(self).region}.amazonaws.com"}}
        _let(role, ("kms:Decrypt", "kms:GenerateDataKey"), key, only=via)


def _releasing(things: RolloutResources, fleet: str) -> list[aws_iam.PolicyStatement]:
    """What `nxpipe rollout` calls, beside the store. Who may start a machine moves no weight himself: of the record he
    writes the lock and what he asks for, and never which colour is stable.
    """
    item = {"ForAllValues:StringEquals": {"dynamodb:LeadingKeys": [fleet]}, "Null": {"dynamodb:LeadingKeys": "false"}}
    words = {
        "ForAllValues:StringEquals": {"dynamodb:LeadingKeys": [fleet], "dynamodb:Attributes": [KEY, *WRITABLE]},
        "Null": {"dynamodb:LeadingKeys": "false", "dynamodb:Attributes": "false"},
        "StringEqualsIfExists": {"dynamodb:ReturnValues": ["NONE", "UPDATED_OLD", "UPDATED_NEW"]},
    }
    start, watch = ["states:StartExecution"], ["states:DescribeStateMachine", "states:ListExecutions"]
    follow = ["states:DescribeExecution", "states:GetExecutionHistory"]
    reads = ["cloudwatch:GetMetricData", "elasticloadbalancing:DescribeRules"]
    return [
        aws_iam.PolicyStatement(actions=[*start, *watch], resources=[things.release]),
        aws_iam.PolicyStatement(actions=follow, resources=[_executions(things.release)]),
        aws_iam.PolicyStatement(actions=["dynamodb:GetItem"], resources=[things.table], conditions=item),
        aws_iam.PolicyStatement(actions=["dynamodb:UpdateItem"], resources=[things.table], conditions=words),
        aws_iam.PolicyStatement(actions=reads, resources=["*"]),
    ]


def _executions(machine: str) -> str:
    """All of one machine: AWS names them after it."""
    return f"{machine.replace(':stateMachine:', ':execution:')}:*"


def _let(
    role: aws_iam.Role, actions: Sequence[str], *resources: str, only: dict[str, dict[str, str]] | None = None
) -> None:
    role.add_to_principal_policy(
        aws_iam.PolicyStatement(actions=list(actions), resources=list(resources), conditions=only)
    )


_ENDED: Final = ["FAILED", "TIMED_OUT", "ABORTED"]


class RolloutStack(Stack):
    """Costs nothing while nothing is rolled out."""

    handle: RolloutHandle

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        fleet: ServingFleet,
        serve: ServeHandle,
        observe: ObserveHandle,
        store: StoreHandle,
        prefix: str,
        alarms: Sequence[str],
        **kwargs: Any,
    ) -> None:
        """`prefix` is where the store lies in its bucket; `alarms` end a rollout beside the fleet's own."""
        super().__init__(scope, id_, description=f"Rollouts of fleet {fleet.name} of {project}", **kwargs)
        self._name = f"{project}-{fleet.name}"
        self._fleet = _described(fleet, serve, (observe.release_bad[fleet.name].alarm_name, *alarms))
        self._table = self._make_table()
        folder = f"{prefix}rollouts/{fleet.name}/"
        things = self._things(observe, store, folder)
        roles = Roles(self, "Roles", things, fleet=fleet.name)
        self._add_machines(things, roles, store.bucket.bucket_name, folder)
        self._wake_the_watchdog(things)
        self.handle = RolloutHandle(fleet=fleet.name, machine=things.release, table=self._table)
        tag_project(self, project)
        CfnOutput(self, "MachineArn", value=things.release, description=f"Moves the traffic of {fleet.name}")
        releasing = roles.releasing.managed_policy_arn
        CfnOutput(self, "ReleasingPolicyArn", value=releasing, description=f"For whoever releases to {fleet.name}")

    def _things(self, observe: ObserveHandle, store: StoreHandle, folder: str) -> RolloutResources:
        """By names that are known before what they name is made: machines start one another."""
        return RolloutResources(
            rule=self._fleet.rule,
            groups=[self._group_arn(self._fleet.colours[colour].group) for colour in COLOURS],
            table=self._table.table_arn,
            judge=Judge(self, "Judge", name=f"{self._name}-judge").arn,
            evidence=store.bucket.arn_for_objects(f"{folder}*"),
            evidence_key=store.key.key_arn,
            topic=observe.topic.topic_arn,
            topic_key=observe.topic_key.key_arn,
            clock=self._arn("events", "rule", self._clock),
            release=self._machine_arn("rollout"),
            watch=self._machine_arn("watch"),
            watchdog=self._machine_arn("watchdog"),
        )

    def _add_machines(self, things: RolloutResources, roles: Roles, bucket: str, folder: str) -> None:
        means = MachineResources(
            judge=things.judge,
            watch=things.watch,
            clock=self._clock,
            topic=things.topic,
            bucket=bucket,
            folder=folder,
        )
        record = Record(self._table.table_name, self._fleet.name)
        self._machine("Watch", "watch", watch(self._fleet, record, means), roles.watch)
        self._machine("Watchdog", "watchdog", watchdog(self._fleet, record, means), roles.watchdog)
        self._machine("Release", "rollout", release(self._fleet, record, means), roles.release)

    @property
    def _clock(self) -> str:
        """The name of the rule that wakes the watchdog."""
        return f"{self._name}-watchdog"

    def _make_table(self) -> aws_dynamodb.Table:
        """One item. What it says matters while a rollout is under way; between two, the rule itself tells."""
        return aws_dynamodb.Table(
            self,
            "Record",
            table_name=f"{self._name}-rollout",
            partition_key=aws_dynamodb.Attribute(name=KEY, type=aws_dynamodb.AttributeType.STRING),
            billing_mode=aws_dynamodb.BillingMode.PAY_PER_REQUEST,
            point_in_time_recovery_specification=aws_dynamodb.PointInTimeRecoverySpecification(
                point_in_time_recovery_enabled=True
            ),
            removal_policy=RemovalPolicy.DESTROY,
        )

    def _machine(self, id_: str, what: str, definition: dict[str, Any], role: aws_iam.Role) -> None:
        """After its permissions, without which AWS refuses a machine that waits for another one."""
        made = aws_stepfunctions.CfnStateMachine(
            self,
            id_,
            state_machine_name=f"{self._name}-{what}",
            state_machine_type="STANDARD",
            definition_string=json.dumps(definition),  # CDK's own would leave out what is null
            role_arn=role.role_arn,
        )
        made.node.add_dependency(role.node.find_child("DefaultPolicy"))

    def _wake_the_watchdog(self, things: RolloutResources) -> None:
        """When an execution ends otherwise than it should; and once a minute while one is under way, for a word of its
        end can be lost. The clock stands still otherwise: it is started and stopped by rollouts.
        """
        role = aws_iam.Role(
            self,
            "Waker",
            description=f"Wakes the watchdog of {self._name}",
            path="/nxpipe/",
            assumed_by=own_account_service(self, "events"),
        )
        role.add_to_principal_policy(
            aws_iam.PolicyStatement(actions=["states:StartExecution"], resources=[things.watchdog])
        )
        target = aws_events.CfnRule.TargetProperty(id="watchdog", arn=things.watchdog, role_arn=role.role_arn)
        aws_events.CfnRule(
            self,
            "Ended",
            name=f"{self._name}-ended",
            description="A rollout that did not come to its own end",
            event_pattern={
                "source": ["aws.states"],
                "detail-type": ["Step Functions Execution Status Change"],
                "detail": {"status": _ENDED, "stateMachineArn": [things.release]},
            },
            targets=[target],
        )
        aws_events.CfnRule(
            self,
            "Clock",
            name=self._clock,
            description="While a rollout is under way",
            schedule_expression="rate(1 minute)",
            state="DISABLED",
            targets=[target],
        )

    def _arn(self, service: str, resource: str, name: str, separator: str = "/") -> str:
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}{separator}{name}"

    def _machine_arn(self, what: str) -> str:
        return self._arn("states", "stateMachine", f"{self._name}-{what}", ":")

    def _group_arn(self, name: str) -> str:
        """What stands before a name in the ARN is only known when the group is made."""
        return self._arn("autoscaling", "autoScalingGroup:*:autoScalingGroupName", name)


def _described(fleet: ServingFleet, serve: ServeHandle, alarms: tuple[str, ...]) -> Fleet:
    colours = {
        colour: TargetGroup(serve.groups[colour].ref, targets.target_group_arn, targets.target_group_full_name)
        for colour, targets in serve.target_groups.items()
    }
    return Fleet(
        name=fleet.name,
        rule=serve.rule.ref,
        balancer=serve.load_balancer.load_balancer_full_name,
        colours=colours,
        least=fleet.size.min,
        alarms=alarms,
    )
