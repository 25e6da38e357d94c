"""Log groups and metric filters."""

from typing import Any

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags


@provides
class LogGroup(Provider):
    type = "AWS::Logs::LogGroup"
    properties = frozenset({"KmsKeyId", "LogGroupClass", "LogGroupName", "RetentionInDays", "Tags"})
    fixed = frozenset({"LogGroupName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        logs, name = site.client("logs"), desired.get("LogGroupName") or site.name(512)
        arguments = {key: desired[key] for key in ("KmsKeyId", "LogGroupClass") if key in desired}
        labels = {tag["Key"]: tag["Value"] for tag in tags(desired)}
        logs.create_log_group(
            **shaped(logs, "create_log_group", {"logGroupName": name, **arguments}),
            **({"tags": labels} if labels else {}),
        )
        resource = PhysicalResource(name, {"Arn": site.arn("logs", f"log-group:{name}:*")})
        site.begin(resource)
        return self.update(resource, {"Tags": desired.get("Tags", [])}, desired, site)

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        logs = site.client("logs")
        if "RetentionInDays" in desired:
            logs.put_retention_policy(logGroupName=resource.id, retentionInDays=int(desired["RetentionInDays"]))
        elif "RetentionInDays" in before:
            logs.delete_retention_policy(logGroupName=resource.id)
        if before.get("KmsKeyId") != desired.get("KmsKeyId") and "KmsKeyId" in desired:
            logs.associate_kms_key(logGroupName=resource.id, kmsKeyId=desired["KmsKeyId"])
        if tags(before) != tags(desired):
            logs.untag_log_group(logGroupName=resource.id, tags=[tag["Key"] for tag in tags(before)])
            logs.tag_log_group(logGroupName=resource.id, tags={tag["Key"]: tag["Value"] for tag in tags(desired)})
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("logs").delete_log_group(logGroupName=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        logs = site.client("logs")
        log_groups = logs.describe_log_groups(logGroupNamePrefix=resource.id)["logGroups"]
        actual: dict[str, Any] = dict(next(entry for entry in log_groups if entry["logGroupName"] == resource.id))
        labels = logs.list_tags_log_group(logGroupName=resource.id)["tags"]
        return {**actual, "Tags": [{"Key": key, "Value": value} for key, value in labels.items()]}


@provides
class MetricFilter(Provider):
    type = "AWS::Logs::MetricFilter"
    properties = frozenset({"FilterName", "FilterPattern", "LogGroupName", "MetricTransformations"})
    fixed = frozenset({"FilterName", "LogGroupName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        resource = PhysicalResource(
            desired.get("FilterName") or site.name(512), state={"LogGroupName": desired["LogGroupName"]}
        )
        return self.update(resource, {}, desired, site)

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        logs = site.client("logs")
        metrics = [
            {
                **metric_transformation,
                "Dimensions": {
                    dimension["Key"]: dimension["Value"] for dimension in metric_transformation["Dimensions"]
                },
            }
            if "Dimensions" in metric_transformation
            else metric_transformation
            for metric_transformation in desired["MetricTransformations"]
        ]
        arguments = {**desired, "FilterName": resource.id, "MetricTransformations": metrics}
        logs.put_metric_filter(**shaped(logs, "put_metric_filter", arguments))
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("logs").delete_metric_filter(logGroupName=properties["LogGroupName"], filterName=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        metric_filters = site.client("logs").describe_metric_filters(
            logGroupName=resource.state["LogGroupName"], filterNamePrefix=resource.id
        )["metricFilters"]
        actual: dict[str, Any] = dict(next(entry for entry in metric_filters if entry["filterName"] == resource.id))
        metrics = [
            {
                **metric_transformation,
                "dimensions": [
                    {"Key": key, "Value": value} for key, value in metric_transformation.get("dimensions", {}).items()
                ],
            }
            for metric_transformation in actual["metricTransformations"]
        ]
        return {**actual, "MetricTransformations": metrics}
