"""The CDK app: reads nxpipe.toml and makes the stacks that it describes.

`npx cdk synth` reads the file in the working directory; `npx cdk synth -c config=PATH` reads another.
"""

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from aws_cdk import App, Environment, Stack

from pipeline.config import Config, ConfigInvalid, ServingFleet, TrainingFleet
from pipeline.config.amis import AmiLock
from pipeline.config.cluster_lock import read_cluster_lock
from pipeline.config.load import load, read_source
from pipeline.config.network import ExistingNetwork
from pipeline.config.place import has_network, misplaced, zones_of
from pipeline.exit_codes import CONFIGURATION, FINDINGS
from stacks.agents import NoAgentLocked, locked_agent
from stacks.amis import fleet_image, lock_of, training_image
from stacks.cache import CacheStack
from stacks.cluster import ClusterStack
from stacks.costs import load_prices
from stacks.endpoint import EndpointStack
from stacks.endpoints import Endpoints
from stacks.farm import FarmStack
from stacks.guards import guard
from stacks.handles import (
    CacheHandle,
    EndpointHandle,
    NetworkHandle,
    ObserveHandle,
    ReleaseHandle,
    ServeHandle,
    StoreHandle,
)
from stacks.network import NetworkStack
from stacks.observe import ObserveStack
from stacks.reach import Unreachable
from stacks.release import ReleaseStack
from stacks.rollout import RolloutStack
from stacks.serve import ServeStack, Software
from stacks.store import StoreStack
from stacks.train import TrainStack
from stacks.user_data.fleet_file import NoPublicKey
from stacks.user_data.script import TooLong


def main(app: App) -> int:
    path = Path(app.node.try_get_context("config") or "nxpipe.toml")
    try:
        config = deployable(path)
        add_stacks(app, config, path.parent)
        guard(app, config, path.parent)
    except (ConfigInvalid, NoAgentLocked, NoPublicKey, TooLong, Unreachable) as told:
        sys.stderr.write(f"{told}\n")
        return CONFIGURATION.number
    try:
        app.synth()
    except RuntimeError as refused:  # jsii has this one type for all that CDK refuses
        if not str(refused).startswith("ValidationFailed"):
            raise
        sys.stderr.write(f"{refused}\n")
        return FINDINGS.number
    return 0


def deployable(path: Path) -> Config:
    """The file, with all that a deployment needs to know beyond what a build does."""
    source = read_source(path, os.environ)
    config = load(source)
    if faults := [source.fault(finding) for finding in misplaced(config)]:
        raise ConfigInvalid(faults)
    return config


def add_stacks(app: App, config: Config, folder: Path) -> None:
    """`folder` is that of the file, where its relative paths start. A project without account or region gives
    templates that deploy wherever the credentials at hand point.
    """
    name = config.project.name
    env = Environment(account=config.project.account, region=config.project.region)
    store = StoreStack(app, f"{name}-storage", project=name, env=env, termination_protection=True).handle
    prefix = store_prefix(config)
    release = None
    if config.release:
        release = ReleaseStack(
            app,
            f"{name}-release",
            project=name,
            release=config.release,
            store=store,
            prefix=prefix,
            signing_key=kms_key(config),
            env=env,
        ).handle
    if has_network(config):
        place = NetworkStack(
            app, f"{name}-network", project=name, network=config.network, zones=zones_of(config), env=env
        )
        add_fleets(app, config, folder, store, place.handle, release, env)
        if not isinstance(config.network, ExistingNetwork):
            callers = [each for each in app.node.children if isinstance(each, Stack)]
            Endpoints(place, "Endpoints", network=place.handle, callers=callers)


def add_fleets(
    app: App,
    config: Config,
    folder: Path,
    store: StoreHandle,
    network: NetworkHandle,
    release: ReleaseHandle | None,
    env: Environment,
) -> None:
    name, prefix = config.project.name, store_prefix(config)
    if config.farm:
        FarmStack(
            app,
            f"{name}-build-farm",
            project=name,
            farm=config.farm,
            network=network,
            store=store,
            prefix=prefix,
            release=release,
            env=env,
        )
    lock = lock_of(config, folder)
    for fleet in config.fleets:
        if isinstance(fleet, TrainingFleet):
            TrainStack(
                app,
                f"{name}-train-{fleet.name}",
                project=name,
                fleet=fleet,
                image=training_image(config, lock),
                network=network,
                store=store,
                prefix=prefix,
                env=env,
            )
    cache = add_cache(app, config, store, network, env)
    serving = add_serving(app, config, folder, lock, store, network, cache, env)
    if cache:
        add_cluster(app, config, folder, store, network, cache, env)
    hosted = add_endpoints(app, config, store, network, env)
    if serving or hosted:
        watched = ObserveStack(
            app,
            f"{name}-observe",
            project=name,
            observe=config.observe,
            budget=config.budget,
            guards=config.rollout.guards,
            fleets=serving,
            endpoints=hosted,
            hourly=hourly_prices(config, env.region),
            env=env,
        )
        add_rollouts(app, config, store, serving, watched.handle, env)


def add_rollouts(
    app: App, config: Config, store: StoreHandle, serving: list[ServeHandle], watched: ObserveHandle, env: Environment
) -> None:
    handles = {each.fleet: each for each in serving}
    for fleet in config.fleets:
        if isinstance(fleet, ServingFleet):
            RolloutStack(
                app,
                f"{config.project.name}-rollout-{fleet.name}",
                project=config.project.name,
                fleet=fleet,
                serve=handles[fleet.name],
                observe=watched,
                store=store,
                prefix=store_prefix(config),
                alarms=config.rollout.guards.alarms,
                env=env,
            )


def add_cache(
    app: App, config: Config, store: StoreHandle, network: NetworkHandle, env: Environment
) -> CacheHandle | None:
    """For whoever compiles or loads programs on machines that come and go."""
    if not config.cluster and not any(isinstance(fleet, ServingFleet) for fleet in config.fleets):
        return None
    name, versions = config.project.name, config.amis.sdk
    made = CacheStack(app, f"{name}-cache", project=name, network=network, store=store, versions=versions, env=env)
    return made.handle


def add_cluster(
    app: App,
    config: Config,
    folder: Path,
    store: StoreHandle,
    network: NetworkHandle,
    cache: CacheHandle,
    env: Environment,
) -> None:
    name = config.project.name
    if config.cluster:
        ClusterStack(
            app,
            f"{name}-cluster",
            project=name,
            cluster=config.cluster,
            lock=read_cluster_lock(config, folder / config.cluster.lock),
            network=network,
            store=store,
            prefix=store_prefix(config),
            cache=cache,
            env=env,
        )


def add_serving(
    app: App,
    config: Config,
    folder: Path,
    lock: AmiLock,
    store: StoreHandle,
    network: NetworkHandle,
    cache: CacheHandle | None,
    env: Environment,
) -> list[ServeHandle]:
    name, prefix = config.project.name, store_prefix(config)
    fleets = [fleet for fleet in config.fleets if isinstance(fleet, ServingFleet)]
    if not fleets:
        return []
    software = Software(image=fleet_image(config, lock), agent=locked_agent(folder), folder=folder.absolute())
    return [
        ServeStack(
            app,
            f"{name}-serve-{fleet.name}",
            config=config,
            fleet=fleet,
            software=software,
            network=network,
            store=store,
            prefix=prefix,
            cache=cache,
            env=env,
        ).handle
        for fleet in fleets
    ]


def add_endpoints(
    app: App, config: Config, store: StoreHandle, network: NetworkHandle, env: Environment
) -> list[EndpointHandle]:
    return [
        EndpointStack(
            app,
            f"{config.project.name}-endpoint-{endpoint.name}",
            project=config.project.name,
            endpoint=endpoint,
            guards=config.rollout.guards,
            network=network,
            store=store,
            prefix=store_prefix(config),
            env=env,
        ).handle
        for endpoint in config.endpoints
    ]


def hourly_prices(config: Config, region: str | None) -> dict[str, float]:
    """Of an instance of each serving fleet: the dearest of its types, where all their prices are known."""
    fleets = [fleet for fleet in config.fleets if isinstance(fleet, ServingFleet)]
    prices = load_prices()
    found = {fleet.name: [prices.of(region, each) for each in fleet.instance_types] for fleet in fleets}
    return {
        name: max(known) for name, every in found.items() if len(known := [one for one in every if one]) == len(every)
    }


def kms_key(config: Config) -> str | None:
    """The key that signs, if it is one of KMS."""
    kind, _, arn = (config.signing.key or "").partition(":")
    return arn if kind == "kms" else None


def store_prefix(config: Config) -> str:
    """Where the store lies in its bucket, as the keys of objects begin: "" or "models/", say."""
    url = urlsplit(config.store.url)
    folder = url.path.strip("/") if url.scheme == "s3" else ""
    return f"{folder}/" if folder else ""


if __name__ == "__main__":
    sys.exit(main(App()))
