"""The guards of the app: our rules and cdk-nag's packs, judged when CDK synthesises."""

import sys
from pathlib import Path

from aws_cdk import App, Validations
from cdk_nag import AwsSolutionsChecks, NIST80053R5Checks

from nxpipe.pipeline.config import Config
from nxpipe.stacks.acknowledged import ACKNOWLEDGED
from nxpipe.stacks.costs import estimate, load_prices
from nxpipe.stacks.facts import accepted_by, facts_of
from nxpipe.stacks.reading import Templates
from nxpipe.stacks.rules.plugin import Guards


def guard(app: App, config: Config, folder: Path) -> None:
    """From now on a finding fails the synthesis, and each synthesis says on stderr what the templates cost."""
    facts = facts_of(config, folder)
    packs = (AwsSolutionsChecks(app), NIST80053R5Checks(app))

    def tell(templates: Templates) -> None:
        found = estimate(templates, facts.prices or load_prices())
        if found.lines:
            sys.stderr.write(f"{found}\n")

    Validations.of(app).add_plugins(Guards(facts, [*ACKNOWLEDGED, *accepted_by(config)], packs, tell))
