"""Tables and queues."""

import json
from typing import Any, Final

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import gone, labels, listed, shaped, tags


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

    def create(self, wanted: Properties, at: Site) -> Made:
        tables, name = at.client("dynamodb"), wanted.get("TableName") or at.name(255)
        own = frozenset({"PointInTimeRecoverySpecification", "TimeToLiveSpecification"})
        given = shaped(tables, "create_table", _settings({**wanted, "TableName": name}), but=own)
        told = tables.create_table(**given)["TableDescription"]
        made = Made(name, {"Arn": told["TableArn"], "StreamArn": told.get("LatestStreamArn")})
        at.begin(made)
        self._extras(tables, name, {}, wanted)
        return made

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        tables = at.client("dynamodb")
        same = ("AttributeDefinitions", "BillingMode", "DeletionProtectionEnabled", "ProvisionedThroughput")
        changed = (*same, "SSESpecification", "StreamSpecification")
        given = _settings({key: wanted[key] for key in changed if key in wanted and before.get(key) != wanted[key]})
        if given:
            tables.update_table(**shaped(tables, "update_table", {**given, "TableName": made.id}))
        self._extras(tables, made.id, before, wanted)
        if names := gone(before, wanted):
            tables.untag_resource(ResourceArn=made.attributes["Arn"], TagKeys=names)
        if tags(wanted):
            tables.tag_resource(ResourceArn=made.attributes["Arn"], Tags=tags(wanted))
        return made

    def _extras(self, tables: Any, name: str, before: Properties, wanted: Properties) -> None:
        """What has calls of its own."""
        key = "TimeToLiveSpecification"
        if before.get(key) != wanted.get(key):
            ending = wanted.get(key, {**before.get(key, {}), "Enabled": False})
            given = {"TableName": name, key: ending}
            tables.update_time_to_live(**shaped(tables, "update_time_to_live", given))
        key = "PointInTimeRecoverySpecification"
        if before.get(key) != wanted.get(key):
            given = {"TableName": name, key: wanted.get(key, {"PointInTimeRecoveryEnabled": False})}
            tables.update_continuous_backups(**shaped(tables, "update_continuous_backups", given))

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("dynamodb").delete_table(TableName=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        tables = at.client("dynamodb")
        told = tables.describe_table(TableName=made.id)["Table"]
        backups = tables.describe_continuous_backups(TableName=made.id)["ContinuousBackupsDescription"]
        status = backups["PointInTimeRecoveryDescription"]["PointInTimeRecoveryStatus"]
        ending = tables.describe_time_to_live(TableName=made.id)["TimeToLiveDescription"]
        sealed = told.get("SSEDescription", {})
        return {
            **told,
            "BillingMode": told.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED"),
            "PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": status == "ENABLED"},
            "SSESpecification": {
                "SSEEnabled": sealed.get("Status") == "ENABLED",
                "SSEType": sealed.get("SSEType"),
                "KMSMasterKeyId": sealed.get("KMSMasterKeyArn"),
            },
            "Tags": tables.list_tags_of_resource(ResourceArn=told["TableArn"])["Tags"],
            "TimeToLiveSpecification": {
                "AttributeName": ending.get("AttributeName"),
                "Enabled": ending["TimeToLiveStatus"] == "ENABLED",
            },
        }


def _settings(wanted: dict[str, Any]) -> dict[str, Any]:
    """A template does not say that streams are on: it names what they show; encryption has another name for on."""
    found = dict(wanted)
    if "StreamSpecification" in found:
        found["StreamSpecification"] = {**found["StreamSpecification"], "StreamEnabled": True}
    if "SSESpecification" in found:
        sealed = dict(found["SSESpecification"])
        sealed["Enabled"] = sealed.pop("SSEEnabled")
        found["SSESpecification"] = sealed
    return found


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

    def create(self, wanted: Properties, at: Site) -> Made:
        queues, name = at.client("sqs"), wanted.get("QueueName") or at.name(80)
        given = {key: _text(wanted[key]) for key in (*self.changeable, "FifoQueue") if key in wanted}
        url = queues.create_queue(QueueName=name, Attributes=given, tags=labels(wanted))["QueueUrl"]
        return Made(url, {"Arn": at.arn("sqs", name), "QueueName": name, "QueueUrl": url})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        queues = at.client("sqs")
        changed = {key: wanted.get(key, "") for key in self.changeable if before.get(key) != wanted.get(key)}
        if changed:
            given = {key: _text(value) for key, value in changed.items()}
            queues.set_queue_attributes(QueueUrl=made.id, Attributes=given)
        if names := gone(before, wanted):
            queues.untag_queue(QueueUrl=made.id, TagKeys=names)
        queues.tag_queue(QueueUrl=made.id, Tags=labels(wanted))
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("sqs").delete_queue(QueueUrl=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        queues = at.client("sqs")
        found: dict[str, Any] = dict(
            queues.get_queue_attributes(QueueUrl=made.id, AttributeNames=["All"])["Attributes"]
        )
        if "RedrivePolicy" in found:
            found["RedrivePolicy"] = json.loads(found["RedrivePolicy"])
        found["QueueName"] = made.attributes["QueueName"]
        found["Tags"] = listed(queues.list_queue_tags(QueueUrl=made.id).get("Tags", {}))
        return found


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
