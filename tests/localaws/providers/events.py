"""EventBridge rules and schedules."""

import json
from typing import Any

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import removed_tags, shaped, tags


@provides
class Rule(Provider):
    type = "AWS::Events::Rule"
    properties = frozenset(
        {
            "Description",
            "EventBusName",
            "EventPattern",
            "Name",
            "RoleArn",
            "ScheduleExpression",
            "State",
            "Tags",
            "Targets",
        }
    )
    fixed = frozenset({"EventBusName", "Name"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        name = desired.get("Name") or site.name(64)
        bus = desired.get("EventBusName", "default")
        arn = self._put(site.client("events"), name, desired)
        resource = PhysicalResource(name, {"Arn": arn}, {"Bus": bus})
        site.begin(resource)
        return self.update(resource, {}, desired, site)

    def _put(self, events: Any, name: str, desired: Properties) -> str:
        pattern = {"EventPattern": json.dumps(desired["EventPattern"])} if "EventPattern" in desired else {}
        arguments = {**desired, **pattern, "Name": name}
        arn: str = events.put_rule(**shaped(events, "put_rule", arguments, exclude=frozenset({"Targets"})))["RuleArn"]
        return arn

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        events, bus = site.client("events"), resource.state["Bus"]
        if before:
            self._put(events, resource.id, desired)
        targets = desired.get("Targets", [])
        ids = {target["Id"] for target in targets}
        if unwanted := sorted({target["Id"] for target in before.get("Targets", [])} - ids):
            events.remove_targets(Rule=resource.id, EventBusName=bus, Ids=unwanted)
        if targets:
            events.put_targets(
                **shaped(events, "put_targets", {"Rule": resource.id, "EventBusName": bus, "Targets": targets})
            )
        if names := removed_tags(before, desired):
            events.untag_resource(ResourceARN=resource.attributes["Arn"], TagKeys=names)
        if tags(desired):
            events.tag_resource(ResourceARN=resource.attributes["Arn"], Tags=tags(desired))
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        events, bus = site.client("events"), resource.state["Bus"]
        if existing := events.list_targets_by_rule(Rule=resource.id, EventBusName=bus)["Targets"]:
            events.remove_targets(Rule=resource.id, EventBusName=bus, Ids=[entry["Id"] for entry in existing])
        events.delete_rule(Name=resource.id, EventBusName=bus)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        events, bus = site.client("events"), resource.state["Bus"]
        actual: dict[str, Any] = dict(events.describe_rule(Name=resource.id, EventBusName=bus))
        if "EventPattern" in actual:
            actual["EventPattern"] = json.loads(actual["EventPattern"])
        actual["Targets"] = events.list_targets_by_rule(Rule=resource.id, EventBusName=bus)["Targets"]
        actual["Tags"] = events.list_tags_for_resource(ResourceARN=resource.attributes["Arn"])["Tags"]
        return actual


@provides
class Schedule(Provider):
    type = "AWS::Scheduler::Schedule"
    properties = frozenset(
        {
            "Description",
            "EndDate",
            "FlexibleTimeWindow",
            "GroupName",
            "KmsKeyArn",
            "Name",
            "ScheduleExpression",
            "ScheduleExpressionTimezone",
            "StartDate",
            "State",
            "Target",
        }
    )
    fixed = frozenset({"GroupName", "Name"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        scheduler, name = site.client("scheduler"), desired.get("Name") or site.name(64)
        response = scheduler.create_schedule(**shaped(scheduler, "create_schedule", {**desired, "Name": name}))
        return PhysicalResource(name, {"Arn": response["ScheduleArn"]}, {"Group": desired.get("GroupName", "default")})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        scheduler = site.client("scheduler")
        scheduler.update_schedule(**shaped(scheduler, "update_schedule", {**desired, "Name": resource.id}))
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("scheduler").delete_schedule(Name=resource.id, GroupName=resource.state["Group"])

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        response: Properties = site.client("scheduler").get_schedule(
            Name=resource.id, GroupName=resource.state["Group"]
        )
        return response


@provides
class ScheduleGroup(Provider):
    type = "AWS::Scheduler::ScheduleGroup"
    properties = frozenset({"Name", "Tags"})
    fixed = frozenset({"Name"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        name = desired.get("Name") or site.name(64)
        response = site.client("scheduler").create_schedule_group(Name=name, Tags=tags(desired))
        return PhysicalResource(name, {"Arn": response["ScheduleGroupArn"]})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        scheduler, arn = site.client("scheduler"), resource.attributes["Arn"]
        if names := removed_tags(before, desired):
            scheduler.untag_resource(ResourceArn=arn, TagKeys=names)
        scheduler.tag_resource(ResourceArn=arn, Tags=tags(desired))
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("scheduler").delete_schedule_group(Name=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        scheduler = site.client("scheduler")
        response = scheduler.get_schedule_group(Name=resource.id)
        return {**response, "Tags": scheduler.list_tags_for_resource(ResourceArn=resource.attributes["Arn"])["Tags"]}
