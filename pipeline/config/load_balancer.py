"""The load balancer of a serving fleet: health checks, the probe, scaling by requests, PrivateLink."""

from datetime import timedelta
from typing import Annotated, Final

from pydantic import Field, ValidationInfo, field_validator

from nxpipe.pipeline.config.kinds import DISTINCT, LIST, JsonText, duration, write_duration
from nxpipe.pipeline.config.schema import Absent, Table, Unit, one_of, refuse, text


def require_whole_seconds(length: timedelta) -> timedelta:
    if length.microseconds:
        raise refuse("whole seconds, as the load balancer counts")
    return length


HEALTHY_STATUS: Final = 200  # the only status code of a successful health check


class HealthCheck(Table):
    """The load balancer's health check. A server that is busy for less than `timeout` stays in service, and so does one
    that misses fewer than `unhealthy` checks in a row."""

    interval: Annotated[timedelta, duration("5s", "5m")] = Field(
        default=timedelta(seconds=20), description="The time between two checks of an instance.", examples=["20s"]
    )
    timeout: Annotated[timedelta, duration("2s", "2m"), Absent("three quarters of `interval`, at most 15s")] = Field(
        default_factory=lambda earlier: min(
            timedelta(seconds=15), timedelta(seconds=earlier["interval"].seconds * 3 // 4)
        ),
        description="The time limit for the response, shorter than `interval`.",
        examples=["15s"],
    )
    healthy: Annotated[int, Field(ge=2, le=10), Unit("checks")] = Field(
        default=2, description="Successful checks in a row until a failed instance gets requests again.", examples=[2]
    )
    unhealthy: Annotated[int, Field(ge=2, le=10), Unit("checks")] = Field(
        default=5, description="Failed checks in a row until an instance is replaced.", examples=[5]
    )

    _whole = field_validator("interval", "timeout")(require_whole_seconds)

    @field_validator("timeout")
    @classmethod
    def _shorter_than_the_interval(cls, timeout: timedelta, info: ValidationInfo) -> timedelta:
        interval = info.data.get("interval")
        if interval is not None and timeout >= interval:
            raise refuse(f'a duration shorter than interval, "{write_duration(interval)}"')
        return timeout


class ProbeRequest(Table):
    """A request that the agent sends to the server once, after the health checks: the instance goes into service with
    the expected response only."""

    path: Annotated[str, text("/[!-~]*", 'a path such as "/predict"')] = Field(
        description="The path of the request, with its query.", examples=["/predict"]
    )
    method: Annotated[str, one_of(("POST", "GET", "PUT"))] = Field(
        default="POST", description="The method of the request.", examples=["POST"]
    )
    body: Annotated[JsonText | None, Absent("no body")] = Field(
        default=None,
        description="The body of the request, sent as application/json.",
        examples=['{"text": "Paris is the [MASK] of France."}'],
    )
    status: Annotated[int, Field(ge=100, le=599)] = Field(
        default=200, description="The expected status code.", examples=[200]
    )
    expect: Annotated[JsonText | None, Absent("only `status` is compared")] = Field(
        default=None,
        description="The expected response. An object may have further keys, at every level; a list has the same "
        "items.",
        examples=['{"label": "capital"}'],
    )
    tolerance: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        description="The relative difference that a number of the response may have from the one in `expect`.",
        examples=[0.01],
    )
    timeout: Annotated[timedelta, duration("1s", "10m")] = Field(
        default=timedelta(minutes=1), description="The time limit for the response.", examples=["1m"]
    )

    @field_validator("body")
    @classmethod
    def _not_with_get(cls, body: str | None, info: ValidationInfo) -> str | None:
        if body is not None and info.data.get("method") == "GET":
            raise refuse("no body for a GET request, or another method", found="body")
        return body


class TargetTracking(Table):
    """A target tracking policy of EC2 Auto Scaling: the number of instances, from `size.min` to `size.max`, follows the
    requests. Rollouts pause it."""

    requests_per_target: Annotated[int, Field(ge=1, le=10_000_000), Unit("requests a minute")] = Field(
        description="The load of an instance that the policy keeps: ALBRequestCountPerTarget of the target group that "
        "serves. Measure it: the load at which latency is still good.",
        examples=[600],
    )
    scale_in: bool = Field(
        default=True, description="Remove instances when the load falls; false only adds.", examples=[False]
    )
    warm_up: Annotated[timedelta, duration("10s", "2h")] = Field(
        default=timedelta(minutes=5),
        description="The time from the end of the lifecycle hook until a new instance serves its share: loading of the "
        "model and health checks. Until then it counts as capacity that is on its way.",
        examples=["3m"],
    )

    _whole = field_validator("warm_up")(require_whole_seconds)


_Principal = Annotated[
    str,
    text(
        r"arn:aws:iam::[0-9]{12}:(?:root|(?:role|user)/[!-~]+)",
        'the ARN of an account, a role or a user, such as "arn:aws:iam::123456789012:root"',
        longest=2048,
    ),
]


class PrivateLink(Table):
    """An endpoint service of AWS PrivateLink: callers in other networks create an interface endpoint to it."""

    principals: Annotated[tuple[_Principal, ...], LIST, DISTINCT] = Field(
        description="The accounts, roles and users that may create an endpoint.",
        examples=[["arn:aws:iam::123456789012:root"]],
    )
    acceptance: bool = Field(default=True, description="New endpoints wait until you accept them.", examples=[False])
