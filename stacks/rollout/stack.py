"""Rollout stack of one fleet: the judge function, the state machines, the record table, their IAM roles."""

import json
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aws_cdk import (
    CfnOutput,
    RemovalPolicy,
    Stack,
    aws_autoscaling,
    aws_dynamodb,
    aws_events,
    aws_iam,
    aws_lambda,
    aws_s3_assets,
    aws_stepfunctions,
)
from constructs import Construct

from nxpipe.pipeline.config import ServingFleet
from nxpipe.pipeline.config.load_balancer import TargetTracking
from nxpipe.stacks.handles import ObserveHandle, RolloutHandle, ServeHandle, StoreHandle
from nxpipe.stacks.iam import own_account_service, wait_for_permissions
from nxpipe.stacks.lint.launches import MINIMUM
from nxpipe.stacks.project import log_group, tag_project
from nxpipe.stacks.references import by_value, role_by_value
from nxpipe.stacks.rollout.fleet_record import COLOURS, KEY, WRITABLE, Fleet, Record, TargetGroup
from nxpipe.stacks.rollout.state_machine import MIRROR, MachineResources, release, watch, watchdog

_ROOT: Final = Path(__file__).parents[3]  # the folder that holds the package nxpipe
_PACKAGE: Final = "nxpipe/pipeline"
RUNTIME: Final = "python3.13"
_TIMESTAMP: Final = (1980, 1, 1, 0, 0, 0)


class Judge(Construct):
    """Lambda function that judges a rollout. Its role permits writing its log and nothing else."""

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
        function = aws_lambda.CfnFunction(
            self,
            "Function",
            function_name=name,
            description="Evaluates the request counts of a rollout",
            runtime=RUNTIME,
            architectures=["arm64"],
            handler="nxpipe.pipeline.canary.handler.handle",
            code=aws_lambda.CfnFunction.CodeProperty(s3_bucket=code.s3_bucket_name, s3_key=code.s3_object_key),
            role=role.role_arn,
            logging_config=aws_lambda.CfnFunction.LoggingConfigProperty(log_group=logs.log_group_name),
            memory_size=512,
            timeout=20,
        )
        wait_for_permissions(function, role)
        self.arn: str = function.attr_arn


def archive() -> Path:
    """Zip file of the function. Stored without compression, whose bytes differ between versions of zlib."""
    path = Path(tempfile.mkdtemp(), "judge.zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
        for source in [_ROOT / _PACKAGE / "__init__.py", *sorted((_ROOT / _PACKAGE / "canary").glob("*.py"))]:
            entry = zipfile.ZipInfo(str(source.relative_to(_ROOT)), _TIMESTAMP)
            entry.external_attr = 0o644 << 16
            packed.writestr(entry, source.read_bytes())
    return path


# Step Functions' own EventBridge rule, by which an execution that waits for another learns of its end.
_SYNC_RULE: Final = "rule/StepFunctionsGetEventsForStepFunctionsExecutionRule"


@dataclass(frozen=True)
class RolloutResources:
    """Resources that the state machines use, by ARN."""

    rule: str
    groups: Sequence[str]
    table: str
    judge: str
    evidence: str  # objects below one prefix
    evidence_key: str
    topic: str
    topic_key: str
    clock: str
    release: str  # machines
    watch: str
    watchdog: str
    mirror: str  # the object that states which requests are mirrored


class Roles(Construct):
    """One role per state machine, and a managed policy to attach to the roles of people and jobs that release."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        resources: RolloutResources,
        *,
        fleet: ServingFleet,
        shadow: bool,
        releasers: Sequence[aws_iam.IRole],
    ) -> None:
        super().__init__(scope, id_)
        self._resources, self._fleet = resources, fleet
        self.release, self.watch, self.watchdog = map(self._role, ("Release", "Watch", "Watchdog"))
        self._grant_traffic(self.release)
        _grant(self.release, ("autoscaling:SetDesiredCapacity",), *resources.groups)
        self._grant_judge(self.release)
        self._grant_watch(self.release)
        _grant(
            self.release, ("autoscaling:DescribeAutoScalingGroups", "elasticloadbalancing:DescribeTargetHealth"), "*"
        )
        _grant(self.release, ("cloudwatch:DescribeAlarms",), "*")
        self._grant_judge(self.watch)
        _grant(self.watch, ("dynamodb:GetItem",), resources.table)
        _grant(self.watch, ("cloudwatch:DescribeAlarms", "cloudwatch:GetMetricData"), "*")
        self._grant_traffic(self.watchdog)
        _grant(self.watchdog, ("elasticloadbalancing:DescribeTargetHealth",), "*")
        _grant(self.watchdog, ("states:DescribeExecution",), *map(_executions, (resources.release, resources.watchdog)))
        if shadow:
            self._grant_mirror()
        self.releasing = aws_iam.ManagedPolicy(
            self,
            "Releasing",
            description="Start, watch, pause, approve and end the rollouts of one fleet",
            path="/nxpipe/",
            roles=[role_by_value(self, role) for role in releasers],
            statements=_releasing(resources, fleet.name),
        )

    def _role(self, machine: str) -> aws_iam.Role:
        return aws_iam.Role(
            self,
            machine,
            description=f"{machine} of a rollout",
            path="/nxpipe/",
            assumed_by=own_account_service(self, "states"),
        )

    def _grant_traffic(self, role: aws_iam.Role) -> None:
        resources = self._resources
        _grant(role, ("elasticloadbalancing:ModifyRule",), resources.rule)
        _grant(role, ("elasticloadbalancing:DescribeRules",), "*")
        # Minimum and capacity only. A launch template would also need ec2:RunInstances, which the role lacks.
        minimum = ["0", str(self._fleet.size.min)] if self._fleet.scaling else "0"
        sizes: dict[str, dict[str, Any]] = {
            "NumericEquals": {"autoscaling:MinSize": minimum},
            "Null": {"autoscaling:MaxSize": "true"},
        }
        _grant(role, ("autoscaling:UpdateAutoScalingGroup",), *resources.groups, only=sizes)
        if self._fleet.scaling:
            _grant(role, ("autoscaling:ResumeProcesses", "autoscaling:SuspendProcesses"), *resources.groups)
        _grant(role, ("dynamodb:GetItem", "dynamodb:UpdateItem"), resources.table)
        _grant(role, ("events:EnableRule", "events:DisableRule"), resources.clock)
        _grant(role, ("sns:Publish",), resources.topic)
        self._grant_key(role, "sns", resources.topic_key, "kms:Decrypt", "kms:GenerateDataKey")

    def _grant_mirror(self) -> None:
        """Permit the rollout to find the candidate's instances; and the watchdog to end what it has mirrored, which
        the rollout may write with its evidence.
        """
        _grant(self.release, ("ec2:DescribeInstances",), "*")
        _grant(self.watchdog, ("s3:PutObject",), self._resources.mirror)
        self._grant_key(self.watchdog, "s3", self._resources.evidence_key, "kms:GenerateDataKey")

    def _grant_judge(self, role: aws_iam.Role) -> None:
        _grant(role, ("lambda:InvokeFunction",), self._resources.judge)
        _grant(role, ("s3:PutObject",), self._resources.evidence)
        self._grant_key(role, "s3", self._resources.evidence_key, "kms:GenerateDataKey")

    def _grant_watch(self, role: aws_iam.Role) -> None:
        resources, stack = self._resources, Stack.of(self)
        _grant(role, ("states:StartExecution",), resources.watch)
        _grant(role, ("states:DescribeExecution", "states:StopExecution"), _executions(resources.watch))
        sync_rule = stack.format_arn(service="events", resource=_SYNC_RULE)
        _grant(role, ("events:DescribeRule", "events:PutRule", "events:PutTargets"), sync_rule)

    def _grant_key(self, role: aws_iam.Role, service: str, key: str, *actions: str) -> None:
        """Permit use of the key by a service on the role's behalf."""
        via = {"StringEquals": {"kms:ViaService": f"{service}.{Stack.of(self).region}.amazonaws.com"}}
        _grant(role, actions, key, only=via)


def _releasing(resources: RolloutResources, fleet: str) -> list[aws_iam.PolicyStatement]:
    """Statements for the calls of `nxpipe rollout`, without those for the store.

    They permit no change of weights. Of the record they permit writes of the lock and of signals, not of `stable`.
    """
    item = {"ForAllValues:StringEquals": {"dynamodb:LeadingKeys": [fleet]}, "Null": {"dynamodb:LeadingKeys": "false"}}
    writable = {
        "ForAllValues:StringEquals": {"dynamodb:LeadingKeys": [fleet], "dynamodb:Attributes": [KEY, *WRITABLE]},
        "Null": {"dynamodb:LeadingKeys": "false", "dynamodb:Attributes": "false"},
        "StringEqualsIfExists": {"dynamodb:ReturnValues": ["NONE", "UPDATED_OLD", "UPDATED_NEW"]},
    }
    start, watch = ["states:StartExecution"], ["states:DescribeStateMachine", "states:ListExecutions"]
    follow = ["states:DescribeExecution", "states:GetExecutionHistory"]
    reads = ["cloudwatch:GetMetricData", "elasticloadbalancing:DescribeRules"]
    return [
        aws_iam.PolicyStatement(actions=[*start, *watch], resources=[resources.release]),
        aws_iam.PolicyStatement(actions=follow, resources=[_executions(resources.release)]),
        aws_iam.PolicyStatement(actions=["dynamodb:GetItem"], resources=[resources.table], conditions=item),
        aws_iam.PolicyStatement(actions=["dynamodb:UpdateItem"], resources=[resources.table], conditions=writable),
        aws_iam.PolicyStatement(actions=reads, resources=["*"]),
    ]


def _executions(machine: str) -> str:
    """ARN pattern of all executions of a state machine."""
    return f"{machine.replace(':stateMachine:', ':execution:')}:*"


def _grant(
    role: aws_iam.Role, actions: Sequence[str], *resources: str, only: dict[str, dict[str, Any]] | None = None
) -> None:
    role.add_to_principal_policy(
        aws_iam.PolicyStatement(actions=list(actions), resources=list(resources), conditions=only)
    )


_ENDED: Final = ["FAILED", "TIMED_OUT", "ABORTED"]


class RolloutStack(Stack):
    """State machines, judge, record table and watchdog of one fleet. Without a rollout it costs nothing."""

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
        shadow: bool = False,
        releasers: Sequence[aws_iam.IRole] = (),
        **kwargs: Any,
    ) -> None:
        """`prefix` is the store's key prefix in the bucket. `alarms` end a rollout, in addition to the fleet's own.

        With `shadow`, rollouts may begin with a shadow phase. `releasers` are roles that get the permission to release
        to the fleet.
        """
        super().__init__(scope, id_, description=f"Rollouts of fleet {fleet.name} of {project}", **kwargs)
        self._name = f"{project}-{fleet.name}"
        bad = by_value(self, observe.release_bad[fleet.name].alarm_name)
        dimensions = {"Project": project, "Fleet": fleet.name} if shadow else None
        self._fleet = self._fleet_of(fleet, serve, (bad, *alarms), dimensions)
        self._table = self._make_table()
        folder = f"{prefix}rollouts/{fleet.name}/"
        resources = self._resources(observe, store, folder)
        roles = Roles(self, "Roles", resources, fleet=fleet, shadow=shadow, releasers=releasers)
        machines = self._add_machines(resources, roles, store.bucket.bucket_name, folder)
        policies = [self._add_scaling(colour, fleet.scaling) for colour in COLOURS] if fleet.scaling else []
        clock = self._add_watchdog_rules(resources, _sizes(fleet))
        for settled in (*machines, *policies) if fleet.scaling else ():
            clock.node.add_dependency(settled)  # it starts the watchdog that settles them
        self.handle = RolloutHandle(fleet=fleet.name, machine=resources.release, table=self._table)
        tag_project(self, project)
        CfnOutput(self, "MachineArn", value=resources.release, description=f"State machine of rollouts to {fleet.name}")
        releasing = roles.releasing.managed_policy_arn
        CfnOutput(
            self,
            "ReleasingPolicyArn",
            value=releasing,
            description=f"Policy for principals that release to {fleet.name}",
        )

    def _resources(self, observe: ObserveHandle, store: StoreHandle, folder: str) -> RolloutResources:
        """ARNs built from names, because the state machines reference one another."""
        return RolloutResources(
            rule=self._fleet.rule,
            groups=[self._group_arn(self._fleet.colours[colour].group) for colour in COLOURS],
            table=self._table.table_arn,
            judge=Judge(self, "Judge", name=f"{self._name}-judge").arn,
            evidence=store.bucket.arn_for_objects(f"{folder}*"),
            evidence_key=store.key.key_arn,
            topic=by_value(self, observe.topic.topic_arn),
            topic_key=by_value(self, observe.topic_key.key_arn),
            clock=self._arn("events", "rule", self._clock),
            release=self._machine_arn("rollout"),
            watch=self._machine_arn("watch"),
            watchdog=self._machine_arn("watchdog"),
            mirror=store.bucket.arn_for_objects(f"{folder}{MIRROR}"),
        )

    def _add_scaling(self, colour: str, scaling: TargetTracking) -> aws_autoscaling.CfnScalingPolicy:
        """Target tracking of one environment. Both have a policy; the watchdog and rollouts settle which one acts."""
        policy, target = aws_autoscaling.CfnScalingPolicy, self._fleet.colours[colour]
        made = policy(
            self,
            f"Scaling-{colour}",
            auto_scaling_group_name=f"{self._name}-{colour}",  # create-only, so it names no parameter
            policy_type="TargetTrackingScaling",
            estimated_instance_warmup=int(scaling.warm_up.total_seconds()),
            target_tracking_configuration=policy.TargetTrackingConfigurationProperty(
                predefined_metric_specification=policy.PredefinedMetricSpecificationProperty(
                    predefined_metric_type="ALBRequestCountPerTarget",
                    resource_label=f"{self._fleet.balancer}/{target.series}",
                ),
                target_value=scaling.requests_per_target,
                disable_scale_in=not scaling.scale_in,
            ),
        )
        made.add_metadata(MINIMUM, self._fleet.least)  # the template's minimum is 0; the estimate of costs needs it
        return made

    def _add_machines(
        self, resources: RolloutResources, roles: Roles, bucket: str, folder: str
    ) -> list[aws_stepfunctions.CfnStateMachine]:
        machine_resources = MachineResources(
            judge=resources.judge,
            watch=resources.watch,
            clock=self._clock,
            topic=resources.topic,
            bucket=bucket,
            folder=folder,
        )
        record = Record(self._table.table_name, self._fleet.name)
        return [
            self._machine("Watch", "watch", watch(self._fleet, record, machine_resources), roles.watch),
            self._machine("Watchdog", "watchdog", watchdog(self._fleet, record, machine_resources), roles.watchdog),
            self._machine("Release", "rollout", release(self._fleet, record, machine_resources), roles.release),
        ]

    @property
    def _clock(self) -> str:
        """The name of the schedule that starts the watchdog."""
        return f"{self._name}-watchdog"

    def _make_table(self) -> aws_dynamodb.Table:
        """Table with one item, used during a rollout only; otherwise the listener rule has the whole state."""
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

    def _machine(
        self, id_: str, suffix: str, definition: dict[str, Any], role: aws_iam.Role
    ) -> aws_stepfunctions.CfnStateMachine:
        """Create a state machine after its role's policy, which AWS checks for machines that wait for another one."""
        machine = aws_stepfunctions.CfnStateMachine(
            self,
            id_,
            state_machine_name=f"{self._name}-{suffix}",
            state_machine_type="STANDARD",
            definition_string=json.dumps(definition),  # CDK's serialization drops null values
            role_arn=role.role_arn,
        )
        wait_for_permissions(machine, role)
        return machine

    def _add_watchdog_rules(self, resources: RolloutResources, sizes: str) -> aws_events.CfnRule:
        """Start the watchdog when an execution fails, and once a minute during a rollout, because events can be lost.

        Rollouts enable and disable the schedule. The schedule's description has the sizes of a fleet that scales, so a
        deployment that changes them enables it: the watchdog then sets the group's minimum.
        """
        role = aws_iam.Role(
            self,
            "Waker",
            description=f"Wakes the watchdog of {self._name}",
            path="/nxpipe/",
            assumed_by=own_account_service(self, "events"),
        )
        role.add_to_principal_policy(
            aws_iam.PolicyStatement(actions=["states:StartExecution"], resources=[resources.watchdog])
        )
        target = aws_events.CfnRule.TargetProperty(id="watchdog", arn=resources.watchdog, role_arn=role.role_arn)
        ended = aws_events.CfnRule(
            self,
            "Ended",
            name=f"{self._name}-ended",
            description="Executions of a rollout that failed, timed out or were stopped",
            event_pattern={
                "source": ["aws.states"],
                "detail-type": ["Step Functions Execution Status Change"],
                "detail": {"status": _ENDED, "stateMachineArn": [resources.release]},
            },
            targets=[target],
        )
        clock = aws_events.CfnRule(
            self,
            "Clock",
            name=self._clock,
            description=f"Starts the watchdog once a minute during a rollout{sizes}",
            schedule_expression="rate(1 minute)",
            # Rollouts and the watchdog switch it. A deployment that changes this rule sets the state again, so it must
            # be the safe one: without a rollout the watchdog switches the clock off within a minute.
            state="ENABLED",
            targets=[target],
        )
        for rule in (ended, clock):
            wait_for_permissions(rule, role)
        return clock

    def _arn(self, service: str, resource: str, name: str, separator: str = "/") -> str:
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}{separator}{name}"

    def _machine_arn(self, suffix: str) -> str:
        return self._arn("states", "stateMachine", f"{self._name}-{suffix}", ":")

    def _group_arn(self, name: str) -> str:
        """ARN pattern of a group: its UUID is unknown before the group exists."""
        return self._arn("autoscaling", "autoScalingGroup:*:autoScalingGroupName", name)

    def _fleet_of(
        self, fleet: ServingFleet, serve: ServeHandle, alarms: tuple[str, ...], shadow: Mapping[str, str] | None
    ) -> Fleet:
        colours = {
            colour: TargetGroup(
                by_value(self, serve.groups[colour].ref),
                by_value(self, targets.target_group_arn),
                by_value(self, targets.target_group_full_name),
            )
            for colour, targets in serve.target_groups.items()
        }
        return Fleet(
            name=fleet.name,
            rule=by_value(self, serve.rule.ref),
            balancer=by_value(self, serve.load_balancer.load_balancer_full_name),
            colours=colours,
            least=fleet.size.min,
            alarms=alarms,
            idle_timeout=int(fleet.idle_timeout.total_seconds()),
            draining=int(fleet.draining.total_seconds()),
            scaling=fleet.scaling is not None,
            shadow=shadow,
        )


def _sizes(fleet: ServingFleet) -> str:
    if fleet.scaling is None:
        return ""
    return f" and after changes of scaling ({fleet.size.min} to {fleet.size.max} instances)"
