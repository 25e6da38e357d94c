"""Repositories of images."""

import json
from typing import Any

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
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

    def create(self, wanted: Properties, at: Site) -> Made:
        ecr, name = at.client("ecr"), wanted.get("RepositoryName") or at.name(256, lower=True)
        given = {
            key: wanted[key]
            for key in ("EncryptionConfiguration", "ImageScanningConfiguration", "ImageTagMutability")
            if key in wanted
        }
        told = ecr.create_repository(
            **shaped(ecr, "create_repository", {"repositoryName": name, "tags": tags(wanted), **given})
        )["repository"]
        made = Made(name, {"Arn": told["repositoryArn"], "RepositoryUri": told["repositoryUri"]})
        at.begin(made)
        self._policies(ecr, name, {}, wanted)
        return made

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        ecr = at.client("ecr")
        scanning = shaped(
            ecr,
            "put_image_scanning_configuration",
            {
                "repositoryName": made.id,
                "imageScanningConfiguration": wanted.get("ImageScanningConfiguration", {"ScanOnPush": False}),
            },
        )
        ecr.put_image_scanning_configuration(**scanning)
        ecr.put_image_tag_mutability(
            repositoryName=made.id, imageTagMutability=wanted.get("ImageTagMutability", "MUTABLE")
        )
        ecr.tag_resource(resourceArn=made.attributes["Arn"], tags=tags(wanted))
        self._policies(ecr, made.id, before, wanted)
        return made

    def _policies(self, ecr: Any, name: str, before: Properties, wanted: Properties) -> None:
        rules, words = wanted.get("LifecyclePolicy", {}).get("LifecyclePolicyText"), wanted.get("RepositoryPolicyText")
        if rules:
            ecr.put_lifecycle_policy(repositoryName=name, lifecyclePolicyText=rules)
        elif "LifecyclePolicy" in before:
            ecr.delete_lifecycle_policy(repositoryName=name)
        if words:
            text = words if isinstance(words, str) else json.dumps(words)
            ecr.set_repository_policy(repositoryName=name, policyText=text)
        elif "RepositoryPolicyText" in before:
            ecr.delete_repository_policy(repositoryName=name)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        force = str(properties.get("EmptyOnDelete", False)).lower() == "true"
        at.client("ecr").delete_repository(repositoryName=made.id, force=force)

    def read(self, made: Made, at: Site) -> Properties:
        ecr = at.client("ecr")
        found: dict[str, Any] = dict(ecr.describe_repositories(repositoryNames=[made.id])["repositories"][0])
        found["Tags"] = ecr.list_tags_for_resource(resourceArn=made.attributes["Arn"])["tags"]
        try:
            rules = ecr.get_lifecycle_policy(repositoryName=made.id)["lifecyclePolicyText"]
            found["LifecyclePolicy"] = {"LifecyclePolicyText": rules}
        except ecr.exceptions.LifecyclePolicyNotFoundException:
            found["LifecyclePolicy"] = None
        try:
            found["RepositoryPolicyText"] = json.loads(ecr.get_repository_policy(repositoryName=made.id)["policyText"])
        except ecr.exceptions.RepositoryPolicyNotFoundException:
            found["RepositoryPolicyText"] = None
        return found
