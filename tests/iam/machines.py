"""Calls that AWS's services make with a role, read off the templates: state machines, rules, functions, instances."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tests.iam.calls import Call, group_arn, of_operation
from tests.iam.templates import ACCOUNT, REGION, Role, Templates

_HERE: Final = f"{REGION}:{ACCOUNT}"
_SERVICES: Final = {
    "autoscaling": "autoscaling",
    "cloudwatch": "cloudwatch",
    "dynamodb": "dynamodb",
    "elasticloadbalancingv2": "elasticloadbalancing",
    "eventbridge": "events",
    "s3": "s3",
    "sfn": "states",
    "sns": "sns",
}
_SIZES: Final = ("MinSize", "MaxSize")  # condition keys of UpdateAutoScalingGroup
_SYNC_RULE: Final = f"arn:aws:events:{_HERE}:rule/StepFunctionsGetEventsForStepFunctionsExecutionRule"


def executions(machine: str, name: str = "an-execution") -> str:
    return f"{machine.replace(':stateMachine:', ':execution:')}:{name}"


def _role_named(templates: Templates, arn: str) -> Role:
    (role,) = (role for role in templates.roles.values() if role.principal.id == arn)
    return role


def calls_of_machines(templates: Templates, stack: str) -> Iterator[tuple[str, Role, set[Call]]]:
    """Each state machine of a rollout: its logical id, its role, and the calls of all its states."""
    for at, id_, properties in templates.resources("AWS::StepFunctions::StateMachine"):
        if at == stack:
            definition = json.loads(templates.resolve(stack, properties["DefinitionString"]))
            role = _role_named(templates, templates.resolve(stack, properties["RoleArn"]))
            machine = Machine(templates, stack)
            calls = {
                call
                for state in definition["States"].values()
                if state["Type"] == "Task"
                for call in machine.calls(state["Resource"], state["Parameters"])
            }
            yield id_, role, calls


class Machine:
    """The calls of Task states. A value that a rollout computes stands for all that it can be."""

    def __init__(self, templates: Templates, stack: str) -> None:
        self._groups = [f"demo-search-{colour}" for colour in ("blue", "green")]
        by_id = {
            id_: templates.arn(stack, id_)
            for at, id_, _ in templates.resources("AWS::StepFunctions::StateMachine")
            if at == stack
        }
        self._owners = [by_id["Release"], by_id["Watchdog"]]  # of the record's lock
        self._store_key = templates.arn("demo-storage", templates.find("AWS::KMS::Key", "demo-storage"))
        self._topic_key = templates.arn("demo-observe", templates.find("AWS::KMS::Key", "demo-observe"))

    def calls(self, resource: str, parameters: Mapping[str, Any]) -> Iterator[Call]:
        integration = resource.removeprefix("arn:aws:states:::")
        if integration == "lambda:invoke":
            yield Call.of("lambda:InvokeFunction", parameters["FunctionName"])
        elif integration == "states:startExecution.sync:2":
            yield from self._nested(parameters["StateMachineArn"])
        else:
            sdk, name, operation = integration.split(":")
            assert sdk == "aws-sdk", resource
            yield from self._sdk_call(_SERVICES[name], operation[0].upper() + operation[1:], parameters)

    def _nested(self, machine: str) -> Iterator[Call]:
        """What Step Functions needs to wait for another machine."""
        yield Call.of("states:StartExecution", machine)
        for operation in ("DescribeExecution", "StopExecution"):
            yield Call.of(f"states:{operation}", executions(machine))
        for operation in ("DescribeRule", "PutRule", "PutTargets"):
            yield Call.of(f"events:{operation}", _SYNC_RULE)

    def _sdk_call(self, service: str, operation: str, parameters: Mapping[str, Any]) -> Iterator[Call]:
        action = f"{service}:{operation}"
        if operation.startswith("Describe") and service != "states":
            yield Call.of(action, "*")
        elif service == "autoscaling":
            given = parameters.get("AutoScalingGroupName")
            sizes = {f"autoscaling:{name}": str(parameters[name]) for name in _SIZES if name in parameters}
            for group in [given] if given else self._groups:
                yield Call.of(action, group_arn(group), sizes)
        elif service == "elasticloadbalancing":
            yield Call.of(action, parameters["RuleArn"])
        elif service == "events":
            yield Call.of(action, f"arn:aws:events:{_HERE}:rule/{parameters['Name']}")
        elif service == "sns":
            yield Call.of(action, parameters["TopicArn"], {"aws:SecureTransport": "true"})
            yield from _with_key(self._topic_key, "sns", "Decrypt", "GenerateDataKey")
        elif service == "s3":
            form = re.search(r"'(.*?)'", parameters["Key.$"])
            assert form
            key = form[1].replace("{}", "a-rollout/0/000001.json")
            transport = {"aws:SecureTransport": "true", "s3:TlsVersion": "1.3"}
            yield Call.of(action, f"arn:aws:s3:::{parameters['Bucket']}/{key}", transport)
            yield from _with_key(self._store_key, "s3", "GenerateDataKey")
        elif action == "states:DescribeExecution":
            for owner in self._owners:
                yield Call.of(action, executions(owner))
        else:
            yield of_operation(service, operation, parameters)


def _with_key(key: str, service: str, *operations: str) -> Iterator[Call]:
    for operation in operations:
        yield Call.of(f"kms:{operation}", key, {"kms:ViaService": f"{service}.{REGION}.amazonaws.com"})


def calls_of_rules(templates: Templates, stack: str) -> Iterator[tuple[str, Role, set[Call]]]:
    """EventBridge rules that start a state machine or publish to a topic, with a role."""
    for at, id_, properties in templates.resources("AWS::Events::Rule"):
        if at == stack:
            for target in templates.resolve(stack, properties["Targets"]):
                if "RoleArn" in target:
                    yield id_, _role_named(templates, target["RoleArn"]), _invoked(templates, target["Arn"])


def _invoked(templates: Templates, target: str) -> set[Call]:
    if target.split(":")[2] == "states":
        return {Call.of("states:StartExecution", target)}
    assert target.split(":")[2] == "sns", target
    key = templates.arn("demo-observe", templates.find("AWS::KMS::Key", "demo-observe"))
    published = Call.of("sns:Publish", target, {"aws:SecureTransport": "true"})
    return {published, *_with_key(key, "sns", "Decrypt", "GenerateDataKey")}


# The parameter that names the resource of a call that a schedule makes.
_SCHEDULED: Final = {
    "batch:UpdateComputeEnvironment": "ComputeEnvironment",
    "batch:UpdateJobQueue": "JobQueue",
}


def calls_of_schedules(templates: Templates, stack: str) -> Iterator[tuple[str, Role, set[Call]]]:
    """Calls that EventBridge Scheduler makes at the beginning and the end of a capacity block."""
    for at, id_, properties in templates.resources("AWS::Scheduler::Schedule"):
        if at == stack:
            target = templates.resolve(stack, properties["Target"])
            service, operation = target["Arn"].rpartition("aws-sdk:")[2].split(":")
            action, given = f"{service}:{operation[0].upper()}{operation[1:]}", json.loads(target["Input"])
            if action == "eks:UpdateNodegroupConfig":
                resource = f"arn:aws:eks:{_HERE}:nodegroup/{given['ClusterName']}/{given['NodegroupName']}/0a1b2c3d"
            else:
                resource = given[_SCHEDULED[action]]
            yield id_, _role_named(templates, target["RoleArn"]), {Call.of(action, resource)}


def calls_of_functions(templates: Templates, stack: str) -> Iterator[tuple[str, Role, set[Call]]]:
    """Lambda writes the function's log with the function's role."""
    for at, id_, properties in templates.resources("AWS::Lambda::Function"):
        if at == stack:
            log = templates.resolve(stack, properties["LoggingConfig"]["LogGroup"])
            stream = f"arn:aws:logs:{_HERE}:log-group:{log}:log-stream:2026/01/01/1"
            role = _role_named(templates, templates.resolve(stack, properties["Role"]))
            yield id_, role, {Call.of(f"logs:{operation}", stream) for operation in ("CreateLogStream", "PutLogEvents")}


# SSM Agent registers its instance and opens the channels of sessions; AWS documents these permissions for all resources
SESSIONS: Final = frozenset(
    {
        Call.of("ssm:UpdateInstanceInformation", "*"),
        *(
            Call.of(f"ssmmessages:{operation}{kind}Channel", "*")
            for operation in ("Create", "Open")
            for kind in ("Control", "Data")
        ),
    }
)


def _boot_log(text: str) -> Iterator[Call]:
    """The log of a boot that fails."""
    (log,) = shlex.split(*re.findall(r"^LOG=(.+)$", text, re.MULTILINE))
    for command in re.findall(r"aws logs ([a-z-]+)", text):
        operation = "".join(map(str.capitalize, command.split("-")))
        yield Call.of(f"logs:{operation}", f"arn:aws:logs:{_HERE}:log-group:{log}:log-stream:i-1/boot")


def _downloads(templates: Templates, bucket: str, key: str) -> set[Call]:
    """HeadObject and GetObject, of one object of the store."""
    store = templates.arn("demo-storage", templates.find("AWS::KMS::Key", "demo-storage"))
    transport = {"aws:SecureTransport": "true", "s3:TlsVersion": "1.3"}
    return {Call.of("s3:GetObject", f"arn:aws:s3:::{bucket}/{key}", transport), *_with_key(store, "s3", "Decrypt")}


def calls_of_training_user_data(templates: Templates, stack: str) -> set[Call]:
    """What the first boot of a training host calls: the installer of EFA, if the fleet uses it, and its log."""
    text = "\n".join(
        str(templates.resolve(stack, properties["LaunchTemplateData"].get("UserData", "")))
        for at, _, properties in templates.resources("AWS::EC2::LaunchTemplate")
        if at == stack
    )
    found = set(re.findall(r"s3://([^/\s'\"]+)/([\w./-]+)", text))
    downloads = {call for bucket, key in found for call in _downloads(templates, bucket, key)}
    return downloads | (set(_boot_log(text)) if "aws logs" in text else set())


def calls_of_user_data(templates: Templates, stack: str) -> set[Call]:
    """What the first boot of an instance does by the `aws` command and by mounting, before it has an agent."""
    (text,) = (
        str(templates.resolve(stack, properties["LaunchTemplateData"]["UserData"]))
        for at, id_, properties in templates.resources("AWS::EC2::LaunchTemplate")
        if at == stack and id_.startswith("Template")
    )
    bundle = re.search(r"s3://([^/\s'\"]+)/(\S*agents/[0-9a-f]{64}\.tar)", text)
    assert bundle, text
    calls = _downloads(templates, *bundle.groups()) | set(_boot_log(text))
    for at, id_, _ in templates.resources("AWS::EFS::FileSystem"):
        for _, point, _ in templates.resources("AWS::EFS::AccessPoint"):
            if templates.name(at, id_) in text and templates.name(at, point) in text:
                context = {
                    "elasticfilesystem:AccessPointArn": templates.arn(at, point),
                    "elasticfilesystem:AccessedViaMountTarget": "true",
                    "aws:SecureTransport": "true",
                }
                calls |= {
                    Call.of(f"elasticfilesystem:{operation}", templates.arn(at, id_), context)
                    for operation in ("ClientMount", "ClientWrite")
                }
    return calls
