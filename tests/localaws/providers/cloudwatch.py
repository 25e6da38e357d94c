"""Alarms, alarms of alarms, and dashboards."""

from typing import Any, ClassVar, Final

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import gone, shaped, tags

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

    def create(self, wanted: Properties, at: Site) -> Made:
        name = wanted.get("AlarmName") or at.name(255)
        self._put(at.client("cloudwatch"), name, wanted)
        return Made(name, {"Arn": at.arn("cloudwatch", f"alarm:{name}")})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        cloudwatch = at.client("cloudwatch")
        self._put(cloudwatch, made.id, wanted)
        if names := gone(before, wanted):
            cloudwatch.untag_resource(ResourceARN=made.attributes["Arn"], TagKeys=names)
        if tags(wanted):
            cloudwatch.tag_resource(ResourceARN=made.attributes["Arn"], Tags=tags(wanted))
        return made

    def _put(self, cloudwatch: Any, name: str, wanted: Properties) -> None:
        getattr(cloudwatch, self.call)(**shaped(cloudwatch, self.call, {**wanted, "AlarmName": name}))

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("cloudwatch").delete_alarms(AlarmNames=[made.id])

    def read(self, made: Made, at: Site) -> Properties:
        cloudwatch = at.client("cloudwatch")
        told = cloudwatch.describe_alarms(AlarmNames=[made.id], AlarmTypes=[self.kind])[f"{self.kind}s"][0]
        labels = cloudwatch.list_tags_for_resource(ResourceARN=made.attributes["Arn"])["Tags"]
        return {**told, "Tags": labels}


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

    def create(self, wanted: Properties, at: Site) -> Made:
        name = wanted.get("DashboardName") or at.name(255)
        arn = f"arn:{at.partition}:cloudwatch::{at.account}:dashboard/{name}"
        return self.update(Made(name, {"Arn": arn}), {}, wanted, at)

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        cloudwatch, arn = at.client("cloudwatch"), made.attributes["Arn"]
        cloudwatch.put_dashboard(DashboardName=made.id, DashboardBody=wanted["DashboardBody"])
        if names := gone(before, wanted):
            cloudwatch.untag_resource(ResourceARN=arn, TagKeys=names)
        if tags(wanted):
            cloudwatch.tag_resource(ResourceARN=arn, Tags=tags(wanted))
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("cloudwatch").delete_dashboards(DashboardNames=[made.id])

    def read(self, made: Made, at: Site) -> Properties:
        cloudwatch = at.client("cloudwatch")
        labels = cloudwatch.list_tags_for_resource(ResourceARN=made.attributes["Arn"])["Tags"]
        return {**cloudwatch.get_dashboard(DashboardName=made.id), "Tags": labels}
