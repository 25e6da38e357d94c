"""Alarms, composite alarms and dashboards."""

from typing import Any, ClassVar, Final

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import removed_tags, shaped, tags

_OF_BOTH: Final = {
    "ActionsEnabled",
    "AlarmActions",
    "AlarmDescription",
    "AlarmName",
    "InsufficientDataActions",
    "OKActions",
    "Tags",
}


class _AnyAlarm(Provider):
    fixed = frozenset({"AlarmName"})
    call: ClassVar[str]
    kind: ClassVar[str]

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        name = desired.get("AlarmName") or site.name(255)
        self._put(site.client("cloudwatch"), name, desired)
        return PhysicalResource(name, {"Arn": site.arn("cloudwatch", f"alarm:{name}")})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        cloudwatch = site.client("cloudwatch")
        self._put(cloudwatch, resource.id, desired)
        if names := removed_tags(before, desired):
            cloudwatch.untag_resource(ResourceARN=resource.attributes["Arn"], TagKeys=names)
        if tags(desired):
            cloudwatch.tag_resource(ResourceARN=resource.attributes["Arn"], Tags=tags(desired))
        return resource

    def _put(self, cloudwatch: Any, name: str, desired: Properties) -> None:
        getattr(cloudwatch, self.call)(**shaped(cloudwatch, self.call, {**desired, "AlarmName": name}))

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("cloudwatch").delete_alarms(AlarmNames=[resource.id])

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        cloudwatch = site.client("cloudwatch")
        result = cloudwatch.describe_alarms(AlarmNames=[resource.id], AlarmTypes=[self.kind])[f"{self.kind}s"][0]
        labels = cloudwatch.list_tags_for_resource(ResourceARN=resource.attributes["Arn"])["Tags"]
        return {**result, "Tags": labels}


@provides
class Alarm(_AnyAlarm):
    type = "AWS::CloudWatch::Alarm"
    call, kind = "put_metric_alarm", "MetricAlarm"
    properties = frozenset(
        {
            *_OF_BOTH,
            "ComparisonOperator",
            "DatapointsToAlarm",
            "Dimensions",
            "EvaluateLowSampleCountPercentile",
            "EvaluationPeriods",
            "ExtendedStatistic",
            "MetricName",
            "Metrics",
            "Namespace",
            "Period",
            "Statistic",
            "Threshold",
            "TreatMissingData",
            "Unit",
        }
    )


@provides
class CompositeAlarm(_AnyAlarm):
    type = "AWS::CloudWatch::CompositeAlarm"
    call, kind = "put_composite_alarm", "CompositeAlarm"
    properties = frozenset({*_OF_BOTH, "AlarmRule"})


@provides
class Dashboard(Provider):
    type = "AWS::CloudWatch::Dashboard"
    properties = frozenset({"DashboardBody", "DashboardName", "Tags"})
    fixed = frozenset({"DashboardName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        name = desired.get("DashboardName") or site.name(255)
        arn = f"arn:{site.partition}:cloudwatch::{site.account}:dashboard/{name}"
        return self.update(PhysicalResource(name, {"Arn": arn}), {}, desired, site)

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        cloudwatch, arn = site.client("cloudwatch"), resource.attributes["Arn"]
        cloudwatch.put_dashboard(DashboardName=resource.id, DashboardBody=desired["DashboardBody"])
        if names := removed_tags(before, desired):
            cloudwatch.untag_resource(ResourceARN=arn, TagKeys=names)
        if tags(desired):
            cloudwatch.tag_resource(ResourceARN=arn, Tags=tags(desired))
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("cloudwatch").delete_dashboards(DashboardNames=[resource.id])

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        cloudwatch = site.client("cloudwatch")
        labels = cloudwatch.list_tags_for_resource(ResourceARN=resource.attributes["Arn"])["Tags"]
        return {**cloudwatch.get_dashboard(DashboardName=resource.id), "Tags": labels}
