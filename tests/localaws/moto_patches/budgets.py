"""Budgets can be changed, have tags, and tell who hears of them."""

import json
from typing import Any, Final

from moto.budgets.responses import BudgetsResponse


def update_budget(self: Any) -> str:
    account, wanted = self._get_param("AccountId"), self._get_param("NewBudget")
    self.backend.describe_budget(account_id=account, budget_name=wanted["BudgetName"])  # refuses what is not there
    there = self.backend.budgets[account][wanted["BudgetName"]]
    kept = {key: there.budget[key] for key in ("LastUpdatedTime", "TimePeriod")}
    there.budget = {**kept, **wanted}
    return "{}"


def describe_subscribers_for_notification(self: Any) -> str:
    account, name = self._get_param("AccountId"), self._get_param("BudgetName")
    self.backend.describe_budget(account_id=account, budget_name=name)
    found = [
        subscriber
        for one in self.backend.budgets[account][name].notifications
        if one.details == self._get_param("Notification")
        for subscriber in one.subscribers
    ]
    return json.dumps({"Subscribers": found})


def tag_resource(self: Any) -> str:
    _tags(self).update({one["Key"]: one["Value"] for one in self._get_param("ResourceTags")})
    return "{}"


def untag_resource(self: Any) -> str:
    for key in self._get_param("ResourceTagKeys"):
        _tags(self).pop(key, None)
    return "{}"


def list_tags_for_resource(self: Any) -> str:
    return json.dumps({"ResourceTags": [{"Key": key, "Value": value} for key, value in _tags(self).items()]})


def _tags(self: Any) -> dict[str, str]:
    account, _, name = self._get_param("ResourceARN").partition("::")[2].partition(":budget/")
    found: dict[str, str] = vars(self.backend.budgets[account][name]).setdefault("tags", {})
    return found


_CALLS: Final = (
    update_budget,
    describe_subscribers_for_notification,
    tag_resource,
    untag_resource,
    list_tags_for_resource,
)


def mend() -> None:
    for call in _CALLS:
        setattr(BudgetsResponse, call.__name__, call)
