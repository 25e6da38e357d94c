"""The record of a fleet: one item of a table, which says who moves its traffic, and where that goes if he dies.

    owner     the execution that holds the lock; nobody, if there is none
    stable    the colour that has passed its last rollout, written before any weight moves away from it
    signal    what a person asks of the rollout: pause, approve, abort

Lock and pointer are one item, so that each write of one is a condition on the other: who has lost the lock can no
longer move the pointer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nxpipe.stacks.rollout.states import NOT_MET, State, call

KEY: Final = "fleet"
ASKED: Final = ("owner", "signal", "since")  # what people write; `stable` is the machines' own
ME: Final = "$$.Execution.Id"


@dataclass(frozen=True)
class Record:
    table: str
    fleet: str

    @property
    def _key(self) -> dict[str, Any]:
        return {KEY: {"S": self.fleet}}

    def read(self, *, into: str, then: str) -> State:
        parameters = {"TableName": self.table, "Key": self._key, "ConsistentRead": True}
        return call("dynamodb", "getItem", parameters, into=into, then=then)

    def lock(self, *, then: str, caught: Mapping[str, str]) -> State:
        """Also by who has it already: the answer to his first request may have been lost."""
        return self._change(
            "SET #owner = :me, #since = :now",
            "attribute_not_exists(#owner) OR #owner = :me",
            {":me": ME, ":now": "$$.State.EnteredTime"},
            then=then,
            caught=caught,
        )

    def take_over(self, owner: str, *, then: str, caught: Mapping[str, str]) -> State:
        """From an execution that has ended."""
        values = {":me": ME, ":now": "$$.State.EnteredTime", ":dead": owner}
        return self._change("SET #owner = :me, #since = :now", "#owner = :dead", values, then=then, caught=caught)

    def point(self, colour: str, *, then: str) -> State:
        values = {":colour": colour, ":me": ME}
        return self._change("SET #stable = :colour", "#owner = :me", values, then=then)

    def claim(self, *, then: str, caught: Mapping[str, str]) -> State:
        """Before each step: the lock is still held, and nobody has asked for the end. Which of the two is not met, the
        record itself tells.
        """
        condition = "#owner = :me AND (attribute_not_exists(#signal) OR #signal <> :end)"
        values = {":me": ME, ":end": "States.Format('abort')"}
        return self._change("SET #owner = :me", condition, values, then=then, caught=caught)

    def use_up(self, word: str, *, then: str) -> State:
        """A word that is good for one step; what a person has said since counts."""
        condition, values = "#owner = :me AND #signal = :word", {":me": ME, ":word": f"States.Format('{word}')"}
        return self._change("REMOVE #signal", condition, values, then=then, caught={NOT_MET: then})

    def unlock(self, *, then: str, caught: Mapping[str, str] | None = None) -> State:
        return self._change("REMOVE #owner, #since, #signal", "#owner = :me", {":me": ME}, then=then, caught=caught)

    def _change(
        self,
        update: str,
        condition: str,
        values: Mapping[str, str],
        *,
        then: str,
        caught: Mapping[str, str] | None = None,
    ) -> State:
        words = [name for name in ("owner", "since", "signal", "stable") if f"#{name}" in f"{update} {condition}"]
        parameters = {
            "TableName": self.table,
            "Key": self._key,
            "UpdateExpression": update,
            "ConditionExpression": condition,
            "ExpressionAttributeNames": {f"#{name}": name for name in words},
            "ExpressionAttributeValues": {name: {"S.$": path} for name, path in values.items()},
        }
        return call("dynamodb", "updateItem", parameters, then=then, caught=caught, stubborn=True)
