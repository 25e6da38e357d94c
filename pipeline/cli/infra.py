"""`nxpipe infra`: check the account, set up GitHub, templates, deployment plans, clusters, manifests."""

import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from nxpipe.pipeline.cli.main import Group
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.exit_codes import FINDINGS
from nxpipe.pipeline.util.text import style, table, wrapped_table

if TYPE_CHECKING:
    from nxpipe.pipeline.config.locks import ClusterLock
    from nxpipe.pipeline.fleet.preflight_rules import PreflightReport
    from nxpipe.stacks.lint.deployment_plan import Plan
    from nxpipe.stacks.lint.finding import Finding
    from nxpipe.stacks.lint.template import Templates


_REGION = click.option("--region", metavar="REGION", help="The region of templates without one.")


@click.group(cls=Group)
def infra() -> None:
    """Check the AWS account, lint templates, plan deployments, write the manifests of a cluster.

    \b
    Example:
      nxpipe infra plan
    """


@infra.command()
@config_option
@click.pass_obj
def github(console: Console, config_path: Path) -> None:
    """Print the script that sets up the GitHub repository of [release].

    It creates the environments of the release workflow and sets its variables with gh, from outputs of the stacks
    "storage" and "release", which must be deployed. It may be repeated. This command itself calls neither GitHub nor
    AWS.

    \b
    Example:
      nxpipe infra github
      nxpipe infra github | bash
    """
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.fleet.github import setup_script

    script = setup_script(load_config(config_path, os.environ))
    if console.json:
        console.data({"script": script})
    else:
        console.page(script.removesuffix("\n"))


@infra.command()
@click.option("--region", metavar="REGION", help="The region to check.  [default: the project's]")
@config_option
@click.pass_context
def preflight(ctx: click.Context, region: str | None, config_path: Path) -> None:
    """Check what the AWS account lacks for the deployment.

    Reads quotas, offerings of instance types by zone, images, the store's bucket and channels, reservations and more,
    as far as nxpipe.toml needs them, and changes nothing. A check without permission is a row in state "unknown", with
    the missing action. Exits with code 33 if a row fails.

    \b
    Example:
      nxpipe infra preflight
      nxpipe infra preflight --region us-west-2 --json
    """
    from nxpipe.pipeline.fleet.preflight import preflight as examine

    console: Console = ctx.obj
    report = examine(config_path, region, console.step)
    if console.json:
        console.data(_preflight_as_json(report))
    else:
        console.page(_preflight_table(report))
    counts = {state: report.count(state) for state in ("ok", "fails", "unknown")}
    console.say(f"{counts['fails']} of {len(report.rows)} checks fail, {counts['unknown']} are unknown.")
    ctx.exit(report.exit_code.number)


_COLOURS: Final = {"ok": "green", "fails": "red", "unknown": "yellow"}


def _preflight_table(report: "PreflightReport") -> str:
    """Obstacles first. On a terminal wide texts are wrapped; elsewhere a row is one line."""
    header = ("STATE", "CHECK", "WHAT", "FOUND", "NEEDED", "REMEDY")
    ordered = sorted(report.rows, key=lambda row: ("fails", "unknown", "ok").index(row.state))
    rows = [
        (style(row.state, fg=_COLOURS[row.state]), row.check, row.what, row.found, row.needed, row.remedy)
        for row in ordered
    ]
    if sys.stdout.isatty():
        return wrapped_table(header, rows, shutil.get_terminal_size().columns)
    return table(header, rows)


def _preflight_as_json(report: "PreflightReport") -> dict[str, object]:
    return {
        "format": "nxpipe.preflight/1",
        "account": report.account,
        "region": report.region,
        "rows": [asdict(row) for row in report.rows],
    }


@infra.command()
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


@infra.command()
@click.option(
    "--app",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
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

    Reads templates only. Exits with code 33 if the deployment would delete a resource that must be retained.

    \b
    Example:
      npx cdk synth --quiet && nxpipe infra plan
      nxpipe infra plan --from ../main/cdk.out
    """
    from nxpipe.pipeline.fleet.infrastructure import plan_text, templates_of
    from nxpipe.stacks.lint.costs import estimate, load_prices
    from nxpipe.stacks.lint.deployment_plan import plan as planned

    console: Console = ctx.obj
    after = templates_of([app], region)
    before = _baseline(origin, after, region)
    prices = load_prices()
    costs = estimate(before, prices), estimate(after, prices)
    changes = planned(before, after)
    if console.json:
        console.data(_plan_as_json(changes, costs[0].monthly, costs[1].monthly))
    else:
        console.page(plan_text(changes, *costs))
    deletions = _deletion_findings(after, config_path)
    for finding in deletions:
        console.complain(str(finding))
    if deletions:
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


def _plan_as_json(plan: "Plan", before: float, after: float) -> dict[str, object]:
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
    monthly = {"before": round(before, 2), "after": round(after, 2)}
    return {"changes": changes, "restarts": restarts, "forgotten": list(plan.forgotten), "monthly_usd": monthly}


@infra.command()
@config_option
@click.pass_obj
def lock(console: Console, config_path: Path) -> None:
    """Resolve the versions of the EKS cluster and write its lock file.

    Locks the node releases and add-on versions that EKS recommends today, and the digests of the images in
    [cluster.images]. `cdk synth` and `nxpipe infra manifests` read the lock file and make no calls to AWS. Commit it.

    \b
    Example:
      nxpipe infra lock
    """
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.config.locks import cluster_of
    from nxpipe.pipeline.fleet.infrastructure import find_cluster
    from nxpipe.pipeline.util.aws import client
    from nxpipe.pipeline.util.files import write_whole

    config = load_config(config_path, os.environ)
    cluster, region = cluster_of(config, str(config_path))
    images = cluster.images.all if cluster.images else ()
    with console.step(f"Kubernetes {cluster.kubernetes} in {region}"):
        resolved = find_cluster(region, cluster.kubernetes, images, client)
    path = config_path.parent / cluster.lock
    write_whole(path, resolved.text().encode())
    _show_lock(console, path, resolved)


def _show_lock(console: Console, path: Path, cluster_lock: "ClusterLock") -> None:
    if console.json:
        console.data({"file": str(path), **cluster_lock.model_dump(mode="json")})
        return
    rows = [("nodes", "neuron", cluster_lock.neuron.release), ("nodes", "system", cluster_lock.system.release)]
    rows += [("add-on", name, version) for name, version in sorted(cluster_lock.addons.items())]
    rows += [("image", name, digest) for name, digest in sorted(cluster_lock.images.items())]
    console.page(table(("KIND", "NAME", "VERSION"), rows))
    console.say(f"Wrote {path}.")


@infra.command()
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The output folder; files that this command wrote before are replaced.",
)
@config_option
@click.pass_obj
def manifests(console: Console, out: Path, config_path: Path) -> None:
    """Write the Kubernetes manifests of the cluster.

    One file each for the device plugins of Neuron and EFA, the Neuron scheduler, the service account for artifacts,
    and Karpenter's node pools. Images are pinned by the digests in the lock file. Nothing is applied.

    \b
    Example:
      nxpipe infra manifests --out manifests && kubectl apply -f manifests/neuron-device-plugin.yaml
    """
    from nxpipe.pipeline.config import ConfigInvalid, Fault, load_config
    from nxpipe.pipeline.config.locks import cluster_of, read_cluster_lock
    from nxpipe.pipeline.fleet.kubernetes.manifests import HEAD, write_manifests
    from nxpipe.pipeline.fleet.kubernetes.manifests import manifests as render

    config = load_config(config_path, os.environ)
    cluster, _ = cluster_of(config, str(config_path))
    if cluster.images is None:
        expected = "the images of the manifests, in a registry of ECR"
        raise ConfigInvalid([Fault(str(config_path), None, "cluster.images", "no such table", expected)])
    files = render(config, cluster, cluster.images, read_cluster_lock(config, config_path.parent / cluster.lock))
    write_manifests(out, files, HEAD)
    if console.json:
        console.data({"folder": str(out), "files": list(files)})
    else:
        console.result(*(str(out / name) for name in files))
    console.say(f"{len(files)} files.")
