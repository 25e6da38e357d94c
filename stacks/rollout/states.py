"""Amazon States Language builders (JSONPath): each function returns the JSON of a state.

Every service call is retried before it counts as failed. All writes are absolute (weights, sizes, values of a
record), so a call may be repeated when its response was lost.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

State: TypeAlias = dict[str, Any]
States: TypeAlias = dict[str, State]

ALL_ERRORS: Final = ["States.ALL"]
CONDITION_FAILED: Final = "DynamoDb.ConditionalCheckFailedException"  # not retried: the condition does not hold
_BACKOFF: Final = {"IntervalSeconds": 1, "BackoffRate": 2, "MaxDelaySeconds": 20}
_RETRIES: Final = 4  # half a minute in total
_ROLLBACK_RETRIES: Final = 10  # of calls that restore traffic; three minutes in total
_TIMEOUT: Final = 30  # seconds
# Errors of a function that did not run. One that ran and failed would fail again: it depends on its input only.
_NOT_REACHED: Final = [
    "Lambda.AWSLambdaException",
    "Lambda.ClientExecutionTimeoutException",
    "Lambda.SdkClientException",
    "Lambda.ServiceException",
    "Lambda.TooManyRequestsException",
    "States.Timeout",
]


def call(
    service: str,
    action: str,
    parameters: Mapping[str, Any],
    *,
    then: str,
    into: str | None = None,
    select: Mapping[str, str] | None = None,
    catch: Mapping[str, str] | None = None,
    rollback: bool = False,
) -> State:
    """Task state with one AWS API call. The response, or the fields of it in `select`, is stored at the path `into`.

    Without `into` the response is discarded. `catch` is the next state by error name; the error is stored at `$.why`.
    `rollback` marks calls that restore traffic, which are retried for longer.
    """
    retries = [
        {"ErrorEquals": [CONDITION_FAILED], "MaxAttempts": 0},
        {"ErrorEquals": ALL_ERRORS, "MaxAttempts": _ROLLBACK_RETRIES if rollback else _RETRIES, **_BACKOFF},
    ]
    state: State = {
        "Type": "Task",
        "Resource": f"arn:aws:states:::aws-sdk:{service}:{action}",
        "Parameters": dict(parameters),
        "TimeoutSeconds": _TIMEOUT,
        "Retry": retries if service == "dynamodb" else retries[1:],
        "ResultPath": into,
        "Next": then,
    }
    if select:
        state["ResultSelector"] = dict(select)
    return with_catch(state, catch or {})


def invoke(function: str, payload: Mapping[str, Any], *, then: str, into: str) -> State:
    """Task state that invokes a Lambda function; its response is stored at `into`, under the key `is`."""
    return {
        "Type": "Task",
        "Resource": "arn:aws:states:::lambda:invoke",
        "Parameters": {"FunctionName": function, "Payload": dict(payload)},
        "TimeoutSeconds": _TIMEOUT,
        "Retry": [{"ErrorEquals": _NOT_REACHED, "MaxAttempts": _RETRIES, **_BACKOFF}],
        "ResultSelector": {"is.$": "$.Payload"},
        "ResultPath": into,
        "Next": then,
    }


def with_catch(state: State, targets: Mapping[str, str], into: str = "$.why") -> State:
    """The state with further catchers after the existing ones; the first match applies."""
    catches = [{"ErrorEquals": [error], "ResultPath": into, "Next": target} for error, target in targets.items()]
    return {**state, "Catch": [*state.get("Catch", []), *catches]} if catches else state


def with_catch_all(states: States, target: str, into: str = "$.why") -> States:
    """The states with a catcher of all errors on each task, which leads to the target."""
    return {
        name: with_catch(state, {ALL_ERRORS[0]: target}, into) if state["Type"] == "Task" else state
        for name, state in states.items()
    }


def choose(*choices: tuple[Mapping[str, Any], str], otherwise: str) -> State:
    return {
        "Type": "Choice",
        "Choices": [{**test, "Next": target} for test, target in choices],
        "Default": otherwise,
    }


def put(values: Mapping[str, Any], *, into: str, then: str) -> State:
    return {"Type": "Pass", "Parameters": dict(values), "ResultPath": into, "Next": then}


def wait(seconds: str, *, then: str) -> State:
    return {"Type": "Wait", "SecondsPath": seconds, "Next": then}


def fail(error: str, cause: str) -> State:
    return {"Type": "Fail", "Error": error, "Cause": cause}
