"""ECR repositories."""

import json
from typing import Any

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags


@provides
class Repository(Provider):
    type = "AWS::ECR::Repository"
    properties = frozenset(
        {
            "EmptyOnDelete",
            "EncryptionConfiguration",
            "ImageScanningConfiguration",
            "ImageTagMutability",
            "LifecyclePolicy",
            "RepositoryName",
            "RepositoryPolicyText",
            "Tags",
        }
    )
    fixed = frozenset({"EncryptionConfiguration", "RepositoryName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        ecr, name = site.client("ecr"), desired.get("RepositoryName") or site.name(256, lower=True)
        arguments = {
            key: desired[key]
            for key in ("EncryptionConfiguration", "ImageScanningConfiguration", "ImageTagMutability")
            if key in desired
        }
        repository = ecr.create_repository(
            **shaped(ecr, "create_repository", {"repositoryName": name, "tags": tags(desired), **arguments})
        )["repository"]
        resource = PhysicalResource(
            name, {"Arn": repository["repositoryArn"], "RepositoryUri": repository["repositoryUri"]}
        )
        site.begin(resource)
        self._policies(ecr, name, {}, desired)
        return resource

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        ecr = site.client("ecr")
        scanning = shaped(
            ecr,
            "put_image_scanning_configuration",
            {
                "repositoryName": resource.id,
                "imageScanningConfiguration": desired.get("ImageScanningConfiguration", {"ScanOnPush": False}),
            },
        )
        ecr.put_image_scanning_configuration(**scanning)
        ecr.put_image_tag_mutability(
            repositoryName=resource.id, imageTagMutability=desired.get("ImageTagMutability", "MUTABLE")
        )
        ecr.tag_resource(resourceArn=resource.attributes["Arn"], tags=tags(desired))
        self._policies(ecr, resource.id, before, desired)
        return resource

    def _policies(self, ecr: Any, name: str, before: Properties, desired: Properties) -> None:
        rules, policy = (
            desired.get("LifecyclePolicy", {}).get("LifecyclePolicyText"),
            desired.get("RepositoryPolicyText"),
        )
        if rules:
            ecr.put_lifecycle_policy(repositoryName=name, lifecyclePolicyText=rules)
        elif "LifecyclePolicy" in before:
            ecr.delete_lifecycle_policy(repositoryName=name)
        if policy:
            text = policy if isinstance(policy, str) else json.dumps(policy)
            ecr.set_repository_policy(repositoryName=name, policyText=text)
        elif "RepositoryPolicyText" in before:
            ecr.delete_repository_policy(repositoryName=name)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        force = str(properties.get("EmptyOnDelete", False)).lower() == "true"
        site.client("ecr").delete_repository(repositoryName=resource.id, force=force)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        ecr = site.client("ecr")
        actual: dict[str, Any] = dict(ecr.describe_repositories(repositoryNames=[resource.id])["repositories"][0])
        actual["Tags"] = ecr.list_tags_for_resource(resourceArn=resource.attributes["Arn"])["tags"]
        try:
            rules = ecr.get_lifecycle_policy(repositoryName=resource.id)["lifecyclePolicyText"]
            actual["LifecyclePolicy"] = {"LifecyclePolicyText": rules}
        except ecr.exceptions.LifecyclePolicyNotFoundException:
            actual["LifecyclePolicy"] = None
        try:
            actual["RepositoryPolicyText"] = json.loads(
                ecr.get_repository_policy(repositoryName=resource.id)["policyText"]
            )
        except ecr.exceptions.RepositoryPolicyNotFoundException:
            actual["RepositoryPolicyText"] = None
        return actual
