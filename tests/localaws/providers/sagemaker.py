"""SageMaker models, endpoint configurations and endpoints."""

from typing import Any, ClassVar

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import removed_tags, shaped, tags


class _OfSageMaker(Provider):
    """A resource with a name in SageMaker and an ARN as its id in CloudFormation."""

    noun: ClassVar[str]  # part of the names of calls
    prefix: ClassVar[str]  # prefix of the names of parameters

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        client, call = site.client("sagemaker"), f"create_{self.noun}"
        name = desired.get(f"{self.prefix}Name") or site.name(63)
        result = getattr(client, call)(**shaped(client, call, {**self._arguments(desired), f"{self.prefix}Name": name}))
        return PhysicalResource(result[f"{self.prefix}Arn"], {f"{self.prefix}Name": name}, self._remembered(desired))

    def _arguments(self, desired: Properties) -> dict[str, Any]:
        return dict(desired)

    def _remembered(self, desired: Properties) -> dict[str, Any]:
        return {}

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        client = site.client("sagemaker")
        if names := removed_tags(before, desired):
            client.delete_tags(ResourceArn=resource.id, TagKeys=names)
        if tags(desired):
            client.add_tags(ResourceArn=resource.id, Tags=tags(desired))
        return resource

    def _which(self, resource: PhysicalResource) -> dict[str, str]:
        return {f"{self.prefix}Name": resource.attributes[f"{self.prefix}Name"]}

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        getattr(site.client("sagemaker"), f"delete_{self.noun}")(**self._which(resource))

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        client = site.client("sagemaker")
        result = getattr(client, f"describe_{self.noun}")(**self._which(resource))
        return {**result, "Tags": client.list_tags(ResourceArn=resource.id)["Tags"]}


@provides
class Model(_OfSageMaker):
    type = "AWS::SageMaker::Model"
    noun, prefix = "model", "Model"
    properties = frozenset(
        {
            "Containers",
            "EnableNetworkIsolation",
            "ExecutionRoleArn",
            "ModelName",
            "PrimaryContainer",
            "Tags",
            "VpcConfig",
        }
    )
    fixed = properties - {"Tags"}


@provides
class EndpointConfig(_OfSageMaker):
    type = "AWS::SageMaker::EndpointConfig"
    noun, prefix = "endpoint_config", "EndpointConfig"
    properties = frozenset(
        {"DataCaptureConfig", "EndpointConfigName", "ExecutionRoleArn", "KmsKeyId", "ProductionVariants", "Tags"}
    )
    fixed = properties - {"Tags"}


@provides
class Endpoint(_OfSageMaker):
    """An endpoint. Its deployment configuration is only in the template until there is an update."""

    type = "AWS::SageMaker::Endpoint"
    noun, prefix = "endpoint", "Endpoint"
    properties = frozenset({"DeploymentConfig", "EndpointConfigName", "EndpointName", "Tags"})
    fixed = frozenset({"EndpointName"})

    def _arguments(self, desired: Properties) -> dict[str, Any]:
        return {key: value for key, value in desired.items() if key != "DeploymentConfig"}

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        client = site.client("sagemaker")
        if before["EndpointConfigName"] != desired["EndpointConfigName"]:
            own = frozenset({"Tags"})
            arguments = shaped(client, "update_endpoint", {**desired, **self._which(resource)}, exclude=own)
            client.update_endpoint(**arguments)
        super().update(resource, before, desired, site)
        return PhysicalResource(resource.id, resource.attributes, self._remembered(desired))

    def _remembered(self, desired: Properties) -> dict[str, Any]:
        return {"DeploymentConfig": desired.get("DeploymentConfig")}

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        return {**super().read(resource, site), **resource.state}
