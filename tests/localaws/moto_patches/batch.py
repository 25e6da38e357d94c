"""Batch: its own service role, updates of environments, and descriptions with all fields of the request."""

from threading import Lock
from typing import Any, Final

from moto.batch.models import BatchBackend, JobDefinition, JobQueue
from moto.batch.responses import BatchResponse
from moto.iam.exceptions import NotFoundException
from moto.iam.models import SERVICE_NAME_CONVERSION

from tests.localaws.moto_patches._around import around

_ROLE: Final = "AWSServiceRoleForBatch"
_ONE_AT_A_TIME: Final = Lock()


def apply() -> None:
    SERVICE_NAME_CONVERSION["batch"] = "Batch"
    around(BatchBackend, "create_compute_environment", _create_environment)
    around(BatchBackend, "_validate_compute_resources", _validate)
    around(BatchBackend, "update_compute_environment", _update_environment)
    around(BatchResponse, "registerjobdefinition", _register)
    around(JobDefinition, "describe", _describe_definition)
    around(BatchResponse, "createjobqueue", _put_queue)
    around(BatchResponse, "updatejobqueue", _put_queue)
    around(JobQueue, "describe", _describe_queue)


def _create_environment(stock: Any, backend: BatchBackend, *, service_role: str | None, **settings: Any) -> Any:
    return stock(backend, service_role=service_role or _own_role(backend), **settings)


def _validate(stock: Any, backend: BatchBackend, resources: dict[str, Any]) -> None:
    """Accept an environment without security groups if its launch template names some; moto refuses it."""
    if "securityGroupIds" not in resources and "launchTemplate" in resources:
        vpc = backend.ec2_backend.get_subnet(resources["subnets"][0]).vpc_id
        group = backend.ec2_backend.get_security_group_from_name("default", vpc)
        resources = {**resources, "securityGroupIds": [group.id]}
    stock(backend, resources)


def _own_role(backend: BatchBackend) -> str:
    with _ONE_AT_A_TIME:  # stacks are deployed in parallel
        try:
            role = backend.iam_backend.get_role(_ROLE)
        except NotFoundException:
            role = backend.iam_backend.create_service_linked_role("batch.amazonaws.com", "", "")
    arn: str = role.arn
    return arn


def _update_environment(stock: Any, backend: BatchBackend, *, compute_resources: Any, **settings: Any) -> Any:
    result = stock(backend, compute_resources=compute_resources, **settings)
    environment = backend.get_compute_environment(settings["compute_environment_name"])
    if compute_resources and environment is not None:
        environment.compute_resources = {**(environment.compute_resources or {}), **compute_resources}
    return result


def _register(stock: Any, self: Any) -> Any:
    known = set(self.batch_backend._job_definitions)
    result = stock(self)
    for arn in set(self.batch_backend._job_definitions) - known:
        definition = self.batch_backend._job_definitions[arn]
        vars(definition)["scheduling_priority"] = self._get_param("schedulingPriority")
    return result


def _describe_definition(stock: Any, definition: JobDefinition) -> dict[str, Any]:
    more = {
        "nodeProperties": definition.node_properties,
        "schedulingPriority": vars(definition).get("scheduling_priority"),
    }
    return {**stock(definition), **{key: value for key, value in more.items() if value is not None}}


def _put_queue(stock: Any, self: Any) -> Any:
    result = stock(self)
    limits = self._get_param("jobStateTimeLimitActions")
    queue = self.batch_backend.get_job_queue(self._get_param("jobQueueName") or self._get_param("jobQueue"))
    if limits is not None:
        vars(queue)["limits"] = limits
    return result


def _describe_queue(stock: Any, queue: JobQueue) -> dict[str, Any]:
    return {**stock(queue), "jobStateTimeLimitActions": vars(queue).get("limits", [])}
