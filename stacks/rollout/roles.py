"""What each machine may do. Whatever changes something names it; where AWS has no names for what is read, it is `*`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aws_cdk import Stack, aws_iam
from constructs import Construct

from nxpipe.stacks.rollout.record import ASKED, KEY
from nxpipe.stacks.trust import for_us

# By this rule of its own Step Functions hears that an execution has ended for which another one waits.
_ITS_RULE: Final = "rule/StepFunctionsGetEventsForStepFunctionsExecutionRule"


@dataclass(frozen=True)
class Things:
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

    def __init__(self, scope: Construct, id_: str, things: Things, *, fleet: str) -> None:
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
            assumed_by=for_us(self, "states"),
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


def _releasing(things: Things, fleet: str) -> list[aws_iam.PolicyStatement]:
    """What `nxpipe rollout` calls, beside the store. Who may start a machine moves no weight himself: of the record he
    writes the lock and what he asks for, and never which colour is stable.
    """
    item = {"ForAllValues:StringEquals": {"dynamodb:LeadingKeys": [fleet]}, "Null": {"dynamodb:LeadingKeys": "false"}}
    words = {
        "ForAllValues:StringEquals": {"dynamodb:LeadingKeys": [fleet], "dynamodb:Attributes": [KEY, *ASKED]},
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
