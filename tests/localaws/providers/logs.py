"""Log groups and what is counted in them."""

from typing import Any

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags


@provides
class LogGroup(Provider):
    type = "AWS::Logs::LogGroup"
    properties = frozenset({"KmsKeyId", "LogGroupClass", "LogGroupName", "RetentionInDays", "Tags"})
    fixed = frozenset({"LogGroupName"})

    def create(self, wanted: Properties, at: Site) -> Made:
        logs, name = at.client("logs"), wanted.get("LogGroupName") or at.name(512)
        given = {key: wanted[key] for key in ("KmsKeyId", "LogGroupClass") if key in wanted}
        labels = {tag["Key"]: tag["Value"] for tag in tags(wanted)}
        logs.create_log_group(
            **shaped(logs, "create_log_group", {"logGroupName": name, **given}), **({"tags": labels} if labels else {})
        )
        made = Made(name, {"Arn": at.arn("logs", f"log-group:{name}:*")})
        at.begin(made)
        return self.update(made, {"Tags": wanted.get("Tags", [])}, wanted, at)

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        logs = at.client("logs")
        if "RetentionInDays" in wanted:
            logs.put_retention_policy(logGroupName=made.id, retentionInDays=int(wanted["RetentionInDays"]))
        elif "RetentionInDays" in before:
            logs.delete_retention_policy(logGroupName=made.id)
        if before.get("KmsKeyId") != wanted.get("KmsKeyId") and "KmsKeyId" in wanted:
            logs.associate_kms_key(logGroupName=made.id, kmsKeyId=wanted["KmsKeyId"])
        if tags(before) != tags(wanted):
            logs.untag_log_group(logGroupName=made.id, tags=[tag["Key"] for tag in tags(before)])
            logs.tag_log_group(logGroupName=made.id, tags={tag["Key"]: tag["Value"] for tag in tags(wanted)})
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("logs").delete_log_group(logGroupName=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        logs = at.client("logs")
        told = logs.describe_log_groups(logGroupNamePrefix=made.id)["logGroups"]
        found: dict[str, Any] = dict(next(one for one in told if one["logGroupName"] == made.id))
        labels = logs.list_tags_log_group(logGroupName=made.id)["tags"]
        return {**found, "Tags": [{"Key": key, "Value": value} for key, value in labels.items()]}


@provides
class MetricFilter(Provider):
    type = "AWS::Logs::MetricFilter"
    properties = frozenset({"FilterName", "FilterPattern", "LogGroupName", "MetricTransformations"})
    fixed = frozenset({"FilterName", "LogGroupName"})

    def create(self, wanted: Properties, at: Site) -> Made:
        made = Made(wanted.get("FilterName") or at.name(512), kept={"LogGroupName": wanted["LogGroupName"]})
        return self.update(made, {}, wanted, at)

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        logs = at.client("logs")
        metrics = [
            {**one, "Dimensions": {each["Key"]: each["Value"] for each in one["Dimensions"]}}
            if "Dimensions" in one
            else one
            for one in wanted["MetricTransformations"]
        ]
        given = {**wanted, "FilterName": made.id, "MetricTransformations": metrics}
        logs.put_metric_filter(**shaped(logs, "put_metric_filter", given))
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("logs").delete_metric_filter(logGroupName=properties["LogGroupName"], filterName=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("logs").describe_metric_filters(
            logGroupName=made.kept["LogGroupName"], filterNamePrefix=made.id
        )["metricFilters"]
        found: dict[str, Any] = dict(next(one for one in told if one["filterName"] == made.id))
        metrics = [
            {**one, "dimensions": [{"Key": key, "Value": value} for key, value in one.get("dimensions", {}).items()]}
            for one in found["metricTransformations"]
        ]
        return {**found, "MetricTransformations": metrics}
