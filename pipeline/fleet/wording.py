"""A plan in plain words."""

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from nxpipe.pipeline.util.escape import for_terminal
from nxpipe.stacks.lint.costs import Estimate
from nxpipe.stacks.lint.deployment_plan import Change, Kind, Plan, Restart

_WORDS: Final[dict[Kind, str]] = {
    "added": "is new",
    "changed": "changes in place",
    "left": "leaves the stack and is kept as it is",
    "removed": "is deleted",
    "replaced": "is REPLACED by a new one",
    "unclear": "changes, in place or by a new one",
}


def told(plan: Plan, before: Estimate, after: Estimate) -> str:
    """For a person: by stack, the worst first; then what restarts, and what it costs."""
    if plan.empty:
        return "Nothing changes."
    lines = [*_changes(plan), *map(_restart, plan.restarts)]
    lines += [f"Stack {stack} is not in the app any more: CDK leaves it as it is." for stack in plan.forgotten]
    return "\n".join([*map(for_terminal, lines), _costs(before, after)])


def _changes(plan: Plan) -> Iterator[str]:
    for stack, changes in groupby(plan.changes, key=lambda change: change.resource.stack):
        yield f"{stack}:"
        yield from (f"  {_change(change)}" for change in changes)


def _change(change: Change) -> str:
    at = change.resource
    named = f"{at.path} ({at.type}) {_WORDS[change.kind]}"
    if change.kind == "replaced":
        return f"{named}, for {_listed(change.properties)} cannot change"
    return f"{named}: {_listed(change.properties)}" if change.properties else named


def _restart(restart: Restart) -> str:
    count = "Instances" if restart.instances is None else f"{restart.instances} instances"
    if restart.by == restart.group:
        return f"{count} of {restart.group.path} are started anew, for the group is another one."
    return f"{count} of {restart.group.path} are replaced one after another, for {restart.by.path} changes."


def _costs(before: Estimate, after: Estimate) -> str:
    unknown = "" if all(line.hourly is not None for line in after.lines) else ", and what has no known price"
    if round(before.monthly) == round(after.monthly):
        return f"It costs about ${after.monthly:,.0f} a month, as before{unknown}."
    return f"It costs about ${after.monthly:,.0f} a month{unknown}; before, it was ${before.monthly:,.0f}."


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
