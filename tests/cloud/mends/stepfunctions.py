"""State machines know the services by the names that AWS has for them, and run any number of times.

Definitions are in JSONPath: JSONata and variables would need an engine that the local AWS has not, and are refused.
"""

import json
import uuid
from collections.abc import Iterator
from typing import Any, Final

from moto.stepfunctions.parser.api import InvalidDefinition
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service import (
    state_task_service_aws_sdk as aws_sdk,
)
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service import StateTaskService
from moto.stepfunctions.parser.models import StepFunctionsParserBackend

from tests.cloud.mends._around import around

_SERVICES: Final = {
    "elasticloadbalancingv2": ("elbv2", "ElasticLoadBalancingV2"),
    "autoscaling": ("autoscaling", "AutoScaling"),
    "cloudwatch": ("cloudwatch", "CloudWatch"),
    "ec2": ("ec2", "Ec2"),
    "s3": ("s3", "S3"),
    "sns": ("sns", "Sns"),
    "sqs": ("sqs", "Sqs"),
    "ssm": ("ssm", "Ssm"),
    "lambda": ("lambda", "Lambda"),
    "batch": ("batch", "Batch"),
}


def mend() -> None:
    overrides = dict(StateTaskService._SERVICE_NAME_SFN_TO_BOTO_OVERRIDES)
    StateTaskService._SERVICE_NAME_SFN_TO_BOTO_OVERRIDES = {
        **overrides,
        **{name: client for name, (client, _) in _SERVICES.items()},
    }
    aws_sdk._SERVICE_ERROR_NAMES.update({name: error for name, (_, error) in _SERVICES.items()})
    around(StepFunctionsParserBackend, "start_execution", _start)
    for call in ("create_state_machine", "update_state_machine"):
        around(StepFunctionsParserBackend, call, _refuse_jsonata)


def _start(stock: Any, backend: Any, state_machine_arn: str, name: str | None = None, *rest: Any, **more: Any) -> Any:
    return stock(backend, state_machine_arn, name or str(uuid.uuid4()), *rest, **more)


def _refuse_jsonata(stock: Any, backend: Any, *args: Any, **given: Any) -> Any:
    for state in _states(json.loads(given.get("definition") or "{}")):
        if state.get("QueryLanguage", "JSONPath") != "JSONPath" or "Assign" in state:
            raise InvalidDefinition(message="the local AWS runs state machines in JSONPath, without variables, alone")
    return stock(backend, *args, **given)


def _states(machine: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The machine itself, and all that is in it, however deep."""
    yield machine
    inner = [machine[key] for key in ("ItemProcessor", "Iterator") if key in machine]
    for each in (*machine.get("States", {}).values(), *machine.get("Branches", ()), *inner):
        yield from _states(each)
