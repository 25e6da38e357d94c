"""The rule that weighs a fleet's groups keeps its text.

Its weights belong to rollouts. CloudFormation touches a resource whose own text has changed, if only by a tag, and
would put back the weights of the first day, in the middle of a shift, too. So the text is written down here.
"""

from collections.abc import Iterator
from typing import Final

from nxpipe.stacks.reading import Resource, Template, Templates
from nxpipe.stacks.reading.template import Properties
from nxpipe.stacks.rules.finding import Facts, Finding

WEIGHTS: Final = "NXP-KEEP-2"

RULE: Final = "FrontWeights610644FE"
TEXT: Final[Properties] = {
    "Actions": [
        {
            "ForwardConfig": {
                "TargetGroupStickinessConfig": {"Enabled": False},
                "TargetGroups": [
                    {"TargetGroupArn": {"Ref": "Frontblue4D7292A6"}, "Weight": 100},
                    {"TargetGroupArn": {"Ref": "Frontgreen6BD8991D"}, "Weight": 0},
                ],
            },
            "Type": "forward",
        }
    ],
    "Conditions": [{"Field": "path-pattern", "PathPatternConfig": {"Values": ["*"]}}],
    "ListenerArn": {"Ref": "FrontBalancerListener5590D880"},
    "Priority": 100,
}


def untouched(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for template in all_.all if facts.project else ():
        if template.stack.startswith(f"{facts.project}-serve-"):
            yield from _changed(template)


def _changed(template: Template) -> Iterator[Finding]:
    rule = template.resources.get(RULE)
    if rule is None:
        type_ = "AWS::ElasticLoadBalancingV2::ListenerRule"
        rule = Resource(template.stack, template.region, RULE, type_, f"{template.stack}/{RULE}", {})
    differing = sorted(key for key in {*TEXT, *rule.properties} if TEXT.get(key) != rule.properties.get(key))
    if differing:
        what = "the rule's text has changed, and its deployment would put back the weights of the first day"
        mend = "give it its old text back; weights are moved by rollouts alone"
        yield Finding(WEIGHTS, rule, ", ".join(differing), what, mend)
