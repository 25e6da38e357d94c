"""Rules that answer to events, and schedules."""

import json
from typing import Any

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import gone, shaped, tags


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

    def create(self, wanted: Properties, at: Site) -> Made:
        name = wanted.get("Name") or at.name(64)
        bus = wanted.get("EventBusName", "default")
        arn = self._put(at.client("events"), name, wanted)
        made = Made(name, {"Arn": arn}, {"Bus": bus})
        at.begin(made)
        return self.update(made, {}, wanted, at)

    def _put(self, events: Any, name: str, wanted: Properties) -> str:
        pattern = {"EventPattern": json.dumps(wanted["EventPattern"])} if "EventPattern" in wanted else {}
        given = {**wanted, **pattern, "Name": name}
        arn: str = events.put_rule(**shaped(events, "put_rule", given, but=frozenset({"Targets"})))["RuleArn"]
        return arn

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        events, bus = at.client("events"), made.kept["Bus"]
        if before:
            self._put(events, made.id, wanted)
        targets = wanted.get("Targets", [])
        kept = {one["Id"] for one in targets}
        if unwanted := sorted({one["Id"] for one in before.get("Targets", [])} - kept):
            events.remove_targets(Rule=made.id, EventBusName=bus, Ids=unwanted)
        if targets:
            events.put_targets(
                **shaped(events, "put_targets", {"Rule": made.id, "EventBusName": bus, "Targets": targets})
            )
        if names := gone(before, wanted):
            events.untag_resource(ResourceARN=made.attributes["Arn"], TagKeys=names)
        if tags(wanted):
            events.tag_resource(ResourceARN=made.attributes["Arn"], Tags=tags(wanted))
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        events, bus = at.client("events"), made.kept["Bus"]
        if there := events.list_targets_by_rule(Rule=made.id, EventBusName=bus)["Targets"]:
            events.remove_targets(Rule=made.id, EventBusName=bus, Ids=[one["Id"] for one in there])
        events.delete_rule(Name=made.id, EventBusName=bus)

    def read(self, made: Made, at: Site) -> Properties:
        events, bus = at.client("events"), made.kept["Bus"]
        found: dict[str, Any] = dict(events.describe_rule(Name=made.id, EventBusName=bus))
        if "EventPattern" in found:
            found["EventPattern"] = json.loads(found["EventPattern"])
        found["Targets"] = events.list_targets_by_rule(Rule=made.id, EventBusName=bus)["Targets"]
        found["Tags"] = events.list_tags_for_resource(ResourceARN=made.attributes["Arn"])["Tags"]
        return found


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

    def create(self, wanted: Properties, at: Site) -> Made:
        scheduler, name = at.client("scheduler"), wanted.get("Name") or at.name(64)
        told = scheduler.create_schedule(**shaped(scheduler, "create_schedule", {**wanted, "Name": name}))
        return Made(name, {"Arn": told["ScheduleArn"]}, {"Group": wanted.get("GroupName", "default")})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        scheduler = at.client("scheduler")
        scheduler.update_schedule(**shaped(scheduler, "update_schedule", {**wanted, "Name": made.id}))
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("scheduler").delete_schedule(Name=made.id, GroupName=made.kept["Group"])

    def read(self, made: Made, at: Site) -> Properties:
        told: Properties = at.client("scheduler").get_schedule(Name=made.id, GroupName=made.kept["Group"])
        return told


@provides
class ScheduleGroup(Provider):
    type = "AWS::Scheduler::ScheduleGroup"
    properties = frozenset({"Name", "Tags"})
    fixed = frozenset({"Name"})

    def create(self, wanted: Properties, at: Site) -> Made:
        name = wanted.get("Name") or at.name(64)
        told = at.client("scheduler").create_schedule_group(Name=name, Tags=tags(wanted))
        return Made(name, {"Arn": told["ScheduleGroupArn"]})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        scheduler, arn = at.client("scheduler"), made.attributes["Arn"]
        if names := gone(before, wanted):
            scheduler.untag_resource(ResourceArn=arn, TagKeys=names)
        scheduler.tag_resource(ResourceArn=arn, Tags=tags(wanted))
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("scheduler").delete_schedule_group(Name=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        scheduler = at.client("scheduler")
        told = scheduler.get_schedule_group(Name=made.id)
        return {**told, "Tags": scheduler.list_tags_for_resource(ResourceArn=made.attributes["Arn"])["Tags"]}
