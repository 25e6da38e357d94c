"""Batch: where jobs run, where they wait, and what they are."""

from typing import Any, Final

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import gone, labels, shaped


@provides
class ComputeEnvironment(Provider):
    """In place only what Batch changes in place; ReplaceComputeEnvironment, as it is by default, replaces the rest."""

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

    def create(self, wanted: Properties, at: Site) -> Made:
        batch, name = at.client("batch"), wanted.get("ComputeEnvironmentName") or at.name(128)
        resources = dict(wanted.get("ComputeResources", {}))
        resources.pop("UpdateToLatestImageVersion", None)  # says how to update
        given = {**wanted, "ComputeEnvironmentName": name, "Tags": labels(wanted)}
        if resources:
            given["ComputeResources"] = resources
        told = batch.create_compute_environment(**shaped(batch, "create_compute_environment", given, but=_OF_TEMPLATES))
        arn = told["computeEnvironmentArn"]
        return Made(arn, {"ComputeEnvironmentArn": arn}, _said(wanted))

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        batch = at.client("batch")
        own = frozenset({*_OF_TEMPLATES, "ComputeEnvironmentName", "Tags", "Type"})
        given = {**wanted, "ComputeEnvironment": made.id}
        if "ComputeResources" in wanted:
            given["ComputeResources"] = {
                key: value for key, value in wanted["ComputeResources"].items() if key not in _NEVER_CHANGED
            }
        batch.update_compute_environment(**shaped(batch, "update_compute_environment", given, but=own))
        return Made(made.id, made.attributes, _said(wanted))

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        batch = at.client("batch")
        batch.update_compute_environment(computeEnvironment=made.id, state="DISABLED")
        batch.delete_compute_environment(computeEnvironment=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("batch").describe_compute_environments(computeEnvironments=[made.id])["computeEnvironments"][0]
        resources = {**told["computeResources"], "updateToLatestImageVersion": made.kept["Latest"]}
        return {**told, "computeResources": resources, "Tags": told.get("tags", {}), **made.kept}


_OF_TEMPLATES: Final = frozenset({"ReplaceComputeEnvironment", "UpdatePolicy"})
_NEVER_CHANGED: Final = frozenset({"SpotIamFleetRole"})


def _said(wanted: Properties) -> dict[str, Any]:
    """What the template says of updates, and Batch hears with the update alone."""
    latest = wanted.get("ComputeResources", {}).get("UpdateToLatestImageVersion")
    return {"Latest": latest, **{key: wanted[key] for key in _OF_TEMPLATES if key in wanted}}


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

    def create(self, wanted: Properties, at: Site) -> Made:
        batch, name = at.client("batch"), wanted.get("JobQueueName") or at.name(128)
        given = {**wanted, "JobQueueName": name, "Tags": labels(wanted)}
        arn = batch.create_job_queue(**shaped(batch, "create_job_queue", given))["jobQueueArn"]
        return Made(arn, {"JobQueueArn": arn})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        batch, own = at.client("batch"), frozenset({"JobQueueName", "Tags"})
        given = {**wanted, "JobQueue": made.id}
        batch.update_job_queue(**shaped(batch, "update_job_queue", given, but=own))
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        batch = at.client("batch")
        batch.update_job_queue(jobQueue=made.id, state="DISABLED")
        batch.delete_job_queue(jobQueue=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("batch").describe_job_queues(jobQueues=[made.id])["jobQueues"][0]
        return {**told, "Tags": told.get("tags", {})}


@provides
class JobDefinition(Provider):
    """A change is a new revision; the one before is deregistered."""

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

    def create(self, wanted: Properties, at: Site) -> Made:
        return self._register(wanted.get("JobDefinitionName") or at.name(128), wanted, at)

    def _register(self, name: str, wanted: Properties, at: Site) -> Made:
        batch = at.client("batch")
        given = {**wanted, "JobDefinitionName": name, "Tags": labels(wanted)}
        told = batch.register_job_definition(**shaped(batch, "register_job_definition", given))
        return Made(told["jobDefinitionArn"], {"JobDefinitionArn": told["jobDefinitionArn"]}, {"Name": name})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        changed = self._register(made.kept["Name"], wanted, at)
        at.client("batch").deregister_job_definition(jobDefinition=made.id)
        return changed

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("batch").deregister_job_definition(jobDefinition=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("batch").describe_job_definitions(jobDefinitions=[made.id])["jobDefinitions"][0]
        retries = dict(told.get("retryStrategy", {}))
        if "evaluateOnExit" in retries:  # Batch reads actions in any case, and tells them in its own
            retries["evaluateOnExit"] = [{**one, "action": one["action"].upper()} for one in retries["evaluateOnExit"]]
        return {**told, "RetryStrategy": retries, "Tags": told.get("tags", {})}


@provides
class SchedulingPolicy(Provider):
    type = "AWS::Batch::SchedulingPolicy"
    properties = frozenset({"FairsharePolicy", "Name", "Tags"})
    fixed = frozenset({"Name"})

    def create(self, wanted: Properties, at: Site) -> Made:
        batch = at.client("batch")
        given = {**wanted, "Name": wanted.get("Name") or at.name(128), "Tags": labels(wanted)}
        arn = batch.create_scheduling_policy(**shaped(batch, "create_scheduling_policy", given))["arn"]
        return Made(arn, {"Arn": arn})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        batch = at.client("batch")
        given = {"Arn": made.id, "FairsharePolicy": wanted.get("FairsharePolicy", {})}
        batch.update_scheduling_policy(**shaped(batch, "update_scheduling_policy", given))
        if names := gone(before, wanted):
            batch.untag_resource(resourceArn=made.id, tagKeys=names)
        if labels(wanted):
            batch.tag_resource(resourceArn=made.id, tags=labels(wanted))
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("batch").delete_scheduling_policy(arn=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("batch").describe_scheduling_policies(arns=[made.id])["schedulingPolicies"][0]
        return {**told, "Tags": told.get("tags", {})}
