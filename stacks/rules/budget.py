"""What the templates cost a month is within the budget."""

from collections.abc import Iterator
from typing import Final

from nxpipe.stacks.costs import estimate
from nxpipe.stacks.reading.template import Templates
from nxpipe.stacks.rules.finding import Facts, Finding

COST: Final = "NXP-COST-1"


def within(all_: Templates, facts: Facts) -> Iterator[Finding]:
    if facts.budget is None or facts.prices is None:
        return
    found = estimate(all_, facts.prices)
    if found.monthly > facts.budget:
        dearest = max(found.lines, key=lambda line: line.hourly or 0)
        yield Finding(
            COST,
            dearest.resource,
            "",
            f"a month costs about ${found.monthly:,.0f}, the budget is ${facts.budget:,}; most of it is {dearest.what}",
            "make the fleets smaller, or raise `monthly` in [budget]",
        )
