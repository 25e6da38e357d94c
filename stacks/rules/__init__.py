"""NXP-*: our rules over synthesised templates. Pure functions, so that they read any template and need no CDK."""

from collections.abc import Iterator
from typing import Final

from nxpipe.stacks.keep import KEEP
from nxpipe.stacks.reading import Templates
from nxpipe.stacks.rules import budget, capacity, efa, exposure, host, keeping, kept, permissions, reach, weights
from nxpipe.stacks.rules.finding import Facts, Finding, KnownImage, Rule, Window

__all__ = ["RULES", "Facts", "Finding", "KnownImage", "Rule", "Window", "lint"]

RULES: Final = (
    Rule(efa.LAYOUT, "interfaces of an EFA instance are laid out as its catalogue row says", efa.layout),
    Rule(efa.GROUPS, "security groups are inside the interfaces, and no subnet is", efa.groups_inside),
    Rule(efa.SELF, "the EFA security group allows all traffic to and from itself, by group", efa.talks_to_itself),
    Rule(efa.SUBNET, "instances that talk by EFA are in one subnet", efa.one_subnet),
    Rule(capacity.BLOCK, "a capacity block has its market type, its reservation, no placement group", capacity.block),
    Rule(
        capacity.OPEN, "a block's group is empty outside its window, and drained before its end", capacity.empty_outside
    ),
    Rule(capacity.POOL, "a warm pool is of one on-demand type", capacity.warm_pool),
    Rule(efa.BATCH_GROUPS, "a Batch environment has no groups if its interfaces have", efa.batch_groups),
    Rule(host.METADATA, "IMDSv2 is required, one hop (two with containers)", host.metadata),
    Rule(host.IMAGE, "the AMI is in the lock file, of its region, and not expired", host.image),
    Rule(exposure.OPEN, "nothing is open to 0.0.0.0/0", exposure.nothing_open),
    Rule(reach.ENDPOINT, "in a closed network each call has an endpoint, each endpoint a caller", reach.reachable),
    Rule(exposure.PLAIN, "load balancers speak TLS", exposure.nothing_plain),
    Rule(permissions.WILDCARD, "no action that writes has a wildcard resource", permissions.no_wildcard),
    Rule(permissions.SIGNER, "a key signs for one duty: builds, or one channel", permissions.one_signer),
    Rule(kept.PRIVATE, "buckets are private, EFS and S3 refuse plain text", kept.private),
    Rule(budget.COST, "what the fleets cost a month is within the budget", budget.within),
    Rule(KEEP, "stateful resources keep their logical ids", keeping.keeps),
    Rule(weights.WEIGHTS, "the rule that weighs a fleet's groups keeps its text", weights.untouched),
)


def lint(templates: Templates, facts: Facts) -> Iterator[Finding]:
    """What the rules find in templates that are deployed together."""
    for rule in RULES:
        yield from rule.check(templates, facts)
