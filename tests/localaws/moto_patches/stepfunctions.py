"""Step Functions: service names as on AWS, any number of executions, and events at the end of an execution.

Definitions use JSONPath: JSONata and variables need an engine that the local AWS does not have, and are refused.
"""

import json
import re
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any, Final

from jsonpath_ng.ext.parser import parse
from moto.events.models import events_backends
from moto.stepfunctions.parser.api import InvalidDefinition
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service import (
    state_task_service_aws_sdk as aws_sdk,
)
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service import StateTaskService
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service_callback import (
    StateTaskServiceCallback,
)
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service.state_task_service_sfn import (
    StateTaskServiceSfn,
)
from moto.stepfunctions.parser.asl.utils import json_path
from moto.stepfunctions.parser.asl.utils.json_path import NoSuchJsonPathError
from moto.stepfunctions.parser.backend.execution import BaseExecutionWorkerCommunication
from moto.stepfunctions.parser.backend.execution_worker import ExecutionWorker
from moto.stepfunctions.parser.models import StepFunctionsParserBackend

from tests.localaws.formation.provider import client_of
from tests.localaws.moto_patches._around import around

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
    "eventbridge": ("events", "EventBridge"),
}
# Paths with several possible matches. Their result is a list, which may be empty; that of other paths is one value.
_SEVERAL: Final = re.compile(r"\[\?|\[\*|\.\.|\.\*|\[-?\d*:|,")


def apply() -> None:
    overrides = dict(StateTaskService._SERVICE_NAME_SFN_TO_BOTO_OVERRIDES)
    StateTaskService._SERVICE_NAME_SFN_TO_BOTO_OVERRIDES = {
        **overrides,
        **{name: client for name, (client, _) in _SERVICES.items()},
    }
    aws_sdk._SERVICE_ERROR_NAMES.update({name: error for name, (_, error) in _SERVICES.items()})
    around(ExecutionWorker, "stop", _stop_once_begun)
    around(StepFunctionsParserBackend, "start_execution", _start)
    for call in ("create_state_machine", "update_state_machine"):
        around(StepFunctionsParserBackend, call, _refuse_jsonata)
    for kind in (aws_sdk.StateTaskServiceAwsSdk, StateTaskServiceSfn):
        around(kind, "_normalise_parameters", _encode_request)
        around(kind, "_normalise_response", _decode_response)
    around(StateTaskServiceCallback, "_eval_sync", _wait)
    around(BaseExecutionWorkerCommunication, "terminated", _publish_end)
    stock = json_path.extract_json
    for module in [*sys.modules.values()]:
        if getattr(module, "extract_json", None) is stock:
            module.extract_json = _extract  # type: ignore[attr-defined]
    json_path._contains_slice_or_wildcard_array = lambda path: bool(_SEVERAL.search(path))
    json_path._is_singleton_array_access = lambda path: not _SEVERAL.search(path)


def _extract(path: str, data: Any) -> Any:
    """The value at a path. Moto unpacks the only match of a filter if the path goes on behind it."""
    matches = parse(path).find(data)
    if _SEVERAL.search(path):
        return [match.value for match in matches]
    if not matches:
        raise NoSuchJsonPathError(json_path=path, data=data)
    return matches[0].value


def _stop_once_begun(stock: Any, worker: ExecutionWorker, *args: Any, **given: Any) -> None:
    """The thread of an execution that has just started makes its environment first."""
    deadline = time.monotonic() + 30
    while worker.env is None and time.monotonic() < deadline:
        time.sleep(0.01)
    stock(worker, *args, **given)


def _start(stock: Any, backend: Any, state_machine_arn: str, name: str | None = None, *args: Any, **more: Any) -> Any:
    return stock(backend, state_machine_arn, name or str(uuid.uuid4()), *args, **more)


def _encode_request(_stock: Any, task: Any, parameters: dict[str, Any], *names: str | None, **more: str | None) -> None:
    """The request with the member names of the service; blob members are the JSON of the state."""
    if isinstance(task, StateTaskServiceSfn) and not isinstance(parameters.get("Input", ""), str):
        parameters["Input"] = json.dumps(parameters["Input"])
    shape = _operation(task, *names, **more).input_shape
    spelled = _to_service(parameters, shape) if shape else parameters
    parameters.clear()
    parameters.update(spelled)


def _decode_response(_stock: Any, task: Any, response: Any, *names: str | None, **more: str | None) -> None:
    """The response with capitalised member names."""
    shape = _operation(task, *names, **more).output_shape
    if shape and isinstance(response, dict):
        spelled = _to_machine(response, shape)
        response.clear()
        response.update(spelled)


def _operation(task: Any, boto_service_name: str | None = None, service_action_name: str | None = None) -> Any:
    client = client_of(task._get_boto_service_name(boto_service_name), "us-east-1")
    call = client.meta.method_to_api_mapping[task._get_boto_service_action(service_action_name)]
    return client.meta.service_model.operation_model(call)


def _to_service(value: Any, shape: Any) -> Any:
    if shape.type_name == "structure" and isinstance(value, dict):
        members = {name[:1].upper() + name[1:]: name for name in shape.members}
        named = {members.get(name[:1].upper() + name[1:], name): item for name, item in value.items()}
        return {
            name: _to_service(item, shape.members[name]) if name in shape.members else item
            for name, item in named.items()
        }
    if shape.type_name == "list" and isinstance(value, list):
        return [_to_service(entry, shape.member) for entry in value]
    if shape.type_name == "map" and isinstance(value, dict):
        return {name: _to_service(item, shape.value) for name, item in value.items()}
    return json.dumps(value, separators=(",", ":")).encode() if shape.type_name == "blob" else value


def _to_machine(value: Any, shape: Any) -> Any:
    if shape.type_name == "structure" and isinstance(value, dict):
        return {
            name[:1].upper() + name[1:]: _to_machine(item, shape.members[name]) if name in shape.members else item
            for name, item in value.items()
        }
    if shape.type_name == "list" and isinstance(value, list):
        return [_to_machine(entry, shape.member) for entry in value]
    if shape.type_name == "map" and isinstance(value, dict):
        return {name: _to_machine(item, shape.value) for name, item in value.items()}
    return value.read().decode() if hasattr(value, "read") else value


def _wait(stock: Any, task: Any, env: Any, **more: Any) -> Any:
    """Do not wait in a stopped execution: moto does not compute the duration, and would pass on an unrelated value."""
    return stock(task, env=env, **more) if env.is_running() else None


def _publish_end(stock: Any, execution_ends: BaseExecutionWorkerCommunication) -> None:
    """Publish the end of an execution on the account's bus; synchronously, because the test may end soon."""
    stock(execution_ends)
    ended = execution_ends.execution
    detail = {
        "executionArn": ended.exec_arn,
        "stateMachineArn": ended.state_machine.arn,
        "name": ended.name,
        "status": ended.exec_status.value,
    }
    event = {
        "Source": "aws.states",
        "DetailType": "Step Functions Execution Status Change",
        "Detail": json.dumps(detail),
        "Resources": [ended.exec_arn],
    }
    events_backends[ended.account_id][ended.region_name].put_events([event])


def _refuse_jsonata(stock: Any, backend: Any, *args: Any, **arguments: Any) -> Any:
    for state in _states(json.loads(arguments.get("definition") or "{}")):
        if state.get("QueryLanguage", "JSONPath") != "JSONPath" or "Assign" in state:
            raise InvalidDefinition(message="the local AWS runs only state machines in JSONPath, without variables")
    return stock(backend, *args, **arguments)


def _states(machine: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The machine itself and all states in it, nested ones included."""
    yield machine
    inner = [machine[key] for key in ("ItemProcessor", "Iterator") if key in machine]
    for state in (*machine.get("States", {}).values(), *machine.get("Branches", ()), *inner):
        yield from _states(state)
