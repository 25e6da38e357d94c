"""`nxpipe infra`: what templates break, what deploying them would do, and what runs in a cluster. None needs CDK."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli import cluster
from nxpipe.pipeline.cli.main import Group
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.exit_codes import FINDINGS

if TYPE_CHECKING:
    from nxpipe.stacks.lint.deployment_plan import Plan
    from nxpipe.stacks.lint.finding import Finding
    from nxpipe.stacks.lint.template import Templates

_REGION = click.option("--region", metavar="REGION", help="The region of templates that do not say theirs.")


@click.group(cls=Group)
def infra() -> None:
    """Check templates, plan deployments, write the manifests of a cluster.

    \b
    Example:
      nxpipe infra plan
    """


infra.add_command(cluster.lock)
infra.add_command(cluster.manifests)


@infra.command()
@click.argument(
    "templates", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="TEMPLATE..."
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PATH",
    help="The project whose budget, lock file and acknowledgements hold.  [default: none]",
)
@_REGION
@click.pass_context
def lint(ctx: click.Context, templates: tuple[Path, ...], config_path: Path | None, region: str | None) -> None:
    """Check any CloudFormation templates by our rules.

    TEMPLATE is a file in JSON or YAML, or a folder that `npx cdk synth` has written; all of them are read as deployed
    together. Without --config, what only a project knows is not judged: its budget, its images, its days of capacity.

    \b
    Example:
      nxpipe infra lint cdk.out --config nxpipe.toml
      nxpipe infra lint trn1-cluster.yaml --region us-east-2
    """
    from nxpipe.pipeline.fleet.templates import templates_of

    console: Console = ctx.obj
    found = _lint(templates_of(templates, region), config_path)
    if console.json:
        console.data([_as_json(each) for each in found])
    elif found:
        console.result(*map(str, found))
    if found:
        console.say(f"{len(found)} finding{'' if len(found) == 1 else 's'}.")
        ctx.exit(FINDINGS.number)
    console.say("Nothing to say against them.")


def _lint(templates: "Templates", config_path: Path | None) -> "list[Finding]":
    from nxpipe.stacks.lint.finding import Facts
    from nxpipe.stacks.lint.rules import lint

    if config_path is None:
        return list(lint(templates, Facts()))
    from nxpipe.pipeline.config import load_config
    from nxpipe.stacks.lint.facts import accepted_by, facts_of
    from nxpipe.stacks.lint.finding import sift

    config = load_config(config_path, os.environ)
    facts = facts_of(config, config_path.parent)
    ours = [each for each in accepted_by(config) if each.rule.startswith("NXP-")]
    return sift(lint(templates, facts), ours, facts.today)


@infra.command()
@click.option(
    "--app",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default="cdk.out",
    show_default=True,
    help="The folder that `npx cdk synth` has written.",
)
@click.option(
    "--from",
    "origin",
    default="deployed",
    show_default=True,
    metavar="DIR|deployed",
    help="What it is compared with: another such folder, or what is deployed.",
)
@_REGION
@config_option
@click.pass_context
def plan(ctx: click.Context, app: Path, origin: str, region: str | None, config_path: Path) -> None:
    """Say what a deployment would add, change, replace, restart and cost.

    Reads templates only. Ends in exit code 33 when something that must be kept would not be.

    \b
    Example:
      npx cdk synth --quiet && nxpipe infra plan
      nxpipe infra plan --from ../main/cdk.out
    """
    from nxpipe.pipeline.fleet.templates import plan_text, templates_of
    from nxpipe.stacks.lint.costs import estimate, load_prices
    from nxpipe.stacks.lint.deployment_plan import plan as planned

    console: Console = ctx.obj
    after = templates_of([app], region)
    before = _before(origin, after, region)
    prices = load_prices()
    costs = estimate(before, prices), estimate(after, prices)
    made = planned(before, after)
    if console.json:
        console.data(_plan_as_json(made, costs[0].monthly, costs[1].monthly))
    else:
        console.page(plan_text(made, *costs))
    lost = _lost(after, config_path)
    for each in lost:
        console.complain(str(each))
    if lost:
        ctx.exit(FINDINGS.number)


def _before(origin: str, after: "Templates", region: str | None) -> "Templates":
    if origin == "deployed":
        from nxpipe.pipeline.fleet.templates import deployed_templates
        from nxpipe.pipeline.util.aws import client

        return deployed_templates(after, client)
    from nxpipe.pipeline.fleet.templates import templates_of

    folder = Path(origin)
    if not folder.is_dir():
        raise click.BadParameter(f"there is no folder {origin!r}; it is that, or `deployed`", param_hint="--from")
    return templates_of([folder], region)


def _lost(after: "Templates", config_path: Path) -> "list[Finding]":
    from nxpipe.pipeline.config import load_config
    from nxpipe.stacks.lint.data_rules import keeps
    from nxpipe.stacks.lint.finding import Facts

    project = load_config(config_path, os.environ, missing_ok=True).project.name
    return list(keeps(after, Facts(project=project)))


def _as_json(finding: "Finding") -> dict[str, object]:
    at = finding.resource
    return {
        "rule": finding.rule,
        "stack": at.stack,
        "id": at.id,
        "type": at.type,
        "path": at.path,
        "place": finding.place,
        "what": finding.what,
        "mend": finding.mend,
    }


def _plan_as_json(plan: "Plan", before: float, after: float) -> dict[str, object]:
    changes = [
        {
            "stack": each.resource.stack,
            "id": each.resource.id,
            "type": each.resource.type,
            "path": each.resource.path,
            "change": each.kind,
            "properties": list(each.properties),
        }
        for each in plan.changes
    ]
    restarts = [{"group": each.group.path, "by": each.by.path, "instances": each.instances} for each in plan.restarts]
    monthly = {"before": round(before, 2), "after": round(after, 2)}
    return {"changes": changes, "restarts": restarts, "forgotten": list(plan.forgotten), "monthly_usd": monthly}
