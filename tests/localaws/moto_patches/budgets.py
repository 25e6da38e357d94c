"""Budgets: updates, tags and subscribers."""

import json
from typing import Any, Final

from moto.budgets.responses import BudgetsResponse


def update_budget(self: Any) -> str:
    account, desired = self._get_param("AccountId"), self._get_param("NewBudget")
    self.backend.describe_budget(account_id=account, budget_name=desired["BudgetName"])  # raises if it does not exist
    stored = self.backend.budgets[account][desired["BudgetName"]]
    preserved = {key: stored.budget[key] for key in ("LastUpdatedTime", "TimePeriod")}
    stored.budget = {**preserved, **desired}
    return "{}"


def describe_subscribers_for_notification(self: Any) -> str:
    account, name = self._get_param("AccountId"), self._get_param("BudgetName")
    self.backend.describe_budget(account_id=account, budget_name=name)
    notifications = [
        subscriber
        for notification in self.backend.budgets[account][name].notifications
        if notification.details == self._get_param("Notification")
        for subscriber in notification.subscribers
    ]
    return json.dumps({"Subscribers": notifications})


def tag_resource(self: Any) -> str:
    _tags(self).update({entry["Key"]: entry["Value"] for entry in self._get_param("ResourceTags")})
    return "{}"


def untag_resource(self: Any) -> str:
    for key in self._get_param("ResourceTagKeys"):
        _tags(self).pop(key, None)
    return "{}"


def list_tags_for_resource(self: Any) -> str:
    return json.dumps({"ResourceTags": [{"Key": key, "Value": value} for key, value in _tags(self).items()]})


def _tags(self: Any) -> dict[str, str]:
    account, _, name = self._get_param("ResourceARN").partition("::")[2].partition(":budget/")
    tags: dict[str, str] = vars(self.backend.budgets[account][name]).setdefault("tags", {})
    return tags


_CALLS: Final = (
    update_budget,
    describe_subscribers_for_notification,
    tag_resource,
    untag_resource,
    list_tags_for_resource,
)


def apply() -> None:
    for call in _CALLS:
        setattr(BudgetsResponse, call.__name__, call)
