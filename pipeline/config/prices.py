"""Prices of AWS with their sources and dates: by region, by instance type or type of resource, by way of buying.

The table is prices.toml; one that `nxpipe prices refresh` wrote comes before it, if NXPIPE_PRICES names its file. A
price that both lack is None, and no caller may count it as zero.
"""

import math
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.util.errors import InputInvalid

HOURS_A_MONTH: Final = 730
OWN_TABLE: Final = "NXPIPE_PRICES"  # environment variable: a file of prices that come before the shipped ones
_SHIPPED: Final = Path(__file__).with_name("prices.toml")


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


_Key: TypeAlias = tuple[str, str, Purchase]


@dataclass(frozen=True)
class Prices:
    """All known prices, by region, by what is bought and by way of buying."""

    known: Mapping[_Key, Price]

    @property
    def date(self) -> date:
        """The date of the oldest price on demand."""
        return min(price.date for (_, _, purchase), price in self.known.items() if purchase is Purchase.ON_DEMAND)

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
def load_prices(path: Path | None = None) -> Prices:
    """The prices of a table; without one, those that nxpipe ships, below those of the file that NXPIPE_PRICES names."""
    if path is not None:
        return Prices(_read(path))
    own = os.environ.get(OWN_TABLE)
    return Prices(_read(_SHIPPED) | (_read(Path(own)) if own else {}))


def _read(path: Path) -> dict[_Key, Price]:
    try:
        tables: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return {key: price for table in tables.values() for key, price in _of_table(table)}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError) as e:
        raise InputInvalid(
            f"{path}: no table of prices ({str(e)[:120]}); write one with `nxpipe prices refresh --out FILE`"
        ) from e


def _of_table(table: Mapping[str, Any]) -> Iterator[tuple[_Key, Price]]:
    """The prices of one table. Of two prices of one thing in a file the later one counts."""
    purchase, day, source = Purchase(table.get("purchase", Purchase.ON_DEMAND)), table["date"], str(table["source"])
    if type(day) is not date:
        raise ValueError(f"the date {day!r} is not a day")
    for region, prices in table.items():
        if isinstance(prices, dict):
            for what, hourly in prices.items():
                if isinstance(hourly, bool) or not isinstance(hourly, int | float) or not 0 < hourly < math.inf:
                    raise ValueError(f"the price {hourly!r} of {what} is not a positive number")
                yield (region, what, purchase), Price(float(hourly), day, source)
