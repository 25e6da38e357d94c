"""`nxpipe agent run` and `watch`, what the units of a fleet's instances start, and `bundle`, what they install."""

import os
from pathlib import Path

import click

from nxpipe.pipeline.cli.main import Command, Group
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.config.fleets import serving_fleet
from nxpipe.pipeline.util.console import Console


@click.group(cls=Group)
def agent() -> None:
    """Make an instance of a fleet ready, and start its server.

    \b
    Example:
      nxpipe agent bundle ./packages
      nxpipe agent run --fleet search -- python -m server
    """


@agent.command(cls=Command)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--fleet", required=True, metavar="NAME", help="The serving fleet that this instance belongs to.")
@click.option(
    "--hook", envvar="NXPIPE_HOOK", metavar="NAME", show_envvar=True, help="The lifecycle hook to answer, if any waits."
)
@click.option(
    "--to",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default="/var/lib/nxpipe/artifact",
    show_default=True,
    help="The folder for the artifact.",
)
@click.option(
    "--devices",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default="/dev",
    show_default=True,
    help="The folder that has the Neuron devices.",
)
@store_option
@config_option
@click.pass_obj
def run(
    console: Console,
    command: tuple[str, ...],
    fleet: str,
    hook: str | None,
    folder: Path,
    devices: Path,
    store: str | None,
    config_path: Path,
) -> None:
    """Fetch what the fleet's channel serves, check the machine, answer its lifecycle hook, become the server.

    If rollouts have given the instance's colour a channel of its own (FLEET--blue, FLEET--green), that one counts.

    COMMAND is the server; without one it is the fleet's own `command`, and without that the agent ends when the
    artifact is there. The server finds the artifact's folder in NXPIPE_ARTIFACT.

    Whatever is wrong (a device is missing, a digest does not fit, a signature that [signing] asks for) ends the command
    with an error and abandons the hook: Auto Scaling then tries another instance. Runs on EC2 only.

    \b
    Example:
      nxpipe agent run --fleet search --hook search-ready -- python -m server
    """
    from nxpipe.pipeline.artifacts.colours import colour_of
    from nxpipe.pipeline.artifacts.signing import trust_in
    from nxpipe.pipeline.artifacts.store_url import open_configured_store
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.fleet.agent.artifact import Wish
    from nxpipe.pipeline.fleet.agent.hook import gate
    from nxpipe.pipeline.fleet.agent.run import Agent

    with gate(hook, os.environ) as instance:
        config = load_config(config_path, os.environ)
        served = serving_fleet(config, fleet, "--fleet")
        opened = open_configured_store(store, config_path, console)
        agent = Agent(
            store=opened,
            wish=Wish.of(config, served, colour_of(instance.group, config.project.name, served.name)),
            trust=trust_in(config, config_path.parent, opened, console.say),
            folder=folder.absolute(),
            devices=devices,
            command=command or served.command,
        )
        agent.prepare(instance, console.step)
    if agent.command:
        agent.serve()
    console.result(str(agent.folder))


@agent.command(cls=Command)
@click.option("--fleet", required=True, metavar="NAME", help="The serving fleet that this instance belongs to.")
@click.option(
    "--log",
    "group",
    envvar="NXPIPE_LOG",
    required=True,
    metavar="NAME",
    show_envvar=True,
    help="The fleet's log group.",
)
@click.option(
    "--monitor",
    metavar="PROGRAM",
    default="/opt/aws/neuron/bin/neuron-monitor",
    show_default=True,
    help="The program that reports about the devices.",
)
@click.option(
    "--period", type=click.IntRange(1, 60), default=30, show_default=True, metavar="SECONDS", help="Between reports."
)
@config_option
@click.pass_obj
def watch(console: Console, fleet: str, group: str, monitor: str, period: int, config_path: Path) -> None:
    """Send what neuron-monitor reports to CloudWatch, where alarms and the dashboard look for it.

    Of each report one event of the fleet's log: how busy the tensor engines are, how full the fullest core is, what
    the devices failed, and programs that were compiled here although their artifact should have held them. Goes on
    until it is ended; runs on EC2 only.

    \b
    Example:
      nxpipe agent watch --fleet search --log /nxpipe/demo/search
    """
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.fleet.agent.instance import this_instance
    from nxpipe.pipeline.fleet.agent.watch import Compilers, FleetLog, watch

    config = load_config(config_path, os.environ)
    served = serving_fleet(config, fleet, "--fleet")
    instance = this_instance(os.environ)
    log = FleetLog.open(group, instance.id, instance.region)
    dimensions = {"Project": config.project.name, "Fleet": served.name}
    watch(monitor, period, dimensions, log, Compilers(Path("/proc")), console.say)


@agent.command(cls=Command)
@click.argument("packages", type=click.Path(exists=True, file_okay=False, path_type=Path))
@store_option
@config_option
@click.pass_obj
def bundle(console: Console, packages: Path, store: str | None, config_path: Path) -> None:
    """Put the agent into the store, for instances without a way to a package index.

    PACKAGES is a folder with the wheels of nxpipe and of all that it needs, for the Python of the fleet's AMI, and with
    the .deb files of what the AMI lacks: amazon-efs-utils, which mounts the compile cache, is not in every one. The
    bundle is named by its digest, which is written into nxpipe.agent.lock beside nxpipe.toml: the stacks read it, and
    instances install nothing else. The digest is the same for every store.

    \b
    Example:
      pip wheel --wheel-dir packages nxpipe
      nxpipe agent bundle packages
    """
    from nxpipe.pipeline.artifacts.store_url import open_uncached_store
    from nxpipe.pipeline.fleet.agent.bundle import Bundle, NoAgent

    try:
        made = Bundle.of(packages)
    except NoAgent as missing:
        raise click.BadParameter(str(missing), param_hint="PACKAGES") from missing
    new = made.put(open_uncached_store(store, config_path, console))
    lock = config_path.parent / "nxpipe.agent.lock"
    lock.write_text(made.lock())
    if console.json:
        console.data({"sha256": made.sha256, "path": made.path, "packages": list(made.packages), "new": new})
        return
    console.result(made.sha256)
    console.say(f"  {len(made.packages)} packages, {'put into' if new else 'already in'} the store; see {lock}")
