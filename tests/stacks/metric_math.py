"""Metric math of alarms, evaluated for one minute."""

from typing import Any, Final

# What the load balancer counts in a minute with 100 requests to a target group, and the share that has failed.
MINUTES: Final[list[tuple[dict[str, int], float]]] = [
    ({"HTTPCode_Target_2XX_Count": 100}, 0.0),
    ({"HTTPCode_Target_2XX_Count": 60, "HTTPCode_Target_4XX_Count": 40}, 0.0),
    ({"HTTPCode_Target_2XX_Count": 95, "HTTPCode_Target_5XX_Count": 5}, 0.05),
    ({"HTTPCode_Target_2XX_Count": 70, "HTTPCode_ELB_502_Count": 30}, 0.3),
    ({"HTTPCode_Target_2XX_Count": 70, "HTTPCode_ELB_504_Count": 30}, 0.3),
    ({"HTTPCode_ELB_4XX_Count": 100}, 1.0),  # 460: clients gave up
    ({"HTTPCode_Target_2XX_Count": 70}, 0.0),  # streams in flight
    ({"HTTPCode_Target_2XX_Count": 130}, 0.0),  # streams of earlier minutes
    ({"HTTPCode_Target_2XX_Count": 100, "HTTPCode_ELB_502_Count": 30}, 0.0),  # of another target group
]


def evaluated(alarm: dict[str, Any], counts: dict[str, int]) -> float:
    """The metric math of an alarm for one minute; counts by the name of the metric, absent ones have no value."""
    series = {metric["Id"]: metric["MetricStat"]["Metric"] for metric in alarm["Metrics"] if "MetricStat" in metric}
    (expression,) = (metric["Expression"] for metric in alarm["Metrics"] if "Expression" in metric)
    values: dict[str, Any] = {id_: counts.get(metric["MetricName"]) for id_, metric in series.items()}
    values["FILL"] = lambda value, default: default if value is None else value
    values["IF"] = lambda condition, then, otherwise: then if condition else otherwise
    return float(eval(expression, {"__builtins__": {}}, values))
