"""The NXP rules over synthesised templates. Pure functions: they read any template and need no CDK."""

from collections.abc import Iterator
from typing import Final

from nxpipe.stacks.lint import capacity_rules, data_rules, network_rules
from nxpipe.stacks.lint.data_rules import KEEP
from nxpipe.stacks.lint.finding import Facts, Finding, Rule
from nxpipe.stacks.lint.template import Templates

RULES: Final = (
    Rule(
        network_rules.LAYOUT,
        "interfaces of an EFA instance are laid out as its catalogue row says",
        network_rules.layout,
    ),
    Rule(
        network_rules.GROUPS, "security groups are inside the interfaces, and no subnet is", network_rules.groups_inside
    ),
    Rule(
        network_rules.SELF,
        "the EFA security group allows all traffic to and from itself, by group",
        network_rules.talks_to_itself,
    ),
    Rule(network_rules.SUBNET, "instances that talk by EFA are in one subnet", network_rules.one_subnet),
    Rule(
        capacity_rules.BLOCK,
        "a capacity block has its market type, its reservation, no placement group",
        capacity_rules.block,
    ),
    Rule(
        capacity_rules.OPEN,
        "a block's group is empty outside its window, and drained before its end",
        capacity_rules.empty_outside,
    ),
    Rule(capacity_rules.POOL, "a warm pool is of one on-demand type", capacity_rules.warm_pool),
    Rule(
        network_rules.BATCH_GROUPS,
        "a Batch environment has no groups if its interfaces have",
        network_rules.batch_groups,
    ),
    Rule(capacity_rules.METADATA, "IMDSv2 is required, one hop (two with containers)", capacity_rules.metadata),
    Rule(capacity_rules.IMAGE, "the AMI is in the lock file, of its region, and not expired", capacity_rules.image),
    Rule(network_rules.OPEN, "nothing is open to 0.0.0.0/0", network_rules.nothing_open),
    Rule(
        network_rules.ENDPOINT,
        "in a closed network each call has an endpoint, each endpoint a caller",
        network_rules.reachable,
    ),
    Rule(network_rules.PLAIN, "load balancers speak TLS", network_rules.nothing_plain),
    Rule(data_rules.WILDCARD, "no action that writes has a wildcard resource", data_rules.no_wildcard),
    Rule(data_rules.SIGNER, "a key signs for one duty: builds, or one channel", data_rules.one_signer),
    Rule(data_rules.PRIVATE, "buckets are private, EFS and S3 refuse plain text", data_rules.private),
    Rule(capacity_rules.COST, "what the fleets cost a month is within the budget", capacity_rules.within),
    Rule(KEEP, "stateful resources keep their logical ids", data_rules.keeps),
    Rule(data_rules.WEIGHTS, "the rule that weighs a fleet's groups keeps its text", data_rules.untouched),
)


def lint(templates: Templates, facts: Facts) -> Iterator[Finding]:
    """What the rules find in templates that are deployed together."""
    for rule in RULES:
        yield from rule.check(templates, facts)
