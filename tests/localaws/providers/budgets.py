"""What may be spent, and who is told."""

from typing import Any

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import gone, shaped


@provides
class Budget(Provider):
    type = "AWS::Budgets::Budget"
    properties = frozenset({"Budget", "NotificationsWithSubscribers", "ResourceTags"})
    fixed = frozenset({"NotificationsWithSubscribers"})

    def create(self, wanted: Properties, at: Site) -> Made:
        budgets = at.client("budgets")
        name = wanted["Budget"].get("BudgetName") or at.name(100)
        given = {**wanted, "AccountId": at.account, "Budget": {**wanted["Budget"], "BudgetName": name}}
        budgets.create_budget(**shaped(budgets, "create_budget", given, but=frozenset({"ResourceTags"})))
        made = Made(name, kept={"arn": f"arn:{at.partition}:budgets::{at.account}:budget/{name}"})
        at.begin(made)
        self._tag(budgets, made, {}, wanted)
        return made

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        budgets = at.client("budgets")
        given = {"AccountId": at.account, "NewBudget": {**wanted["Budget"], "BudgetName": made.id}}
        budgets.update_budget(**shaped(budgets, "update_budget", given))
        self._tag(budgets, made, before, wanted)
        return made

    def _tag(self, budgets: Any, made: Made, before: Properties, wanted: Properties) -> None:
        if names := gone(before, wanted, "ResourceTags"):
            budgets.untag_resource(ResourceARN=made.kept["arn"], ResourceTagKeys=names)
        if label := wanted.get("ResourceTags"):
            budgets.tag_resource(ResourceARN=made.kept["arn"], ResourceTags=label)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("budgets").delete_budget(AccountId=at.account, BudgetName=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        budgets, key = at.client("budgets"), {"AccountId": at.account, "BudgetName": made.id}
        told: list[dict[str, Any]] = budgets.describe_notifications_for_budget(**key)["Notifications"]
        subscribers = [
            budgets.describe_subscribers_for_notification(**key, Notification=one)["Subscribers"] for one in told
        ]
        return {
            "Budget": budgets.describe_budget(**key)["Budget"],
            "ResourceTags": budgets.list_tags_for_resource(ResourceARN=made.kept["arn"])["ResourceTags"],
            "NotificationsWithSubscribers": [
                {"Notification": one, "Subscribers": each} for one, each in zip(told, subscribers, strict=True)
            ],
        }
