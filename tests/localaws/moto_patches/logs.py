"""Log groups keep their class, and PutMetricFilter replaces the filter of the same name."""

from typing import Any

from moto.logs.metric_filters import MetricFilters
from moto.logs.models import LogGroup
from moto.logs.responses import LogsResponse

from tests.localaws.moto_patches._around import around


def apply() -> None:
    around(MetricFilters, "add_filter", _add_filter)
    around(LogsResponse, "create_log_group", _create)
    around(LogGroup, "to_describe_dict", _describe)


def _add_filter(stock: Any, filters: MetricFilters, name: str, pattern: str, group: str, metrics: Any) -> None:
    filters.delete_filter(name, group)
    stock(filters, name, pattern, group, metrics)


def _create(stock: Any, self: Any) -> Any:
    result = stock(self)
    group = self.logs_backend.groups[self._get_param("logGroupName")]
    group.log_group_class = self._get_param("logGroupClass", "STANDARD")
    return result


def _describe(stock: Any, group: LogGroup) -> dict[str, Any]:
    return {**stock(group), "logGroupClass": getattr(group, "log_group_class", "STANDARD")}
