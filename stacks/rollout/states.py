"""Amazon States Language builders (JSONPath): each function returns the JSON of a state.

Every service call is retried before it counts as failed. All writes are absolute (weights, sizes, values of a
record), so repeating a call whose response was lost is harmless.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

State: TypeAlias = dict[str, Any]
States: TypeAlias = dict[str, State]

ALL_ERRORS: Final = ["States.ALL"]
CONDITION_FAILED: Final = (
    "DynamoDb.ConditionalCheckFailedException"  # somebody else holds the lock: no use in asking again
)
_PATIENCE: Final = {"IntervalSeconds": 1, "BackoffRate": 2, "MaxDelaySeconds": 20}
_USUAL: Final = 4  # attempts after the first; half a minute in all
_STUBBORN: Final = 10  # of what brings traffic back: three minutes
_LONGEST_CALL: Final = 30  # seconds
# A function that was reached and failed would fail again: it knows nothing but what it is asked.
_UNREACHED: Final = [
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
    keeping: Mapping[str, str] | None = None,
    caught: Mapping[str, str] | None = None,
    stubborn: bool = False,
) -> State:
    """One call of AWS. Its answer, or of that what is worth `keeping`, goes `into` a place of the state; without one
    it is dropped. `caught` says where to go on from errors, by their names; `why` then holds what happened.
    """
    retries = [
        {"ErrorEquals": [CONDITION_FAILED], "MaxAttempts": 0},
        {"ErrorEquals": ALL_ERRORS, "MaxAttempts": _STUBBORN if stubborn else _USUAL, **_PATIENCE},
    ]
    state: State = {
        "Type": "Task",
        "Resource": f"arn:aws:states:::aws-sdk:{service}:{action}",
        "Parameters": dict(parameters),
        "TimeoutSeconds": _LONGEST_CALL,
        "Retry": retries if service == "dynamodb" else retries[1:],
        "ResultPath": into,
        "Next": then,
    }
    if keeping:
        state["ResultSelector"] = dict(keeping)
    return with_catch(state, caught or {})


def invoke(function: str, payload: Mapping[str, Any], *, then: str, into: str) -> State:
    """What a function answers."""
    return {
        "Type": "Task",
        "Resource": "arn:aws:states:::lambda:invoke",
        "Parameters": {"FunctionName": function, "Payload": dict(payload)},
        "TimeoutSeconds": _LONGEST_CALL,
        "Retry": [{"ErrorEquals": _UNREACHED, "MaxAttempts": _USUAL, **_PATIENCE}],
        "ResultSelector": {"is.$": "$.Payload"},
        "ResultPath": into,
        "Next": then,
    }


def with_catch(state: State, targets: Mapping[str, str], into: str = "$.why") -> State:
    """Adds to those that the state has already; the first that fits counts."""
    catches = [{"ErrorEquals": [error], "ResultPath": into, "Next": target} for error, target in targets.items()]
    return {**state, "Catch": [*state.get("Catch", []), *catches]} if catches else state


def with_catch_all(states: States, target: str) -> States:
    """Whatever fails in one of these calls leads to the target."""
    return {
        name: with_catch(state, {ALL_ERRORS[0]: target}) if state["Type"] == "Task" else state
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
