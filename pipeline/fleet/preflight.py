"""Preflight: the checks that a configuration needs, run concurrently against an account and its store.

Every call only reads. A check without permission is a row of its own and ends no other.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.blobs import read_at_most
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.channel.change import evidence_faults
from nxpipe.artifact_store.errors import Denied, StoreError, StoreUnavailable
from nxpipe.artifact_store.fetch.folder import MANIFEST
from nxpipe.artifact_store.manifest import MAX_MANIFEST_BYTES, Manifest
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.artifacts.channels import ENVIRONMENTS, ServedModel, endpoint_fault
from nxpipe.pipeline.artifacts.requirements import artifact_requirements
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.artifacts.store_url import open_uncached_store, store_url
from nxpipe.pipeline.config import Config, ConfigInvalid, ServingFleet, TrainingFleet
from nxpipe.pipeline.config.endpoints import ModelEndpoint
from nxpipe.pipeline.config.load import check_placement, has_network, load, read_source, zones_of
from nxpipe.pipeline.config.locks import (
    FLEETS_PARAMETER,
    TRAINING_PARAMETER,
    LockedImage,
    has_job_hosts,
    read_cluster_lock,
)
from nxpipe.pipeline.config.prices import load_prices
from nxpipe.pipeline.fleet import preflight_rules as rules
from nxpipe.pipeline.fleet.account import Account, MissingPermission
from nxpipe.pipeline.fleet.preflight_rules import PreflightReport, PreflightRow, row
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import AwsError
from nxpipe.stacks.locks import LOCK, NoAgentLocked, fleet_python, lock_of, locked_agent

Step: TypeAlias = Callable[[str], AbstractContextManager[None]]
Rows: TypeAlias = Iterable[PreflightRow]

_THREADS: Final = 8
_BOOTSTRAP: Final = "/cdk-bootstrap/hnb659fds/version"


def preflight(config_path: Path, region: str | None = None, step: Step | None = None) -> PreflightReport:
    """Compare the account of the current credentials with what the configuration deploys; change nothing.

    `region` replaces `project.region`. Raises `AwsError` without credentials, and `ConfigInvalid` for a configuration
    that no account could deploy.
    """
    environ = {**os.environ, **({"NXPIPE_PROJECT_REGION": region} if region else {})}
    source = read_source(config_path, environ)
    config = load(source)
    if faults := [source.fault(violation) for violation in check_placement(config)]:
        raise ConfigInvalid(faults)
    account = Account(config.project.region)
    checks = tuple(_checks(config, config_path, account))
    title = f"{len(checks)} checks of account {account.id} in {account.region}"
    with (step or nullcontext)(title), ThreadPoolExecutor(_THREADS) as pool:
        rows = [found for result in pool.map(_examine, checks) for found in result]
    return PreflightReport(account.id, account.region, tuple(rows))


@dataclass(frozen=True)
class Check:
    """A part of the preflight that one missing permission makes unknown."""

    name: str
    what: str
    rows: Callable[[], Rows]


def _examine(check: Check) -> tuple[PreflightRow, ...]:
    try:
        return tuple(check.rows())
    except MissingPermission as missing:
        return (_unknown(check, missing.action),)
    except Denied as missing:
        return (_unknown(check, missing.permission),)
    except AwsError as error:
        text = str(error)
        return (PreflightRow(check.name, check.what, text, "an answer of AWS", "unknown", "run the command again"),)
    except StoreError as error:
        gone = isinstance(error, StoreUnavailable)
        remedy = (
            "correct `url` in [store], or deploy the storage stack first" if gone else "restore what the error names"
        )
        return (row(check.name, check.what, str(error), "a readable store", remedy, holds=False),)


def _unknown(check: Check, action: str) -> PreflightRow:
    return PreflightRow(check.name, check.what, "not permitted to read", action, "unknown", f"allow {action}")


def _checks(config: Config, path: Path, account: Account) -> Iterator[Check]:
    """The checks that the configuration needs."""
    yield Check("account", "account", partial(_account, config, account))
    yield Check("bootstrap", "version of the CDK's bootstrap stack", partial(_bootstrap, account))
    if has_network(config):
        yield from _capacity_checks(config, account)
    yield from _software_checks(config, path, account)
    if config.release:
        yield Check("oidc", "OIDC provider of GitHub", partial(_providers, config, account))
    if config.budget.monthly is not None and has_network(config):
        yield Check("budget", "[budget] monthly", partial(_budget, config, account))
    if config.observe.emails and (config.fleets or config.endpoints):
        yield Check("subscription", "alarm e-mails", partial(_subscriptions, config, account))


def _capacity_checks(config: Config, account: Account) -> Iterator[Check]:
    yield Check("zone", "zones of the network", partial(_zones, config, account))
    if any(rules.demands(config)):
        yield Check("offering", "offerings of instance types", partial(_offerings, config, account))
    if services := rules.interface_services(config):
        yield Check("vpc-endpoint", "interface endpoints", partial(_services, config, services, account))
    yield Check("quota", "EC2 quotas", partial(_ec2_quotas, config, account))
    if config.endpoints:
        yield Check("quota", "SageMaker quotas", partial(_sagemaker_quotas, config, account))
    for booking in rules.bookings(config):
        yield Check("reservation", f"{booking.id} of {booking.user}", partial(_reservation, booking, account))
    if _serving(config) or config.cluster:
        yield Check("ebs-key", "default key of EBS", partial(_encryption, account))


def _software_checks(config: Config, path: Path, account: Account) -> Iterator[Check]:
    lock = lock_of(config, path.parent)
    if _serving(config):
        locked = lock.serving(config.amis, account.region)
        image = partial(_image, "serving instances", locked, config.amis.image or FLEETS_PARAMETER, account)
        yield Check("image", "AMI of serving instances", image)
    if has_job_hosts(config):
        image = partial(_image, "training hosts", lock.image(account.region, None), TRAINING_PARAMETER, account)
        yield Check("image", "AMI of training hosts", image)
    for name in _containers(config):
        yield Check("container", name, partial(_container, name, account))
    if config.cluster and config.cluster.images:
        yield Check("container", "images of the cluster", partial(_mirror, config, path.parent, account))
    yield from _store_checks(config, path)


def _store_checks(config: Config, path: Path) -> Iterator[Check]:
    fleets = _serving(config)
    training = [fleet for fleet in config.fleets if isinstance(fleet, TrainingFleet)]
    installers = sorted({fleet.efa.key for fleet in training if fleet.uses_efa})
    if not fleets and not config.endpoints and not installers:
        return
    url = store_url(None, path)
    if not url.startswith("s3://"):
        yield Check("store", "[store] url", partial(_local_store, url))
        return
    store = open_uncached_store(None, path, Console(quiet=True))
    if fleets:
        python = fleet_python(config, lock_of(config, path.parent))
        yield Check("agent", "the agent's bundle", partial(_agent, path.parent, python, store))
    for key in installers:
        yield Check("efa", key, partial(_installer, key, store))
    for fleet in fleets:
        channel = partial(_channel, config, path.parent, fleet, store)
        yield Check("channel", f"channel {fleet.channel} of fleet {fleet.name}", channel)
    for endpoint in config.endpoints:
        artifact = partial(_endpoint_artifact, config, path.parent, endpoint, store)
        yield Check("artifact", f"artifact of endpoint {endpoint.name}", artifact)


def _serving(config: Config) -> list[ServingFleet]:
    return [fleet for fleet in config.fleets if isinstance(fleet, ServingFleet)]


def _account(config: Config, account: Account) -> Rows:
    wanted = config.project.account
    remedy = f"use credentials of account {wanted}, or correct `account` in [project]"
    yield row("account", "credentials", account.id, wanted or "any account", remedy, holds=wanted in (None, account.id))


def _bootstrap(account: Account) -> Rows:
    version = account.parameter(_BOOTSTRAP)
    yield rules.bootstrap_row(int(version) if version and version.isdigit() else None, account.id, account.region)


def _zones(config: Config, account: Account) -> Rows:
    return rules.zone_rows(zones_of(config), account.zone_ids(), eks=config.cluster is not None)


def _offerings(config: Config, account: Account) -> Rows:
    wanted = list(rules.demands(config))
    types = {name for demand in wanted for name in demand.types}
    return rules.offering_rows(wanted, account.offers(types), account.zone_ids())


def _services(config: Config, services: Collection[str], account: Account) -> Rows:
    return rules.service_rows(services, account.service_zones(services), zones_of(config))


def _ec2_quotas(config: Config, account: Account) -> Rows:
    others = {name for demand in rules.demands(config) for name in demand.types} - INSTANCES.keys()
    needs = rules.vcpu_needs(config, account.vcpus(others))
    if not needs:
        return ()
    quotas, used = account.quotas("ec2", needs), account.used_vcpus(config.project.name)
    return rules.quota_rows(needs, quotas, used, "vCPUs", account.region)


def _sagemaker_quotas(config: Config, account: Account) -> Rows:
    needs = rules.endpoint_needs(config)
    return rules.quota_rows(needs, account.quotas("sagemaker", needs), {}, "instances", account.region)


def _reservation(booking: rules.Booking, account: Account) -> Rows:
    yield rules.reservation_row(booking, account.reservation(booking.id), datetime.now(UTC))


def _encryption(account: Account) -> Rows:
    key = account.default_key()
    yield rules.encryption_row(key, account.id, granted=account.scaling_may_use(key))


def _image(kind: str, locked: LockedImage | None, origin: str, account: Account) -> Rows:
    """`origin`: the AMI that [amis] names, or the public parameter."""
    id_ = locked.id if locked else origin if origin.startswith("ami-") else account.parameter(origin)
    image = account.image(id_) if id_ else None
    yield rules.image_row(kind, locked, id_, image, datetime.now(UTC).date())


def _containers(config: Config) -> list[str]:
    """Images in ECR that nxpipe.toml names by digest."""
    images = [fleet.image for fleet in config.fleets if isinstance(fleet, TrainingFleet)]
    images += [endpoint.image for endpoint in config.endpoints]
    images += [jobs.image for jobs in (config.farm, config.prove) if jobs]
    return [name for name in dict.fromkeys(filter(None, images)) if ".dkr.ecr." in name]


def _container(name: str, account: Account) -> Rows:
    path, _, digest = name.partition("@")
    registry, _, repository = path.partition("/")
    holds = account.has_container(registry, repository, digest)
    remedy = f"push the image to {path}, or correct its digest in nxpipe.toml"
    found = "found" if holds else "no such image"
    yield row("container", f"{repository}@{digest[:19]}", found, f"in {registry}", remedy, holds=holds)


def _mirror(config: Config, folder: Path, account: Account) -> Rows:
    """The cluster's images, at the digests of its lock file."""
    assert config.cluster is not None, "only a cluster has these images"
    try:
        lock = read_cluster_lock(config, folder / config.cluster.lock)
    except ConfigInvalid as error:
        yield row(
            "container", "images of the cluster", str(error), "a lock file", "run `nxpipe infra lock`", holds=False
        )
        return
    for tagged in config.cluster.images.all if config.cluster.images else ():
        yield from _container(f"{tagged.rpartition(':')[0]}@{lock.images[tagged]}", account)


def _local_store(url: str) -> Rows:
    remedy = 'deploy the storage stack, then set url = "s3://BUCKET" in [store], BUCKET being its output BucketName'
    yield row("store", "[store] url", url, "s3://BUCKET, which instances read", remedy, holds=False)


def _agent(folder: Path, python: str, store: Store) -> Rows:
    command = "run `nxpipe agent bundle PACKAGES` with this store"
    try:
        digest = locked_agent(folder, python)
    except NoAgentLocked as fault:
        yield row("agent", LOCK, str(fault), "a digest", command, holds=False)
        return
    if digest is None:
        yield row(
            "agent", LOCK, "no such file", "the digest of the agent's bundle", f"{command}; commit {LOCK}", holds=False
        )
        return
    yield _object("agent", "the agent's bundle", f"agents/{digest}.tar", command, store)


def _installer(key: str, store: Store) -> Rows:
    """The file of the EFA driver, without which no host of several nodes joins its cluster."""
    remedy = "upload AWS's installer, as the guide describes under training fleets"
    yield _object("efa", "the EFA installer", key, remedy, store)


def _endpoint_artifact(config: Config, folder: Path, endpoint: ModelEndpoint, store: Store) -> Rows:
    """The folder that SageMaker copies. Its manifest is read here, since no agent reads it before the server starts."""
    file = f"endpoints/{endpoint.name}/{endpoint.artifact}/{MANIFEST}"
    chunks = store.backend.read(file)
    data = None if chunks is None else read_at_most(MAX_MANIFEST_BYTES, chunks)
    if data is None or sha256_hex(data) != endpoint.artifact:
        found = "no such object" if data is None else f"a manifest of SHA-256 {sha256_hex(data)}"
        remedy = "upload the artifact's folder, as the guide describes under SageMaker"
        what = f"artifact of endpoint {endpoint.name}"
        yield row("artifact", what, found, f"{store.url}/{file}", remedy, holds=False)
        return
    manifest = Manifest.from_bytes(data)
    runs = endpoint_fault(config, folder, endpoint.name, manifest) is None
    yield rules.endpoint_row(endpoint, rules.ServedArtifact.of(manifest), manifest.target, runs=runs)


def _object(kind: str, what: str, path: str, remedy: str, store: Store) -> PreflightRow:
    holds = store.backend.stat(path) is not None
    return row(kind, what, "found" if holds else "no such object", f"{store.url}/{path}", remedy, holds=holds)


def _channel(config: Config, folder: Path, fleet: ServingFleet, store: Store) -> Rows:
    """The channel that instances of each environment follow now: its own after a rollout, else that of the fleet. Its
    signatures are verified and its evidence is required, as the agent does it."""
    trust, followed = trust_in(config, folder, store), {}
    for environment in ENVIRONMENTS:
        served = ServedModel.of(config, fleet, environment)
        contents = ((channel, trust.served(store, channel)) for channel in served.channels)
        channel, artifacts = next((pair for pair in contents if pair[1] is not None), (fleet.channel, ()))
        followed[channel] = (served, artifacts)
    for channel, (served, artifacts) in followed.items():
        entries = {entry.slot: entry for entry in artifacts or ()}
        entry = entries.get((served.model_id, served.target))
        others = [f"{model} for {target}" for model, target in sorted(entries)]
        artifact = None
        if entry is not None:
            manifest, needs = store.manifest(entry.manifest), artifact_requirements(store, config, folder, channel)
            faults = evidence_faults(store, manifest, needs)
            missing = {kind: reason for kind, reason in faults.items() if kind not in entry.without}
            artifact = rules.ServedArtifact.of(manifest, missing)
        yield rules.channel_row(fleet, channel, served.target, others, artifact)


def _providers(config: Config, account: Account) -> Rows:
    assert config.release is not None, "only a release has a provider"
    yield rules.provider_row(config.release, account.github_providers(config.project.name))


def _budget(config: Config, account: Account) -> Rows:
    prices = load_prices()
    unpriced = [name for name in rules.priced_types(config) if prices.of(account.region, name) is None]
    yield rules.budget_row(config, unpriced)


def _subscriptions(config: Config, account: Account) -> Rows:
    yield rules.subscription_row(config.observe.emails, account.confirmed(f"{config.project.name}-alarms"))
