"""The record of a fleet, one item of a table: who moves its traffic, which colour is stable, what a person asks for.

The machine's half of it is stacks/rollout/record.py, and its words are the same.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from nxpipe.pipeline.util.aws import asking

_KEY: Final = "fleet"
_NAMES: Final = {f"#{name}": name for name in ("owner", "since", "signal")}


@dataclass(frozen=True)
class Item:
    owner: str | None = None  # the execution, by its ARN
    since: datetime | None = None
    stable: str | None = None
    signal: str | None = None


@dataclass(frozen=True)
class Record:
    client: Any
    table: str
    fleet: str

    def read(self) -> Item:
        with asking(f"read the record of fleet {self.fleet}"):
            found = self.client.get_item(TableName=self.table, Key=self._key, ConsistentRead=True).get("Item", {})
        said = {name: value["S"] for name, value in found.items()}
        since = said.get("since")
        return Item(said.get("owner"), since and datetime.fromisoformat(since), said.get("stable"), said.get("signal"))

    def lock(self, me: str, *, after: str | None) -> bool:
        """For an execution that will be; the machine then finds its own name there. `after` is an owner that never
        came to be. False: somebody else was faster.
        """
        free = "attribute_not_exists(#owner) OR #owner = :me"
        values = {":me": me, ":now": datetime.now(UTC).isoformat(timespec="milliseconds")}
        if after is not None:
            return self._change("SET #owner = :me, #since = :now REMOVE #signal", "#owner = :dead", values, dead=after)
        return self._change("SET #owner = :me, #since = :now REMOVE #signal", free, values)

    def unlock(self, me: str) -> bool:
        return self._change("REMOVE #owner, #since, #signal", "#owner = :me", {":me": me})

    def ask(self, execution: str, signal: str | None, *, instead_of: str | None = None) -> bool:
        """Says something to a rollout, or takes it back; False: it is not under way, or hears something else."""
        condition, values = "#owner = :me", {":me": execution}
        if instead_of is not None:
            condition, values = f"{condition} AND #signal = :before", values | {":before": instead_of}
        if signal is None:
            return self._change("REMOVE #signal", condition, values)
        return self._change("SET #signal = :signal", condition, values | {":signal": signal})

    def _change(self, update: str, condition: str, values: dict[str, str], *, dead: str | None = None) -> bool:
        given = values | ({":dead": dead} if dead else {})
        with asking(f"write the record of fleet {self.fleet}"), suppress(self._not_met):
            self.client.update_item(
                TableName=self.table,
                Key=self._key,
                UpdateExpression=update,
                ConditionExpression=condition,
                ExpressionAttributeNames={name: word for name, word in _NAMES.items() if name in update + condition},
                ExpressionAttributeValues={name: {"S": value} for name, value in given.items()},
            )
            return True
        return False

    @property
    def _key(self) -> dict[str, Any]:
        return {_KEY: {"S": self.fleet}}

    @property
    def _not_met(self) -> type[Exception]:
        found: type[Exception] = self.client.exceptions.ConditionalCheckFailedException
        return found
