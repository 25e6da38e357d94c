"""Prices of AWS with their sources and dates: by region, by instance type or type of resource, by way of buying.

The table is prices.toml. A price that it lacks is None, and no caller may count it as zero.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

_TABLE: Final = Path(__file__).with_name("prices.toml")


class Purchase(StrEnum):
    """How an instance is bought. Commitments are without upfront payment, unless the source says otherwise."""

    ON_DEMAND = "on-demand"
    SPOT = "spot"
    CAPACITY_BLOCK = "capacity-block"
    SAVINGS_PLAN_1Y = "savings-plan-1y"
    SAVINGS_PLAN_3Y = "savings-plan-3y"
    RESERVED_1Y = "reserved-1y"
    RESERVED_3Y = "reserved-3y"


@dataclass(frozen=True)
class Price:
    """US dollars for an hour, or for the unit of a resource that is billed by another one."""

    hourly: float
    date: date
    source: str


@dataclass(frozen=True)
class Prices:
    """All known prices, by region, by what is bought and by way of buying."""

    known: Mapping[tuple[str, str, Purchase], Price]

    @property
    def date(self) -> date:
        """The date of the oldest price."""
        return min(price.date for price in self.known.values())

    def price(self, region: str | None, what: str, purchase: Purchase = Purchase.ON_DEMAND) -> Price | None:
        return self.known.get((region or "", what, purchase))

    def of(self, region: str | None, what: str) -> float | None:
        """Dollars an hour on demand."""
        found = self.price(region, what)
        return found.hourly if found else None

    def dearest(self, region: str | None, types: Iterable[str]) -> float | None:
        """The highest price of several instance types; None if one of them has no known price."""
        prices = [self.of(region, type_) for type_ in types]
        known = [price for price in prices if price is not None]
        return max(known) if known and len(known) == len(prices) else None


@cache
def load_prices(path: Path = _TABLE) -> Prices:
    """The shipped prices, or those of another table. Of two prices of one thing the later in the file counts."""
    tables: Mapping[str, Mapping[str, Any]] = tomllib.loads(path.read_text())
    return Prices({key: price for table in tables.values() for key, price in _of_table(table)})


def _of_table(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, Purchase], Price]]:
    purchase = Purchase(table.get("purchase", Purchase.ON_DEMAND))
    for region, prices in table.items():
        if isinstance(prices, dict):
            for what, hourly in prices.items():
                yield (region, what, purchase), Price(hourly, table["date"], table["source"])
