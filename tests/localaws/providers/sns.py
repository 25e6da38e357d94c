"""Topics, subscriptions and topic policies."""

import json
from typing import Any, Final

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import removed_tags, tags


@provides
class Topic(Provider):
    type = "AWS::SNS::Topic"
    properties = frozenset({"DisplayName", "FifoTopic", "KmsMasterKeyId", "SignatureVersion", "Tags", "TopicName"})
    fixed = frozenset({"FifoTopic", "TopicName"})
    changeable: Final = ("DisplayName", "KmsMasterKeyId", "SignatureVersion")

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        name = desired.get("TopicName") or site.name(256)
        arguments = {key: _text(desired[key]) for key in (*self.changeable, "FifoTopic") if key in desired}
        arn = site.client("sns").create_topic(Name=name, Attributes=arguments, Tags=tags(desired))["TopicArn"]
        return PhysicalResource(arn, {"TopicArn": arn, "TopicName": name})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        sns = site.client("sns")
        for key in self.changeable:
            if before.get(key) != desired.get(key):
                value = _text(desired.get(key, ""))
                sns.set_topic_attributes(TopicArn=resource.id, AttributeName=key, AttributeValue=value)
        if names := removed_tags(before, desired):
            sns.untag_resource(ResourceArn=resource.id, TagKeys=names)
        sns.tag_resource(ResourceArn=resource.id, Tags=tags(desired))
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("sns").delete_topic(TopicArn=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        sns = site.client("sns")
        attributes = sns.get_topic_attributes(TopicArn=resource.id)["Attributes"]
        labels = sns.list_tags_for_resource(ResourceArn=resource.id)["Tags"]
        return {**attributes, "TopicName": resource.attributes["TopicName"], "Tags": labels}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


@provides
class Subscription(Provider):
    type = "AWS::SNS::Subscription"
    properties = frozenset(
        {"Endpoint", "FilterPolicy", "FilterPolicyScope", "Protocol", "RawMessageDelivery", "RedrivePolicy", "TopicArn"}
    )
    fixed = frozenset({"Endpoint", "Protocol", "TopicArn"})
    changeable: Final = ("FilterPolicy", "FilterPolicyScope", "RawMessageDelivery", "RedrivePolicy")

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        arn = site.client("sns").subscribe(
            Endpoint=desired["Endpoint"],
            Protocol=desired["Protocol"],
            TopicArn=desired["TopicArn"],
            Attributes={key: _text(desired[key]) for key in self.changeable if key in desired},
            ReturnSubscriptionArn=True,
        )["SubscriptionArn"]
        return PhysicalResource(arn, {"Arn": arn})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        for key in self.changeable:
            if before.get(key) != desired.get(key):
                value = _text(desired.get(key, {} if key.endswith("Policy") else ""))
                site.client("sns").set_subscription_attributes(
                    SubscriptionArn=resource.id, AttributeName=key, AttributeValue=value
                )
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("sns").unsubscribe(SubscriptionArn=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        attributes = site.client("sns").get_subscription_attributes(SubscriptionArn=resource.id)["Attributes"]
        documents = {key: json.loads(attributes[key]) for key in ("FilterPolicy", "RedrivePolicy") if key in attributes}
        return {**attributes, **documents}


@provides
class TopicPolicy(Provider):
    type = "AWS::SNS::TopicPolicy"
    properties = frozenset({"PolicyDocument", "Topics"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        sns = site.client("sns")
        own = {topic: sns.get_topic_attributes(TopicArn=topic)["Attributes"]["Policy"] for topic in desired["Topics"]}
        resource = PhysicalResource(site.name(64), state={"Own": own})
        site.begin(resource)
        self._put(sns, desired)
        return resource

    def _put(self, sns: Any, desired: Properties) -> None:
        for topic in desired["Topics"]:
            sns.set_topic_attributes(
                TopicArn=topic, AttributeName="Policy", AttributeValue=json.dumps(desired["PolicyDocument"])
            )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        self.delete(resource, before, site)
        recreated = self.create(desired, site)
        return PhysicalResource(resource.id, state=recreated.state)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        """Restore the default policy of each topic."""
        for topic, policy in resource.state["Own"].items():
            site.client("sns").set_topic_attributes(TopicArn=topic, AttributeName="Policy", AttributeValue=policy)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        topics = list(resource.state["Own"])
        result = [site.client("sns").get_topic_attributes(TopicArn=topic)["Attributes"]["Policy"] for topic in topics]
        same = all(entry == result[0] for entry in result)
        return {"Topics": topics, "PolicyDocument": json.loads(result[0]) if same else None}
