"""Budgets and their subscribers."""

from typing import Any

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import removed_tags, shaped


@provides
class Budget(Provider):
    type = "AWS::Budgets::Budget"
    properties = frozenset({"Budget", "NotificationsWithSubscribers", "ResourceTags"})
    fixed = frozenset({"NotificationsWithSubscribers"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        budgets = site.client("budgets")
        name = desired["Budget"].get("BudgetName") or site.name(100)
        arguments = {**desired, "AccountId": site.account, "Budget": {**desired["Budget"], "BudgetName": name}}
        budgets.create_budget(**shaped(budgets, "create_budget", arguments, exclude=frozenset({"ResourceTags"})))
        resource = PhysicalResource(name, state={"arn": f"arn:{site.partition}:budgets::{site.account}:budget/{name}"})
        site.begin(resource)
        self._tag(budgets, resource, {}, desired)
        return resource

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        budgets = site.client("budgets")
        arguments = {"AccountId": site.account, "NewBudget": {**desired["Budget"], "BudgetName": resource.id}}
        budgets.update_budget(**shaped(budgets, "update_budget", arguments))
        self._tag(budgets, resource, before, desired)
        return resource

    def _tag(self, budgets: Any, resource: PhysicalResource, before: Properties, desired: Properties) -> None:
        if names := removed_tags(before, desired, "ResourceTags"):
            budgets.untag_resource(ResourceARN=resource.state["arn"], ResourceTagKeys=names)
        if label := desired.get("ResourceTags"):
            budgets.tag_resource(ResourceARN=resource.state["arn"], ResourceTags=label)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("budgets").delete_budget(AccountId=site.account, BudgetName=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        budgets, key = site.client("budgets"), {"AccountId": site.account, "BudgetName": resource.id}
        notifications: list[dict[str, Any]] = budgets.describe_notifications_for_budget(**key)["Notifications"]
        subscribers = [
            budgets.describe_subscribers_for_notification(**key, Notification=entry)["Subscribers"]
            for entry in notifications
        ]
        return {
            "Budget": budgets.describe_budget(**key)["Budget"],
            "ResourceTags": budgets.list_tags_for_resource(ResourceARN=resource.state["arn"])["ResourceTags"],
            "NotificationsWithSubscribers": [
                {"Notification": value, "Subscribers": subscriber}
                for value, subscriber in zip(notifications, subscribers, strict=True)
            ],
        }
