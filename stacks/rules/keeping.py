"""Stateful resources keep their logical ids."""

from collections.abc import Iterator

from nxpipe.stacks.keep import KEEP, losses
from nxpipe.stacks.reading import Templates
from nxpipe.stacks.rules.finding import Facts, Finding


def keeps(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for resource, what, mend in losses(all_, facts.project) if facts.project else ():
        yield Finding(KEEP, resource, "", what, mend)
