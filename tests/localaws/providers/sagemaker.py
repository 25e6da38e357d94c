"""Endpoints: what they serve, how, and the endpoints themselves."""

from typing import Any, ClassVar

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import gone, shaped, tags


class _OfSageMaker(Provider):
    """Called by a name, known to CloudFormation by an ARN."""

    noun: ClassVar[str]  # in the names of calls
    word: ClassVar[str]  # in the names of parameters

    def create(self, wanted: Properties, at: Site) -> Made:
        client, call = at.client("sagemaker"), f"create_{self.noun}"
        name = wanted.get(f"{self.word}Name") or at.name(63)
        told = getattr(client, call)(**shaped(client, call, {**self._given(wanted), f"{self.word}Name": name}))
        return Made(told[f"{self.word}Arn"], {f"{self.word}Name": name}, self._said(wanted))

    def _given(self, wanted: Properties) -> dict[str, Any]:
        return dict(wanted)

    def _said(self, wanted: Properties) -> dict[str, Any]:
        return {}

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        client = at.client("sagemaker")
        if names := gone(before, wanted):
            client.delete_tags(ResourceArn=made.id, TagKeys=names)
        if tags(wanted):
            client.add_tags(ResourceArn=made.id, Tags=tags(wanted))
        return made

    def _which(self, made: Made) -> dict[str, str]:
        return {f"{self.word}Name": made.attributes[f"{self.word}Name"]}

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        getattr(at.client("sagemaker"), f"delete_{self.noun}")(**self._which(made))

    def read(self, made: Made, at: Site) -> Properties:
        client = at.client("sagemaker")
        told = getattr(client, f"describe_{self.noun}")(**self._which(made))
        return {**told, "Tags": client.list_tags(ResourceArn=made.id)["Tags"]}


@provides
class Model(_OfSageMaker):
    type = "AWS::SageMaker::Model"
    noun, word = "model", "Model"
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
    noun, word = "endpoint_config", "EndpointConfig"
    properties = frozenset(
        {"DataCaptureConfig", "EndpointConfigName", "ExecutionRoleArn", "KmsKeyId", "ProductionVariants", "Tags"}
    )
    fixed = properties - {"Tags"}


@provides
class Endpoint(_OfSageMaker):
    """How an update is rolled out is said in the template alone, until there is an update."""

    type = "AWS::SageMaker::Endpoint"
    noun, word = "endpoint", "Endpoint"
    properties = frozenset({"DeploymentConfig", "EndpointConfigName", "EndpointName", "Tags"})
    fixed = frozenset({"EndpointName"})

    def _given(self, wanted: Properties) -> dict[str, Any]:
        return {key: value for key, value in wanted.items() if key != "DeploymentConfig"}

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        client = at.client("sagemaker")
        if before["EndpointConfigName"] != wanted["EndpointConfigName"]:
            own = frozenset({"Tags"})
            given = shaped(client, "update_endpoint", {**wanted, **self._which(made)}, but=own)
            client.update_endpoint(**given)
        super().update(made, before, wanted, at)
        return Made(made.id, made.attributes, self._said(wanted))

    def _said(self, wanted: Properties) -> dict[str, Any]:
        return {"DeploymentConfig": wanted.get("DeploymentConfig")}

    def read(self, made: Made, at: Site) -> Properties:
        return {**super().read(made, at), **made.kept}
