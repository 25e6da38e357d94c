"""`nxpipe agent`: `run`, `watch`, `forward` are systemd units of a fleet's instances; `bundle` is what they install."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import click

from nxpipe.pipeline.cli.main import Command, Group
from nxpipe.pipeline.cli.options import (
    config_option,
    device_option,
    limit_option,
    require_device_for_limit,
    store_option,
)
from nxpipe.pipeline.cli.param_types import Count
from nxpipe.pipeline.config.root import serving_fleet
from nxpipe.pipeline.util.console import Console


@click.group(cls=Group)
def agent() -> None:
    """Prepare an instance of a fleet and start its model server.

    \b
    Example:
      nxpipe agent bundle ./packages
      nxpipe agent run --fleet search -- python -m server
    """


@agent.command(cls=Command)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--fleet", required=True, metavar="NAME", help="The serving fleet that this instance belongs to.")
@click.option("--hook", envvar="NXPIPE_HOOK", metavar="NAME", show_envvar=True, help="The lifecycle hook to complete.")
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
    help="The folder of the Neuron devices.",
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
    """Fetch the artifact of the fleet's channel, start the server, and complete the lifecycle hook once it answers.

    If rollouts have given the instance's environment its own channel (FLEET--blue, FLEET--green), that channel applies.

    COMMAND is the server; default: the fleet's `command`, and without one that of the artifact's serving contract, or
    `nxpipe serve`. With `command = []` the agent completes the hook and exits once the artifact is in place. The server
    finds the artifact's folder in NXPIPE_ARTIFACT. An artifact with a serving contract is laid out read-only for its
    runtime, whose versions must be those of the contract, and whose log must show that nothing was compiled.

    Before the server starts, the warm gate checks the devices and runs the artifact's golden inputs on every core, in
    processes of their own. A server that completes text must then answer prompts differently; in service it is
    restarted once it has generated no token for 120 seconds and does not answer a request for one.

    With `updates` of the fleet, the agent follows the channel while the server runs, and takes its next artifact over.

    The server is a child of the agent. The instance goes into service when the server has passed the health checks of
    the fleet's load balancer and answered the fleet's `probe`. SIGTERM and SIGINT go to the server, which is killed
    after the fleet's `draining`; the agent exits with the server's exit code (128 and the number, after a signal).

    Any failure before that (a missing device, a digest mismatch, a missing signature that [signing] requires, missing
    evidence that the channel requires, a server that exits or does not answer within `ready_within`) exits with an
    error and abandons the hook, so that Auto Scaling replaces the instance. Runs on EC2 only.

    \b
    Example:
      nxpipe agent run --fleet search --hook search-ready -- python -m server
    """
    from nxpipe.pipeline.artifacts.channels import ServedModel, environment_of
    from nxpipe.pipeline.artifacts.requirements import artifact_requirements
    from nxpipe.pipeline.artifacts.signing import trust_in
    from nxpipe.pipeline.artifacts.store_url import open_configured_store, open_uncached_store
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.fleet.agent.group import lifecycle_gate
    from nxpipe.pipeline.fleet.agent.run import Agent
    from nxpipe.pipeline.fleet.agent.shadow import ShadowFollower, following
    from nxpipe.pipeline.fleet.agent.supervisor import ServiceManager
    from nxpipe.pipeline.fleet.agent.updates import ServerUpdates
    from nxpipe.pipeline.fleet.agent.watch import FleetLog

    manager = ServiceManager(os.environ)

    @contextmanager
    def step(title: str) -> Iterator[None]:
        manager.notify(STATUS=title)
        with console.step(title):
            yield

    def in_service(name: str) -> None:
        manager.notify(READY="1", STATUS=f"the server of {name} is in service")

    with ExitStack() as running:
        with lifecycle_gate(hook, os.environ) as gate:
            config = load_config(config_path, os.environ)
            served = serving_fleet(config, fleet, "--fleet")
            opened = open_configured_store(store, config_path, console)
            group = environment_of(gate.instance.group, config.project.name, served.name)
            agent = Agent(
                store=opened,
                model=ServedModel.of(config, served, group),
                trust=trust_in(config, config_path.parent, opened, console.say),
                requirements=partial(artifact_requirements, opened, config, config_path.parent),
                folder=folder.absolute(),
                devices=devices,
                command=command or served.command,
                fleet=served,
                words=("--config", str(config_path), *(("--store", store) if store else ())),
            )
            dimensions = {"Project": config.project.name, "Fleet": served.name}
            name = os.environ.get("NXPIPE_LOG")
            log = FleetLog(name, gate.instance.id, gate.instance.region) if name else None
            if config.rollout.shadow is not None and group is not None and log is not None:
                uncached = open_uncached_store(store, config_path, console)
                place = folder.absolute().parent / "shadow"
                follower = ShadowFollower(
                    uncached, served.name, group, served.port, place, dimensions, log, console.say
                )
                running.enter_context(following(follower))  # the server's environment names its control file
            updates = ServerUpdates(
                agent, gate.instance, hook, step, console.say, console.complain, log, dimensions, in_service
            )
            if (server := running.enter_context(updates.first())) is not None:
                gate.require = server.require_alive
            if hook:
                manager.notify(STATUS=f"complete hook {hook}")
        if server is None:
            manager.notify(READY="1", STATUS="the artifact is in place")
            console.result(str(agent.folder))
            return
        code, fault = updates.run(server)
        if fault:
            console.complain(fault)
    click.get_current_context().exit(code)


@agent.command(cls=Command)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--channel", metavar="NAME", help="Only evidence counts that has signatures which this channel trusts.")
@click.option(
    "--cores",
    type=Count(1, 4096),
    default=1,
    show_default=True,
    metavar="N",
    help="The logical cores of this instance.",
)
@device_option
@limit_option
@store_option
@config_option
@click.pass_context
def warm(
    ctx: click.Context,
    folder: Path,
    channel: str | None,
    cores: int,
    device: str | None,
    limit: float,
    store: str | None,
    config_path: Path,
) -> None:
    """Run the golden inputs of a fetched artifact on every core of this instance.

    Each program runs on the inputs of the artifact's emulated evidence in the store, and its outputs are compared with
    the evidence's, by the thresholds of [verify] in nxpipe.toml. With --device they run on each group of cores as large
    as the artifact's tp, in a new process for each rank, with a time limit for collectives. They must not be slower
    than 1.5 times the artifact's proof, nor may driver and runtime be older than the proof's. Without --device they run
    once, on the emulator. The agent runs this command before it starts a server. FOLDER is a folder of `store fetch`.

    \b
    Example:
      nxpipe agent warm /var/lib/nxpipe/artifact --device --cores 2
    """
    from nxpipe.pipeline.artifacts.signing import trusted_evidence
    from nxpipe.pipeline.artifacts.store_url import open_configured_store
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.models.thresholds import Thresholds
    from nxpipe.pipeline.verify.device import DeviceOptions
    from nxpipe.pipeline.verify.warm import warm_up

    console: Console = ctx.obj
    require_device_for_limit(ctx, device)
    config = load_config(config_path, os.environ, missing_ok=True)
    opened = open_configured_store(store, config_path, console)
    machine = DeviceOptions(device, limit=limit) if device else None
    trusts = trusted_evidence(channel, config, config_path.parent, opened)
    done = warm_up(folder, opened, Thresholds.of(config), machine, cores, console.step, trusts)
    if console.json:
        console.data({"programs": done.programs, "copies": done.copies, "sentence": done.sentence})
    else:
        console.result(done.sentence)


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
    help="The program that reports device metrics.",
)
@click.option(
    "--period",
    type=Count(1, 60),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="The interval between reports.",
)
@config_option
@click.pass_obj
def watch(console: Console, fleet: str, group: str, monitor: str, period: int, config_path: Path) -> None:
    """Publish the metrics of neuron-monitor to CloudWatch, for alarms and the dashboard.

    Writes one event to the fleet's log per report: utilisation of the tensor engines, memory of the fullest core,
    device errors, programs that were compiled on the instance although the artifact should contain them, and, for
    `nxpipe cost`, the tokens that its server counts. Runs until it is stopped; runs on EC2 only.

    \b
    Example:
      nxpipe agent watch --fleet search --log /nxpipe/demo/search
    """
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.fleet.agent.group import this_instance
    from nxpipe.pipeline.fleet.agent.watch import FleetLog, InstanceUse, watch
    from nxpipe.pipeline.fleet.monitor.source import Compilers

    config = load_config(config_path, os.environ)
    served = serving_fleet(config, fleet, "--fleet")
    instance = this_instance(os.environ)
    log = FleetLog.open(group, instance.id, instance.region)
    dimensions = {"Project": config.project.name, "Fleet": served.name}
    use = InstanceUse(instance.type, served.port)
    watch(monitor, period, dimensions, log, Compilers(Path("/proc")), use, console.say)


@agent.command(cls=Command)
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
    "--unit",
    "units",
    multiple=True,
    required=True,
    metavar="NAME",
    help="A systemd unit whose journal is forwarded; repeatable.",
)
@click.option(
    "--position",
    envvar="NXPIPE_FORWARDED",
    type=click.Path(dir_okay=False, path_type=Path),
    default="/var/lib/nxpipe-logs/position.json",
    show_default=True,
    show_envvar=True,
    help="The file that keeps the position in the journal.",
)
@click.option("--once", is_flag=True, help="Forward what the journal has, and exit.")
@click.pass_obj
def forward(console: Console, group: str, units: tuple[str, ...], position: Path, once: bool) -> None:
    """Forward the journal of units, and the kernel's warnings, to CloudWatch Logs.

    Each unit has a stream INSTANCE/UNIT in the fleet's log group. Runs until it is stopped, and then delivers the rest
    of the journal. A restart continues after the last delivered line. Runs on EC2 only.

    \b
    Example:
      nxpipe agent forward --log /nxpipe/demo/search --unit nxpipe-agent.service
    """
    from nxpipe.pipeline.fleet.agent.group import this_instance
    from nxpipe.pipeline.fleet.agent.logs import open_forwarder

    instance = this_instance(os.environ)
    open_forwarder(group, instance.id, instance.region, units, position, console.say).run(once=once)


@agent.command(cls=Command)
@click.argument("packages", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--fetch",
    metavar="WHEEL",
    help="Download the wheels into PACKAGES first, with pip: those that this wheel of nxpipe depends on, and itself. "
    "A version on the index, such as nxpipe==0.1.0, may take its place.",
)
@store_option
@config_option
@click.pass_obj
def bundle(console: Console, packages: Path, fetch: str | None, store: str | None, config_path: Path) -> None:
    """Upload the agent to the store, for instances without access to a package index.

    PACKAGES is a folder with the wheels of nxpipe and its dependencies, and with .deb files that the AMI lacks. The
    wheels are for the Python of the fleets' AMI, which nxpipe.amis.lock names, and not for the one that runs nxpipe;
    --fetch downloads these. A folder with a wheel for another Python or platform, or without a dependency, is refused.

    Writes the bundle's digest to nxpipe.agent.lock beside nxpipe.toml. The stacks read the lock file, and instances
    install nothing else. The digest is the same for every store.

    \b
    Example:
      nxpipe agent bundle packages --fetch dist/nxpipe-0.1.0-py3-none-any.whl
      nxpipe agent bundle packages --store s3://BUCKET
    """
    from nxpipe.pipeline.artifacts.store_url import open_uncached_store
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.config.locks import read_lock
    from nxpipe.pipeline.fleet.agent.wheels import Bundle, fetch_wheels
    from nxpipe.pipeline.util.files import write_whole

    config = load_config(config_path, os.environ, missing_ok=True)
    amis = read_lock(config_path.parent / config.amis.lock)
    software = amis.software(config.amis, config.project.region)
    if fetch:
        with console.step(f"download wheels for Python {software.python}"):
            fetch_wheels(fetch, packages, software)
    elif not packages.is_dir():
        raise click.BadParameter(f"there is no folder {packages}; pass --fetch to create it", param_hint="PACKAGES")
    agent_bundle = Bundle.of(packages, software)
    new = agent_bundle.put(open_uncached_store(store, config_path, console))
    lock = config_path.parent / "nxpipe.agent.lock"
    write_whole(lock, agent_bundle.lock().encode())
    if console.json:
        console.data(
            {
                "sha256": agent_bundle.sha256,
                "path": agent_bundle.path,
                "python": agent_bundle.python,
                "packages": list(agent_bundle.packages),
                "new": new,
            }
        )
        return
    console.result(agent_bundle.sha256)
    console.say(
        f"  {len(agent_bundle.packages)} packages for Python {agent_bundle.python}, "
        f"{'uploaded to' if new else 'already in'} the store; wrote {lock}"
    )
