"""The CDK app: nxpipe.toml to stacks.

`npx cdk synth` reads the file in the working directory, `npx cdk synth -c config=PATH` another one. A stack's module is
imported only if the file needs it, because CDK's modules load slowly.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from aws_cdk import App, Environment, Stack, Tags

from nxpipe.pipeline.config import Config, ConfigInvalid, ServingFleet, TrainingFleet
from nxpipe.pipeline.config.cloud import ExistingNetwork
from nxpipe.pipeline.config.load import check_placement, has_network, load, read_source, zones_of
from nxpipe.pipeline.config.locks import AmiLock, require_driver
from nxpipe.pipeline.config.prices import load_prices
from nxpipe.pipeline.util.exit_codes import CONFIGURATION, FINDINGS
from nxpipe.pipeline.util.text import for_log
from nxpipe.stacks.handles import EndpointHandle, ObserveHandle, ReleaseHandle, ServeHandle, StoreHandle, TrainHandle
from nxpipe.stacks.lint.egress import Unreachable
from nxpipe.stacks.lint.validation import guard
from nxpipe.stacks.locks import (
    NoAgentLocked,
    fleet_image,
    fleet_python,
    fleet_root_device,
    lock_of,
    locked_agent,
    training_image,
)
from nxpipe.stacks.names import SMOKE_TAG
from nxpipe.stacks.project import Site, store_prefix, warn_of_image
from nxpipe.stacks.references import STRONG
from nxpipe.stacks.storage import CacheStack, StoreStack
from nxpipe.stacks.user_data.scripts import NoPublicKey, TooLong

# What `nxpipe init` writes, and so the flags that the stacks are tested with.
_CDK_JSON: Final = Path(__file__).parents[1] / "pipeline/templates/cdk.json"
# Stack traces of constructs would name paths of this machine. The CDK CLI warns of this key in cdk.json.
CONTEXT: Final = {"aws:cdk:disable-creation-stack-traces": True}


def run() -> int:
    return main(App(context=CONTEXT, post_cli_context=STRONG))


def main(app: App) -> int:
    if flags := [*unset_flags(app)]:
        print_errors(
            [
                f"cdk.json does not set {len(flags)} of the feature flags that the stacks require, such as {flags[0]}; "
                "`nxpipe init --dry-run` shows the difference"
            ]
        )
        return CONFIGURATION.number
    path = Path(app.node.try_get_context("config") or "nxpipe.toml")
    try:
        config = deployable(path)
        add_stacks(app, config, path.parent)
        guard(app, config, path.parent)
    except (ConfigInvalid, NoAgentLocked, NoPublicKey, TooLong, Unreachable) as error:
        print_errors(getattr(error, "lines", [str(error)]))
        return CONFIGURATION.number
    try:
        app.synth()
    except RuntimeError as error:  # jsii raises this type for every error of CDK
        if not str(error).startswith("ValidationFailed"):
            raise
        print_errors(str(error).split("\n"))
        return FINDINGS.number
    return 0


def unset_flags(app: App) -> Iterator[str]:
    """The feature flags of CDK that the app does not have, or with another value: the stacks would differ."""
    given = app.node.get_all_context()
    for name, value in json.loads(_CDK_JSON.read_text(encoding="utf-8"))["context"].items():
        if name.startswith("@aws-cdk") and given.get(name) != value:
            yield name


def print_errors(lines: Sequence[str]) -> None:
    """Print lines to stderr. They are escaped, because they quote names from nxpipe.toml and templates."""
    sys.stderr.writelines(f"{for_log(line)}\n" for line in lines)


def deployable(path: Path) -> Config:
    """The configuration, also checked for the settings that only a deployment requires."""
    source = read_source(path, os.environ)
    config = load(source)
    if faults := [source.fault(finding) for finding in check_placement(config)]:
        raise ConfigInvalid(faults)
    return config


def add_stacks(app: App, config: Config, folder: Path) -> None:
    """Add the stacks of a configuration to the app.

    `folder` is the folder of nxpipe.toml; relative paths start there. Without `account` and `region` the templates
    deploy to the account and region of the current credentials.
    """
    name = config.project.name
    env = Environment(account=config.project.account, region=config.project.region)
    store = StoreStack(app, f"{name}-storage", project=name, env=env, termination_protection=True).handle
    release = add_release(app, config, store, env)
    if has_network(config):
        from nxpipe.stacks.network import Endpoints, NetworkStack

        network = NetworkStack(
            app, f"{name}-network", project=name, network=config.network, zones=zones_of(config), env=env
        )
        add_fleets(Site(app, config, folder, env, store, network.handle), release)
        if is_smoke(app):
            mark_smoke(app)
        if not isinstance(config.network, ExistingNetwork):
            callers = [child for child in app.node.children if isinstance(child, Stack)]
            Endpoints(network, "Endpoints", network=network.handle, callers=callers)


def is_smoke(app: App) -> bool:
    """True for the project of `nxpipe infra smoke`: its stacks are marked, its fleet has a hard stop and a probe."""
    return str(app.node.try_get_context(SMOKE_TAG)).lower() == "true"


def mark_smoke(app: App) -> None:
    """Tag stacks and resources: only what has the tag is deleted."""
    Tags.of(app).add(SMOKE_TAG, "true")
    for stack in app.node.children:
        if isinstance(stack, Stack):
            stack.add_stack_tag(SMOKE_TAG, "true")


def add_release(app: App, config: Config, store: StoreHandle, env: Environment) -> ReleaseHandle | None:
    if not config.release:
        return None
    from nxpipe.stacks.iam import ReleaseStack

    stack = ReleaseStack(
        app,
        f"{config.project.name}-release",
        project=config.project.name,
        release=config.release,
        store=store,
        prefix=store_prefix(config),
        signing=config.signing,
        fleets=[fleet for fleet in config.fleets if isinstance(fleet, ServingFleet)],
        env=env,
    )
    return stack.handle


def add_fleets(site: Site, release: ReleaseHandle | None) -> None:
    lock = lock_of(site.config, site.folder)
    add_farm(site, release)
    add_prove(site, lock, release)
    training = add_training(site, lock)
    serving = add_serving(site, lock)
    add_cluster(site)
    hosted = add_endpoints(site)
    if is_smoke(site.app):
        add_probe(site, serving)
    if serving or hosted or training:
        add_rollouts(site, serving, add_alarms(site, serving, hosted, training), release)


def add_farm(site: Site, release: ReleaseHandle | None) -> None:
    if site.config.farm:
        from nxpipe.stacks.build_farm import FarmStack

        FarmStack(
            site.app,
            f"{site.project}-build-farm",
            project=site.project,
            farm=site.config.farm,
            network=site.network,
            store=site.store,
            prefix=site.prefix,
            release=release,
            env=site.env,
        )


def add_prove(site: Site, lock: AmiLock, release: ReleaseHandle | None) -> None:
    if site.config.prove:
        from nxpipe.stacks.prove import ProveStack

        require_driver(site.config, lock, site.config.prove)
        image = training_image(site.config, lock)
        stack = ProveStack(
            site.app,
            f"{site.project}-prove",
            project=site.project,
            prove=site.config.prove,
            image=image,
            network=site.network,
            store=site.store,
            prefix=site.prefix,
            release=release,
            env=site.env,
        )
        warn_of_image(stack, image, site.config, lock)


def add_training(site: Site, lock: AmiLock) -> list[TrainHandle]:
    fleets = [fleet for fleet in site.config.fleets if isinstance(fleet, TrainingFleet)]
    if not fleets:
        return []
    from nxpipe.stacks.training import TrainStack

    image = training_image(site.config, lock)
    handles = []
    for fleet in fleets:
        require_driver(site.config, lock, fleet)
        stack = TrainStack(
            site.app,
            f"{site.project}-train-{fleet.name}",
            project=site.project,
            fleet=fleet,
            image=image,
            network=site.network,
            store=site.store,
            prefix=site.prefix,
            retention=site.config.observe.log_retention,
            env=site.env,
        )
        warn_of_image(stack, image, site.config, lock)
        handles.append(stack.handle)
    return handles


def add_serving(site: Site, lock: AmiLock) -> list[ServeHandle]:
    fleets = serving_fleets(site)
    if not fleets:
        return []
    from nxpipe.stacks.serving.stack import ServeStack, Software

    image = fleet_image(site.config, lock)
    agent = locked_agent(site.folder, fleet_python(site.config, lock))
    root_device = fleet_root_device(site.config, lock)
    software = Software(image=image, root_device=root_device, agent=agent, folder=site.folder.absolute())
    stacks = [
        ServeStack(
            site.app,
            f"{site.project}-serve-{fleet.name}",
            config=site.config,
            fleet=fleet,
            software=software,
            network=site.network,
            store=site.store,
            prefix=site.prefix,
            smoke=is_smoke(site.app),
            env=site.env,
        )
        for fleet in fleets
    ]
    for stack in stacks:
        warn_of_image(stack, image, site.config, lock)
    return [stack.handle for stack in stacks]


def add_probe(site: Site, serving: list[ServeHandle]) -> None:
    from nxpipe.stacks.serving.load_balancer import ProbeStack

    (fleet,), (handle,) = serving_fleets(site), serving
    ProbeStack(
        site.app,
        f"{site.project}-probe",
        project=site.project,
        fleet=fleet,
        serve=handle,
        network=site.network,
        env=site.env,
    )


def add_cluster(site: Site) -> None:
    """Add the cluster, and the compile cache that its pods mount."""
    if site.config.cluster:
        from nxpipe.pipeline.config.locks import read_cluster_lock
        from nxpipe.stacks.eks import ClusterStack

        cache = CacheStack(
            site.app,
            f"{site.project}-cache",
            project=site.project,
            network=site.network,
            store=site.store,
            versions=site.config.amis.sdk,
            env=site.env,
        )
        ClusterStack(
            site.app,
            f"{site.project}-cluster",
            project=site.project,
            cluster=site.config.cluster,
            lock=read_cluster_lock(site.config, site.folder / site.config.cluster.lock),
            network=site.network,
            store=site.store,
            prefix=site.prefix,
            cache=cache.handle,
            env=site.env,
        )


def add_endpoints(site: Site) -> list[EndpointHandle]:
    if not site.config.endpoints:
        return []
    from nxpipe.stacks.sagemaker import EndpointStack

    return [
        EndpointStack(
            site.app,
            f"{site.project}-endpoint-{endpoint.name}",
            project=site.project,
            endpoint=endpoint,
            guards=site.config.rollout.guards,
            network=site.network,
            store=site.store,
            prefix=site.prefix,
            env=site.env,
        ).handle
        for endpoint in site.config.endpoints
    ]


def add_alarms(
    site: Site, serving: list[ServeHandle], hosted: list[EndpointHandle], training: list[TrainHandle]
) -> ObserveHandle:
    from nxpipe.stacks.observability import ObserveStack

    prices = load_prices()
    hourly = {fleet.name: prices.dearest(site.env.region, fleet.instance_types) for fleet in serving_fleets(site)}
    stack = ObserveStack(
        site.app,
        f"{site.project}-observe",
        project=site.project,
        observe=site.config.observe,
        budget=site.config.budget,
        guards=site.config.rollout.guards,
        fleets=serving,
        endpoints=hosted,
        training=training,
        hourly={name: price for name, price in hourly.items() if price is not None},
        env=site.env,
    )
    return stack.handle


def add_rollouts(site: Site, serving: list[ServeHandle], observe: ObserveHandle, release: ReleaseHandle | None) -> None:
    if not serving:
        return
    from nxpipe.stacks.rollout.stack import RolloutStack

    promoters = release.promoters if release else {}
    for fleet, handle in zip(serving_fleets(site), serving, strict=True):
        if fleet.updates.are_followed:
            continue
        RolloutStack(
            site.app,
            f"{site.project}-rollout-{fleet.name}",
            project=site.project,
            fleet=fleet,
            serve=handle,
            observe=observe,
            store=site.store,
            prefix=site.prefix,
            alarms=site.config.rollout.guards.alarms,
            shadow=site.config.rollout.shadow is not None,
            releasers=[promoters[fleet.channel]] if fleet.channel in promoters else [],
            env=site.env,
        )


def serving_fleets(site: Site) -> list[ServingFleet]:
    return [fleet for fleet in site.config.fleets if isinstance(fleet, ServingFleet)]
