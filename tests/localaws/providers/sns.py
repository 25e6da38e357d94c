"""Topics, who listens to them, and who may speak."""

import json
from typing import Any, Final

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import gone, tags


@provides
class Topic(Provider):
    type = "AWS::SNS::Topic"
    properties = frozenset({"DisplayName", "FifoTopic", "KmsMasterKeyId", "SignatureVersion", "Tags", "TopicName"})
    fixed = frozenset({"FifoTopic", "TopicName"})
    changeable: Final = ("DisplayName", "KmsMasterKeyId", "SignatureVersion")

    def create(self, wanted: Properties, at: Site) -> Made:
        name = wanted.get("TopicName") or at.name(256)
        given = {key: _text(wanted[key]) for key in (*self.changeable, "FifoTopic") if key in wanted}
        arn = at.client("sns").create_topic(Name=name, Attributes=given, Tags=tags(wanted))["TopicArn"]
        return Made(arn, {"TopicArn": arn, "TopicName": name})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        sns = at.client("sns")
        for key in self.changeable:
            if before.get(key) != wanted.get(key):
                value = _text(wanted.get(key, ""))
                sns.set_topic_attributes(TopicArn=made.id, AttributeName=key, AttributeValue=value)
        if names := gone(before, wanted):
            sns.untag_resource(ResourceArn=made.id, TagKeys=names)
        sns.tag_resource(ResourceArn=made.id, Tags=tags(wanted))
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("sns").delete_topic(TopicArn=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        sns = at.client("sns")
        told = sns.get_topic_attributes(TopicArn=made.id)["Attributes"]
        labels = sns.list_tags_for_resource(ResourceArn=made.id)["Tags"]
        return {**told, "TopicName": made.attributes["TopicName"], "Tags": labels}


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

    def create(self, wanted: Properties, at: Site) -> Made:
        arn = at.client("sns").subscribe(
            Endpoint=wanted["Endpoint"],
            Protocol=wanted["Protocol"],
            TopicArn=wanted["TopicArn"],
            Attributes={key: _text(wanted[key]) for key in self.changeable if key in wanted},
            ReturnSubscriptionArn=True,
        )["SubscriptionArn"]
        return Made(arn, {"Arn": arn})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        for key in self.changeable:
            if before.get(key) != wanted.get(key):
                value = _text(wanted.get(key, {} if key.endswith("Policy") else ""))
                at.client("sns").set_subscription_attributes(
                    SubscriptionArn=made.id, AttributeName=key, AttributeValue=value
                )
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("sns").unsubscribe(SubscriptionArn=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("sns").get_subscription_attributes(SubscriptionArn=made.id)["Attributes"]
        documents = {key: json.loads(told[key]) for key in ("FilterPolicy", "RedrivePolicy") if key in told}
        return {**told, **documents}


@provides
class TopicPolicy(Provider):
    type = "AWS::SNS::TopicPolicy"
    properties = frozenset({"PolicyDocument", "Topics"})

    def create(self, wanted: Properties, at: Site) -> Made:
        sns = at.client("sns")
        own = {topic: sns.get_topic_attributes(TopicArn=topic)["Attributes"]["Policy"] for topic in wanted["Topics"]}
        made = Made(at.name(64), kept={"Own": own})
        at.begin(made)
        self._put(sns, wanted)
        return made

    def _put(self, sns: Any, wanted: Properties) -> None:
        for topic in wanted["Topics"]:
            sns.set_topic_attributes(
                TopicArn=topic, AttributeName="Policy", AttributeValue=json.dumps(wanted["PolicyDocument"])
            )

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        self.delete(made, before, at)
        again = self.create(wanted, at)
        return Made(made.id, kept=again.kept)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        """Each topic gets back the policy that it had of its own."""
        for topic, policy in made.kept["Own"].items():
            at.client("sns").set_topic_attributes(TopicArn=topic, AttributeName="Policy", AttributeValue=policy)

    def read(self, made: Made, at: Site) -> Properties:
        topics = list(made.kept["Own"])
        told = [at.client("sns").get_topic_attributes(TopicArn=each)["Attributes"]["Policy"] for each in topics]
        same = all(each == told[0] for each in told)
        return {"Topics": topics, "PolicyDocument": json.loads(told[0]) if same else None}
