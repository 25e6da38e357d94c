"""`nxpipe infra lint` and `nxpipe infra plan`: rules for templates, and what a deployment changes."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.exit_codes import FINDINGS

if TYPE_CHECKING:
    from nxpipe.stacks.lint.costs import Estimate
    from nxpipe.stacks.lint.deployment_plan import Plan
    from nxpipe.stacks.lint.finding import Finding
    from nxpipe.stacks.lint.template import Templates

_REGION = click.option("--region", metavar="REGION", help="The region of templates without one.")


@click.command(cls=Command)
@click.argument(
    "templates", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="TEMPLATE..."
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PATH",
    help="The project whose budget, lock file and acknowledgements apply.  [default: none]",
)
@_REGION
@click.pass_context
def lint(ctx: click.Context, templates: tuple[Path, ...], config_path: Path | None, region: str | None) -> None:
    """Check CloudFormation templates against the NXP rules.

    TEMPLATE is a JSON or YAML file, or an output folder of `npx cdk synth`. All templates are checked as one
    deployment. Without --config, rules that depend on the project (budget, images, capacity blocks) are skipped. Exits
    with code 33 if there are findings.

    \b
    Example:
      nxpipe infra lint cdk.out --config nxpipe.toml
      nxpipe infra lint trn1-cluster.yaml --region us-east-2
    """
    from nxpipe.pipeline.fleet.infrastructure import templates_of

    console: Console = ctx.obj
    findings = _lint(templates_of(templates, region), config_path)
    if console.json:
        console.data([_as_json(finding) for finding in findings])
    elif findings:
        console.result(*map(str, findings))
    if findings:
        console.say(f"{len(findings)} finding{'' if len(findings) == 1 else 's'}.")
        ctx.exit(FINDINGS.number)
    console.say("No findings.")


def _lint(templates: "Templates", config_path: Path | None) -> "list[Finding]":
    from nxpipe.stacks.lint.finding import Facts
    from nxpipe.stacks.lint.rules import lint

    if config_path is None:
        return list(lint(templates, Facts()))
    from nxpipe.pipeline.config import load_config
    from nxpipe.stacks.lint.finding import sift
    from nxpipe.stacks.lint.rules import accepted_by, facts_of

    config = load_config(config_path, os.environ)
    facts = facts_of(config, config_path.parent)
    accepted = [entry for entry in accepted_by(config) if entry.rule.startswith("NXP-")]
    return sift(lint(templates, facts), accepted, facts.today)


def _as_json(finding: "Finding") -> dict[str, object]:
    resource = finding.resource
    return {
        "rule": finding.rule,
        "stack": resource.stack,
        "id": resource.id,
        "type": resource.type,
        "path": resource.path,
        "place": finding.place,
        "what": finding.what,
        "mend": finding.remedy,
    }


class _SynthesizedFolder(click.Path):
    """The output of CDK; a missing one was not written yet."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        folder = Path(str(super().convert(value, param, ctx)))
        if not folder.exists():
            raise click.UsageError(f"{folder}: no synthesized templates yet; run: npx cdk synth --quiet", ctx)
        return folder


@click.command(cls=Command)
@click.option(
    "--app",
    type=_SynthesizedFolder(file_okay=False, path_type=Path),
    default="cdk.out",
    show_default=True,
    help="The output folder of `npx cdk synth`.",
)
@click.option(
    "--from",
    "origin",
    default="deployed",
    show_default=True,
    metavar="DIR|deployed",
    help="The baseline: another output folder, or the deployed stacks.",
)
@_REGION
@config_option
@click.pass_context
def plan(ctx: click.Context, app: Path, origin: str, region: str | None, config_path: Path) -> None:
    """Show the resources that a deployment would add, change, replace and restart, and its cost.

    Reads templates, and the values that deployed stacks have from other stacks: a stack with an old value is listed.
    Exits with code 33 if the deployment would delete a resource that must be retained.

    \b
    Example:
      npx cdk synth --quiet && nxpipe infra plan
      nxpipe infra plan --from ../main/cdk.out
    """
    from nxpipe.pipeline.config.prices import load_prices
    from nxpipe.pipeline.fleet.infrastructure import plan_text, stale_values, templates_of
    from nxpipe.pipeline.util.aws import client
    from nxpipe.stacks.lint.costs import estimate
    from nxpipe.stacks.lint.deployment_plan import plan as planned

    console: Console = ctx.obj
    after = templates_of([app], region)
    before = _baseline(origin, after, region)
    prices = load_prices()
    costs = estimate(before, prices), estimate(after, prices)
    changes = planned(before, after)
    stale = stale_values(before, client) if origin == "deployed" else []
    if console.json:
        outdated = [asdict(value) for value in stale]
        console.data(_plan_as_json(changes, *costs) | {"stale": outdated})
    else:
        console.page(plan_text(changes, *costs, stale))
    deletions = _deletion_findings(after, config_path)
    if deletions:
        console.complain(*map(str, deletions), code=FINDINGS)
        ctx.exit(FINDINGS.number)


def _baseline(origin: str, after: "Templates", region: str | None) -> "Templates":
    if origin == "deployed":
        from nxpipe.pipeline.fleet.infrastructure import deployed_templates
        from nxpipe.pipeline.util.aws import client

        return deployed_templates(after, client)
    from nxpipe.pipeline.fleet.infrastructure import templates_of

    folder = Path(origin)
    if not folder.is_dir():
        raise click.BadParameter(f"there is no folder {origin!r}; pass a folder or `deployed`", param_hint="--from")
    return templates_of([folder], region)


def _deletion_findings(after: "Templates", config_path: Path) -> "list[Finding]":
    from nxpipe.pipeline.config import load_config
    from nxpipe.stacks.lint.data_rules import keeps_logical_ids
    from nxpipe.stacks.lint.finding import Facts

    project = load_config(config_path, os.environ, missing_ok=True).project.name
    return list(keeps_logical_ids(after, Facts(project=project)))


def _plan_as_json(plan: "Plan", before: "Estimate", after: "Estimate") -> dict[str, object]:
    changes = [
        {
            "stack": change.resource.stack,
            "id": change.resource.id,
            "type": change.resource.type,
            "path": change.resource.path,
            "change": change.kind,
            "properties": list(change.properties),
        }
        for change in plan.changes
    ]
    restarts = [
        {"group": restart.group.path, "by": restart.by.path, "instances": restart.instances}
        for restart in plan.restarts
    ]
    refused = [{"resource": entry.resource.path, "importers": list(entry.importers)} for entry in plan.refused]
    least, most = after.scaled
    monthly = {
        "before": round(before.monthly, 2),
        "after": round(after.monthly, 2),
        "after_least": round(least, 2),
        "after_most": round(most, 2),
    }
    return {
        "changes": changes,
        "restarts": restarts,
        "refused": refused,
        "forgotten": list(plan.forgotten),
        "monthly_usd": monthly,
    }
