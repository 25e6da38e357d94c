"""`nxpipe infra`: the group of the commands on the AWS account, templates, deployments and clusters."""

import click

from nxpipe.pipeline.cli.main import LazyGroup

INFRA_COMMANDS = {
    "github": (
        "nxpipe.pipeline.cli.infra.github:github",
        "Print the script that sets up the GitHub repository of [release].",
    ),
    "lint": (
        "nxpipe.pipeline.cli.infra.templates:lint",
        "Check CloudFormation templates against the NXP rules.",
    ),
    "lock": (
        "nxpipe.pipeline.cli.infra.cluster:lock",
        "Resolve the versions of the EKS cluster and write its lock file.",
    ),
    "manifests": (
        "nxpipe.pipeline.cli.infra.cluster:manifests",
        "Write the Kubernetes manifests of the cluster.",
    ),
    "plan": (
        "nxpipe.pipeline.cli.infra.templates:plan",
        "Show the resources that a deployment would add, change, replace and restart, and its cost.",
    ),
    "preflight": (
        "nxpipe.pipeline.cli.infra.preflight:preflight",
        "Check what the AWS account lacks for the deployment.",
    ),
    "smoke": (
        "nxpipe.pipeline.cli.infra.smoke:smoke",
        "Deploy one inf2.xlarge, send it one request, and delete everything.",
    ),
}


class _OneLineGroup(LazyGroup):
    """A lazy group that lists each command on one line, cut to the width of the terminal."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        limit = formatter.width - 6 - max(map(len, INFRA_COMMANDS))
        rows = [
            (name, click.Command(name, help=text).get_short_help_str(limit))
            for name, (_, text) in sorted(INFRA_COMMANDS.items())
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=_OneLineGroup, homes=INFRA_COMMANDS)
def infra() -> None:
    """Check the AWS account, lint templates, plan deployments, write the manifests of a cluster.

    \b
    Example:
      nxpipe infra plan
    """
