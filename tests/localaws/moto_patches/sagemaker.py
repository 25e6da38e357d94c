"""SageMaker: endpoints on any instance type, network isolation of models, endpoint updates, one value for each tag."""

from typing import Any

from moto.core.responses import ActionResult
from moto.sagemaker.exceptions import ValidationError
from moto.sagemaker.models import FakeEndpoint, FakeEndpointConfig, Model, SageMakerModelBackend
from moto.sagemaker.responses import SageMakerResponse

from tests.localaws.moto_patches._around import around


def apply() -> None:
    around(SageMakerModelBackend, "add_tags", _add_tags)
    around(FakeEndpointConfig, "validate_instance_type", _any_instance)
    around(SageMakerResponse, "create_model", _create_model)
    around(SageMakerResponse, "describe_model", _describe_model)
    SageMakerResponse.update_endpoint = update_endpoint


def _any_instance(_stock: Any, _config: FakeEndpointConfig, instance_type: str) -> None:
    if not instance_type.startswith("ml."):
        raise ValidationError(message=f"Value '{instance_type}' at 'instanceType' failed to satisfy constraint")


def _add_tags(stock: Any, self: SageMakerModelBackend, arn: str, tags: list[dict[str, str]]) -> list[dict[str, str]]:
    self.delete_tags(arn, [tag["Key"] for tag in tags])
    added: list[dict[str, str]] = stock(self, arn, tags)
    return added


def _create_model(stock: Any, self: Any) -> Any:
    result = stock(self)
    model: Model = self.sagemaker_backend.describe_model(self._get_param("ModelName"))
    vars(model)["network_isolation"] = self._get_param("EnableNetworkIsolation", False)
    return result


def _describe_model(_stock: Any, self: Any) -> ActionResult:
    model: Model = self.sagemaker_backend.describe_model(self._get_param("ModelName"))
    isolated = vars(model)["network_isolation"]
    return ActionResult({**model.response_object, "EnableNetworkIsolation": isolated})


def update_endpoint(self: Any) -> ActionResult:
    """Update an endpoint at once; SageMaker's traffic shifting is not simulated."""
    name, config = self._get_param("EndpointName"), self._get_param("EndpointConfigName")
    self.sagemaker_backend.describe_endpoint(name)  # raises if it does not exist
    response = self.sagemaker_backend.describe_endpoint_config(config)
    variants = response["ProductionVariants"] if isinstance(response, dict) else response.production_variants
    endpoint: FakeEndpoint = self.sagemaker_backend.endpoints[name]
    endpoint.endpoint_config_name = config
    endpoint.production_variants = endpoint._process_production_variants(variants)
    return ActionResult({"EndpointArn": endpoint.arn})
