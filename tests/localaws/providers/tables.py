"""DynamoDB tables and SQS queues."""

import json
from typing import Any, Final

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import labels, listed, removed_tags, shaped, tags


@provides
class Table(Provider):
    type = "AWS::DynamoDB::Table"
    properties = frozenset(
        {
            "AttributeDefinitions",
            "BillingMode",
            "DeletionProtectionEnabled",
            "GlobalSecondaryIndexes",
            "KeySchema",
            "LocalSecondaryIndexes",
            "PointInTimeRecoverySpecification",
            "ProvisionedThroughput",
            "SSESpecification",
            "StreamSpecification",
            "TableName",
            "Tags",
            "TimeToLiveSpecification",
        }
    )
    fixed = frozenset({"GlobalSecondaryIndexes", "KeySchema", "LocalSecondaryIndexes", "TableName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        tables, name = site.client("dynamodb"), desired.get("TableName") or site.name(255)
        own = frozenset({"PointInTimeRecoverySpecification", "TimeToLiveSpecification"})
        arguments = shaped(tables, "create_table", _settings({**desired, "TableName": name}), exclude=own)
        table_description = tables.create_table(**arguments)["TableDescription"]
        resource = PhysicalResource(
            name, {"Arn": table_description["TableArn"], "StreamArn": table_description.get("LatestStreamArn")}
        )
        site.begin(resource)
        self._extras(tables, name, {}, desired)
        return resource

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        tables = site.client("dynamodb")
        same = ("AttributeDefinitions", "BillingMode", "DeletionProtectionEnabled", "ProvisionedThroughput")
        changed = (*same, "SSESpecification", "StreamSpecification")
        arguments = _settings(
            {key: desired[key] for key in changed if key in desired and before.get(key) != desired[key]}
        )
        if arguments:
            tables.update_table(**shaped(tables, "update_table", {**arguments, "TableName": resource.id}))
        self._extras(tables, resource.id, before, desired)
        if names := removed_tags(before, desired):
            tables.untag_resource(ResourceArn=resource.attributes["Arn"], TagKeys=names)
        if tags(desired):
            tables.tag_resource(ResourceArn=resource.attributes["Arn"], Tags=tags(desired))
        return resource

    def _extras(self, tables: Any, name: str, before: Properties, desired: Properties) -> None:
        """Set the settings with calls of their own."""
        key = "TimeToLiveSpecification"
        if before.get(key) != desired.get(key):
            ending = desired.get(key, {**before.get(key, {}), "Enabled": False})
            arguments = {"TableName": name, key: ending}
            tables.update_time_to_live(**shaped(tables, "update_time_to_live", arguments))
        key = "PointInTimeRecoverySpecification"
        if before.get(key) != desired.get(key):
            arguments = {"TableName": name, key: desired.get(key, {"PointInTimeRecoveryEnabled": False})}
            tables.update_continuous_backups(**shaped(tables, "update_continuous_backups", arguments))

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("dynamodb").delete_table(TableName=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        tables = site.client("dynamodb")
        table = tables.describe_table(TableName=resource.id)["Table"]
        backups = tables.describe_continuous_backups(TableName=resource.id)["ContinuousBackupsDescription"]
        status = backups["PointInTimeRecoveryDescription"]["PointInTimeRecoveryStatus"]
        ending = tables.describe_time_to_live(TableName=resource.id)["TimeToLiveDescription"]
        sealed = table.get("SSEDescription", {})
        return {
            **table,
            "BillingMode": table.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED"),
            "PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": status == "ENABLED"},
            "SSESpecification": {
                "SSEEnabled": sealed.get("Status") == "ENABLED",
                "SSEType": sealed.get("SSEType"),
                "KMSMasterKeyId": sealed.get("KMSMasterKeyArn"),
            },
            "Tags": tables.list_tags_of_resource(ResourceArn=table["TableArn"])["Tags"],
            "TimeToLiveSpecification": {
                "AttributeName": ending.get("AttributeName"),
                "Enabled": ending["TimeToLiveStatus"] == "ENABLED",
            },
        }


def _settings(desired: dict[str, Any]) -> dict[str, Any]:
    """The settings in the names of the service: a template implies that streams are on, and has another name for
    encryption."""
    result = dict(desired)
    if "StreamSpecification" in result:
        result["StreamSpecification"] = {**result["StreamSpecification"], "StreamEnabled": True}
    if "SSESpecification" in result:
        sealed = dict(result["SSESpecification"])
        sealed["Enabled"] = sealed.pop("SSEEnabled")
        result["SSESpecification"] = sealed
    return result


@provides
class Queue(Provider):
    type = "AWS::SQS::Queue"
    changeable: Final = (
        "DelaySeconds",
        "KmsMasterKeyId",
        "MaximumMessageSize",
        "MessageRetentionPeriod",
        "ReceiveMessageWaitTimeSeconds",
        "RedrivePolicy",
        "SqsManagedSseEnabled",
        "VisibilityTimeout",
    )
    properties = frozenset({*changeable, "FifoQueue", "QueueName", "Tags"})
    fixed = frozenset({"FifoQueue", "QueueName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        queues, name = site.client("sqs"), desired.get("QueueName") or site.name(80)
        arguments = {key: _text(desired[key]) for key in (*self.changeable, "FifoQueue") if key in desired}
        url = queues.create_queue(QueueName=name, Attributes=arguments, tags=labels(desired))["QueueUrl"]
        return PhysicalResource(url, {"Arn": site.arn("sqs", name), "QueueName": name, "QueueUrl": url})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        queues = site.client("sqs")
        changed = {key: desired.get(key, "") for key in self.changeable if before.get(key) != desired.get(key)}
        if changed:
            arguments = {key: _text(value) for key, value in changed.items()}
            queues.set_queue_attributes(QueueUrl=resource.id, Attributes=arguments)
        if names := removed_tags(before, desired):
            queues.untag_queue(QueueUrl=resource.id, TagKeys=names)
        queues.tag_queue(QueueUrl=resource.id, Tags=labels(desired))
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("sqs").delete_queue(QueueUrl=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        queues = site.client("sqs")
        actual: dict[str, Any] = dict(
            queues.get_queue_attributes(QueueUrl=resource.id, AttributeNames=["All"])["Attributes"]
        )
        if "RedrivePolicy" in actual:
            actual["RedrivePolicy"] = json.loads(actual["RedrivePolicy"])
        actual["QueueName"] = resource.attributes["QueueName"]
        actual["Tags"] = listed(queues.list_queue_tags(QueueUrl=resource.id).get("Tags", {}))
        return actual


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
