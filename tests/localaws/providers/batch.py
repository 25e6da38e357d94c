"""Batch: compute environments, job queues, job definitions and scheduling policies."""

from typing import Any, Final

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import labels, removed_tags, shaped


@provides
class ComputeEnvironment(Provider):
    """A compute environment. ReplaceComputeEnvironment (the default) replaces what Batch cannot update in place."""

    type = "AWS::Batch::ComputeEnvironment"
    properties = frozenset(
        {
            "ComputeEnvironmentName",
            "ComputeResources",
            "ReplaceComputeEnvironment",
            "ServiceRole",
            "State",
            "Tags",
            "Type",
            "UpdatePolicy",
        }
    )
    fixed = frozenset({"ComputeEnvironmentName", "Tags", "Type"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        batch, name = site.client("batch"), desired.get("ComputeEnvironmentName") or site.name(128)
        resources = dict(desired.get("ComputeResources", {}))
        resources.pop("UpdateToLatestImageVersion", None)  # applies to updates only
        arguments = {**desired, "ComputeEnvironmentName": name, "Tags": labels(desired)}
        if resources:
            arguments["ComputeResources"] = resources
        response = batch.create_compute_environment(
            **shaped(batch, "create_compute_environment", arguments, exclude=_OF_TEMPLATES)
        )
        arn = response["computeEnvironmentArn"]
        return PhysicalResource(arn, {"ComputeEnvironmentArn": arn}, _remembered(desired))

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        batch = site.client("batch")
        own = frozenset({*_OF_TEMPLATES, "ComputeEnvironmentName", "Tags", "Type"})
        arguments = {**desired, "ComputeEnvironment": resource.id}
        if "ComputeResources" in desired:
            arguments["ComputeResources"] = {
                key: value for key, value in desired["ComputeResources"].items() if key not in _NEVER_CHANGED
            }
        batch.update_compute_environment(**shaped(batch, "update_compute_environment", arguments, exclude=own))
        return PhysicalResource(resource.id, resource.attributes, _remembered(desired))

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        batch = site.client("batch")
        batch.update_compute_environment(computeEnvironment=resource.id, state="DISABLED")
        batch.delete_compute_environment(computeEnvironment=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        compute_environment = site.client("batch").describe_compute_environments(computeEnvironments=[resource.id])[
            "computeEnvironments"
        ][0]
        resources = {**compute_environment["computeResources"], "updateToLatestImageVersion": resource.state["Latest"]}
        return {
            **compute_environment,
            "computeResources": resources,
            "Tags": compute_environment.get("tags", {}),
            **resource.state,
        }


_OF_TEMPLATES: Final = frozenset({"ReplaceComputeEnvironment", "UpdatePolicy"})
_NEVER_CHANGED: Final = frozenset({"SpotIamFleetRole"})


def _remembered(desired: Properties) -> dict[str, Any]:
    """Settings for updates, which Batch gets with an update only."""
    latest = desired.get("ComputeResources", {}).get("UpdateToLatestImageVersion")
    return {"Latest": latest, **{key: desired[key] for key in _OF_TEMPLATES if key in desired}}


@provides
class JobQueue(Provider):
    type = "AWS::Batch::JobQueue"
    properties = frozenset(
        {
            "ComputeEnvironmentOrder",
            "JobQueueName",
            "JobStateTimeLimitActions",
            "Priority",
            "SchedulingPolicyArn",
            "State",
            "Tags",
        }
    )
    fixed = frozenset({"JobQueueName", "Tags"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        batch, name = site.client("batch"), desired.get("JobQueueName") or site.name(128)
        arguments = {**desired, "JobQueueName": name, "Tags": labels(desired)}
        arn = batch.create_job_queue(**shaped(batch, "create_job_queue", arguments))["jobQueueArn"]
        return PhysicalResource(arn, {"JobQueueArn": arn})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        batch, own = site.client("batch"), frozenset({"JobQueueName", "Tags"})
        arguments = {**desired, "JobQueue": resource.id}
        batch.update_job_queue(**shaped(batch, "update_job_queue", arguments, exclude=own))
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        batch = site.client("batch")
        batch.update_job_queue(jobQueue=resource.id, state="DISABLED")
        batch.delete_job_queue(jobQueue=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        job_queue = site.client("batch").describe_job_queues(jobQueues=[resource.id])["jobQueues"][0]
        return {**job_queue, "Tags": job_queue.get("tags", {})}


@provides
class JobDefinition(Provider):
    """A job definition. A change registers a new revision and deregisters the previous one."""

    type = "AWS::Batch::JobDefinition"
    properties = frozenset(
        {
            "ContainerProperties",
            "JobDefinitionName",
            "NodeProperties",
            "Parameters",
            "PlatformCapabilities",
            "PropagateTags",
            "RetryStrategy",
            "SchedulingPriority",
            "Tags",
            "Timeout",
            "Type",
        }
    )
    fixed = frozenset({"JobDefinitionName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        return self._register(desired.get("JobDefinitionName") or site.name(128), desired, site)

    def _register(self, name: str, desired: Properties, site: Site) -> PhysicalResource:
        batch = site.client("batch")
        arguments = {**desired, "JobDefinitionName": name, "Tags": labels(desired)}
        response = batch.register_job_definition(**shaped(batch, "register_job_definition", arguments))
        return PhysicalResource(
            response["jobDefinitionArn"], {"JobDefinitionArn": response["jobDefinitionArn"]}, {"Name": name}
        )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        changed = self._register(resource.state["Name"], desired, site)
        site.client("batch").deregister_job_definition(jobDefinition=resource.id)
        return changed

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("batch").deregister_job_definition(jobDefinition=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        job_definition = site.client("batch").describe_job_definitions(jobDefinitions=[resource.id])["jobDefinitions"][
            0
        ]
        retries = dict(job_definition.get("retryStrategy", {}))
        if "evaluateOnExit" in retries:  # Batch accepts actions in any case and returns lower case
            retries["evaluateOnExit"] = [
                {**entry, "action": entry["action"].upper()} for entry in retries["evaluateOnExit"]
            ]
        return {**job_definition, "RetryStrategy": retries, "Tags": job_definition.get("tags", {})}


@provides
class SchedulingPolicy(Provider):
    type = "AWS::Batch::SchedulingPolicy"
    properties = frozenset({"FairsharePolicy", "Name", "Tags"})
    fixed = frozenset({"Name"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        batch = site.client("batch")
        arguments = {**desired, "Name": desired.get("Name") or site.name(128), "Tags": labels(desired)}
        arn = batch.create_scheduling_policy(**shaped(batch, "create_scheduling_policy", arguments))["arn"]
        return PhysicalResource(arn, {"Arn": arn})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        batch = site.client("batch")
        arguments = {"Arn": resource.id, "FairsharePolicy": desired.get("FairsharePolicy", {})}
        batch.update_scheduling_policy(**shaped(batch, "update_scheduling_policy", arguments))
        if names := removed_tags(before, desired):
            batch.untag_resource(resourceArn=resource.id, tagKeys=names)
        if labels(desired):
            batch.tag_resource(resourceArn=resource.id, tags=labels(desired))
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("batch").delete_scheduling_policy(arn=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        scheduling_policy = site.client("batch").describe_scheduling_policies(arns=[resource.id])["schedulingPolicies"][
            0
        ]
        return {**scheduling_policy, "Tags": scheduling_policy.get("tags", {})}
