"""Stateful resources keep their logical ids."""

from collections.abc import Iterator

from stacks.keep import KEEP, losses
from stacks.reading import Templates
from stacks.rules.finding import Facts, Finding


def keeps(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for resource, what, mend in losses(all_, facts.project) if facts.project else ():
        yield Finding(KEEP, resource, "", what, mend)
