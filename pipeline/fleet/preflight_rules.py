"""What a deployment needs of an AWS account, and the rules that compare it with what the account has.

Pure functions from the configuration and facts to rows of `nxpipe infra preflight`; account.py reads the facts.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Final, Literal, TypeAlias

from nxpipe.artifact_store.manifest import Manifest
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.artifacts.channels import ProgramHost
from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.pipeline.config.capacity import (
    Capacity,
    CapacityBlock,
    ServingReservation,
    ServingSpot,
    TrainingReservation,
)
from nxpipe.pipeline.config.cloud import ClosedNetwork, Release
from nxpipe.pipeline.config.endpoints import ModelEndpoint
from nxpipe.pipeline.config.load import zones_of
from nxpipe.pipeline.config.locks import LockedImage
from nxpipe.pipeline.fleet.account import STANDARD, Image, Quota, Reservation, quota_name
from nxpipe.pipeline.util.display import Displayed, Part, TablePart
from nxpipe.pipeline.util.exit_codes import FINDINGS, OK, ExitCode

State: TypeAlias = Literal["ok", "fails", "unknown"]


@dataclass(frozen=True)
class PreflightRow:
    """One thing that the deployment needs, what the account has of it, and the remedy if that is not enough."""

    check: str
    what: str
    found: str
    needed: str
    state: State
    remedy: str = ""


@dataclass(frozen=True, repr=False)
class PreflightReport(Displayed):
    """The rows of all checks that the configuration needs."""

    account: str
    region: str
    rows: tuple[PreflightRow, ...]

    def display(self) -> Iterator[Part]:
        yield f"Account {self.account}, {self.region}"
        rows = [(each.state, each.check, each.what, each.found, each.needed, each.remedy) for each in self.rows]
        yield TablePart("", ("state", "check", "what", "found", "needed", "remedy"), rows)

    def count(self, state: State) -> int:
        return sum(row.state == state for row in self.rows)

    @property
    def exit_code(self) -> ExitCode:
        """That of the command. A check without permission is no failure."""
        return FINDINGS if self.count("fails") else OK


def row(check: str, what: str, found: str, needed: str, remedy: str, *, holds: bool) -> PreflightRow:
    return PreflightRow(check, what, found, needed, "ok" if holds else "fails", "" if holds else remedy)


@dataclass(frozen=True)
class Demand:
    """Instances that a part of the deployment launches at most, and the zones that it launches them in."""

    user: str
    types: tuple[str, ...]  # acceptable ones
    count: int
    zones: tuple[str, ...]
    spot: bool = False
    reserved: bool = False  # counted against the quota when the capacity was reserved
    any_zone: bool = False  # one of the zones is enough


def demands(config: Config) -> Iterator[Demand]:
    """The instances of fleets and node groups; the build farm chooses types by itself and is not listed."""
    zones = zones_of(config)
    for fleet in config.fleets:
        user = f"fleet {fleet.name}"
        if not isinstance(fleet, ServingFleet):
            yield _demand(user, fleet.instance_types, fleet.nodes, (fleet.zone,), fleet.capacity)
            continue
        yield from _serving(user, fleet, zones)
        if fleet.standby:
            yield Demand(f"{user} (standby)", (fleet.standby.instance_type,), fleet.standby.size.max, zones)
    if config.prove:
        spot = config.prove.capacity == "spot"
        for name in config.prove.instance_types:
            yield Demand("[prove]", (name,), 1, zones, spot=spot, any_zone=True)
    if config.cluster:
        yield Demand("cluster (system nodes)", (config.cluster.system_type,), _SYSTEM_NODES, zones)
        for group in config.cluster.groups:
            user = f"node group {group.name}"
            yield _demand(user, (group.instance_type,), group.size.max, (group.zone,), group.capacity)


_SYSTEM_NODES: Final = 3  # two, and one more during an update


def _serving(user: str, fleet: ServingFleet, zones: tuple[str, ...]) -> Iterator[Demand]:
    """Blue and green may both have `size.max` instances during a rollout."""
    both, capacity = 2 * fleet.size.max, fleet.capacity
    zones = (fleet.zone,) if fleet.zone else zones
    if not isinstance(capacity, ServingSpot):
        yield _demand(user, fleet.instance_types, both, zones, capacity)
        return
    base = 2 * min(capacity.on_demand_base, fleet.size.max)
    if base:
        yield Demand(user, fleet.instance_types, base, zones)
    if both > base:
        yield Demand(user, fleet.instance_types, both - base, zones, spot=True)


def _demand(user: str, types: tuple[str, ...], count: int, zones: tuple[str, ...], capacity: Capacity) -> Demand:
    reserved = isinstance(capacity, ServingReservation | TrainingReservation | CapacityBlock)
    return Demand(user, types, count, zones, spot=capacity.kind == "spot", reserved=reserved)


@dataclass(frozen=True)
class QuotaNeed:
    amount: int
    users: tuple[str, ...]


def vcpu_needs(config: Config, vcpus: Mapping[str, int]) -> dict[str, QuotaNeed]:
    """vCPUs by quota. `vcpus` has the types without Neuron devices; of several types the largest counts."""
    needs: dict[str, list[tuple[int, str]]] = defaultdict(list)
    known = {**{name: entry.vcpus for name, entry in INSTANCES.items()}, **vcpus}
    for demand in demands(config):
        if demand.reserved or not demand.count:
            continue
        each = max(known.get(name, 0) for name in demand.types)  # a type that is not offered has a row of its own
        text = f"{demand.user}: {demand.count} x {each}"
        needs[quota_name(demand.types[0], spot=demand.spot)].append((demand.count * each, text))
    if config.farm:
        needs[STANDARD[1]].append((config.farm.max_vcpus, f"build farm: {config.farm.max_vcpus}"))
    return _summed(needs)


def endpoint_needs(config: Config) -> dict[str, QuotaNeed]:
    """Instances by SageMaker's quota: an endpoint has twice its instances while traffic shifts."""
    needs: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for endpoint in config.endpoints:
        text = f"endpoint {endpoint.name}: 2 x {endpoint.instances}"
        needs[f"{endpoint.instance_type} for endpoint usage"].append((2 * endpoint.instances, text))
    return _summed(needs)


def _summed(needs: Mapping[str, Sequence[tuple[int, str]]]) -> dict[str, QuotaNeed]:
    return {
        name: QuotaNeed(sum(amount for amount, _ in entries), tuple(text for _, text in entries))
        for name, entries in needs.items()
    }


def quota_rows(
    needs: Mapping[str, QuotaNeed], quotas: Mapping[str, Quota], used: Mapping[str, int], unit: str, region: str
) -> Iterator[PreflightRow]:
    """`used` by other projects than this one, whose own instances are in the need already."""
    for name, need in sorted(needs.items()):
        quota, others = quotas.get(name), used.get(name, 0)
        needed = f"{need.amount + others} {unit} ({', '.join([*need.users, *_others(others)])})"
        if quota is None:
            remedy = f"open a support case for {name!r}; this account has no such quota in {region}"
            yield row("quota", name, "no such quota", needed, remedy, holds=False)
            continue
        remedy = (
            f"request an increase: aws service-quotas request-service-quota-increase --service-code {quota.service}"
            f" --quota-code {quota.code} --desired-value {need.amount + others} --region {region}"
        )
        holds = quota.value >= need.amount + others
        yield row("quota", name, f"{quota.value:g} {unit}", needed, remedy, holds=holds)


def _others(used: int) -> list[str]:
    return [f"other instances: {used}"] if used else []


_WITHOUT_EKS: Final = ("use1-az3", "usw1-az2", "cac1-az3")  # zones in which EKS creates no control plane


def zone_rows(zones: Sequence[str], ids: Mapping[str, str], *, eks: bool) -> Iterator[PreflightRow]:
    """Zones of the configuration; `ids` are those of this account, whose letters differ from other accounts'."""
    usable = [name for name, id_ in sorted(ids.items()) if not (eks and id_ in _WITHOUT_EKS)]
    for zone in zones:
        id_ = ids.get(zone)
        needed = f"a zone of this account{', in which EKS runs' if eks else ''}"
        remedy = f"choose zones in [network] from {', '.join(usable) or 'another region'}"
        yield row("zone", zone, id_ or "no such zone", needed, remedy, holds=zone in usable)


def offering_rows(
    wanted: Sequence[Demand], offers: Mapping[str, Collection[str]], ids: Mapping[str, str]
) -> Iterator[PreflightRow]:
    """In each zone of a part, or in one, one of its instance types; `offers` are ids of zones by instance type."""
    parts = dict.fromkeys((each.user, each.types, each.zones, each.any_zone) for each in wanted)
    for user, types, zones, any_zone in parts:
        offering = {id_ for name in types for id_ in offers.get(name, ())}
        holds = (any if any_zone else all)(ids.get(zone) in offering for zone in zones)
        names = [name for name, id_ in sorted(ids.items()) if id_ in offering]
        found = f"offered in {_with_ids(names, ids)}" if names else "offered in no zone of this region"
        remedy = (
            f"set the zones in nxpipe.toml to {', '.join(names)}"
            if names
            else "choose another instance type or another region"
        )
        needed = f"in {'one of ' if any_zone else ''}{_with_ids(zones, ids)}"
        yield row("offering", f"{' or '.join(types)} of {user}", found, needed, remedy, holds=holds)


def _with_ids(zones: Sequence[str], ids: Mapping[str, str]) -> str:
    return ", ".join(f"{zone} ({ids[zone]})" if zone in ids else zone for zone in zones)


_CONTAINERS: Final = ("ecr.api", "ecr.dkr")
_BATCH: Final = (*_CONTAINERS, "ecs", "ecs-agent", "ecs-telemetry", "logs")


def interface_services(config: Config) -> frozenset[str]:
    """The services that a closed network has interface endpoints for, without com.amazonaws.REGION."""
    if not isinstance(config.network, ClosedNetwork):
        return frozenset()
    services: set[str] = set()
    for fleet in config.fleets:
        services.update(("autoscaling", "logs") if isinstance(fleet, ServingFleet) else _BATCH)
        services.update(("ssm", "ssmmessages") if fleet.ssm else ())
    if config.farm or config.prove:
        services.update(_BATCH)
    if config.cluster:
        services.update((*_CONTAINERS, "ec2", "eks", "eks-auth", "elasticfilesystem"))
    return frozenset(services)


def service_rows(
    services: Collection[str], offered: Mapping[str, Collection[str]], zones: Sequence[str]
) -> Iterator[PreflightRow]:
    """`offered` are names of zones by service. Services that are right share one row."""
    needed = f"in {', '.join(zones)}"
    right = [service for service in sorted(services) if set(zones) <= set(offered.get(service, ()))]
    for service in sorted(set(services) - set(right)):
        found = ", ".join(sorted(offered.get(service, ()))) or "no such service in this region"
        remedy = 'set `zones` in [network] to zones that have the endpoint, or kind to "nat"'
        yield row("vpc-endpoint", service, found, needed, remedy, holds=False)
    if right:
        yield row("vpc-endpoint", ", ".join(right), needed, needed, "", holds=True)


def image_row(kind: str, locked: LockedImage | None, id_: str | None, image: Image | None, today: date) -> PreflightRow:
    """`id_` is the locked AMI, or the one that [amis] or the public parameter names; None if there is none."""
    again = "run `nxpipe ami lock`, review and commit the lock file"
    what, needed = f"AMI of {kind}", "available, not deprecated"
    if image is None or id_ is None:
        return row("image", what, f"{id_ or 'no public parameter'}: no such image", needed, again, holds=False)
    age = f"{id_}: {image.state}, {(today - image.created).days} days old"
    if image.deprecated is not None and image.deprecated <= today:
        return row("image", what, f"{age}, deprecated on {image.deprecated}", needed, again, holds=False)
    if locked is None:
        found = f"not locked; now it is {age}"
        return PreflightRow("image", what, found, needed, "ok" if image.state == "available" else "fails", again)
    return row("image", what, age, needed, again, holds=image.state == "available")


@dataclass(frozen=True)
class ServedArtifact:
    """The artifact that a fleet's channel serves, or that an endpoint names. `missing`: the kinds of evidence that its
    instances require and do not find, each with the reason."""

    name: str
    backend: str
    degree: int
    missing: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, missing: Mapping[str, str] | None = None) -> "ServedArtifact":
        degree = max((program.tensor_parallel for program in manifest.executables), default=1)
        return cls(manifest.name, manifest.backend, degree, missing or {})

    def __str__(self) -> str:
        return f"{self.name}, backend {self.backend}, tp {self.degree}"


def _needed(model: str, target: str, host: ProgramHost, cores: int) -> str:
    backend = "any backend (a rehearsal)" if host.rehearsal else "backend neuronx"
    return f"{model} for {target}, {backend}, tp of at most {cores}"


def _build(model: str, host: ProgramHost) -> str:
    return f"build {model}" if host.rehearsal else f"build {model} with --backend neuronx"


def channel_row(
    fleet: ServingFleet, channel: str, target: str, others: Sequence[str], artifact: ServedArtifact | None
) -> PreflightRow:
    """`others`: what the channel serves besides, as MODEL for TARGET; without any the channel is empty."""
    cores = min(INSTANCES[name].logical_cores for name in fleet.instance_types)
    what = f"channel {channel} of fleet {fleet.name}"
    host = ProgramHost.of_fleet(fleet)
    needed = _needed(fleet.model, target, host, cores)
    promote = f"{_build(fleet.model, host)}, then nxpipe promote to {fleet.channel}"
    if artifact is None:
        found = f"serves only {', '.join(others)}" if others else "empty"
        return row("channel", what, found, needed, promote, holds=False)
    if artifact.degree > cores:
        promote = f"build with a tp of at most {cores}, or choose a larger instance type"
    if host.fault(artifact.name, artifact.backend) is not None or artifact.degree > cores:
        return row("channel", what, str(artifact), needed, promote, holds=False)
    for kind, reason in artifact.missing.items():
        waive = f"add the evidence, or promote it again with --without-evidence {kind} --reason TEXT"
        return row("channel", what, f"{artifact}; {reason}", f"{needed}, {kind} evidence", waive, holds=False)
    return row("channel", what, str(artifact), needed, promote, holds=True)


def endpoint_row(endpoint: ModelEndpoint, artifact: ServedArtifact, target: str, *, runs: bool) -> PreflightRow:
    """`target` is the artifact's. `runs`: the endpoint can run its programs, which SageMaker does not examine."""
    hardware, host = endpoint.hardware, ProgramHost.of_endpoint(endpoint)
    needed = _needed(endpoint.model, hardware.compiler_target, host, hardware.logical_cores)
    remedy = (
        f"{_build(endpoint.model, host)}, fetch it with nxpipe store fetch --endpoint {endpoint.name}, upload the "
        "folder and set `artifact` of the endpoint"
    )
    holds = runs and artifact.degree <= hardware.logical_cores
    what = f"artifact of endpoint {endpoint.name}"
    return row("artifact", what, f"{artifact}, for {target}", needed, remedy, holds=holds)


@dataclass(frozen=True)
class Booking:
    """A reservation that the configuration names, and what its user expects of it."""

    id: str
    user: str
    type: str
    count: int
    zones: tuple[str, ...]
    block: CapacityBlock | None


def bookings(config: Config) -> Iterator[Booking]:
    capacities: dict[str, Capacity] = {f"fleet {fleet.name}": fleet.capacity for fleet in config.fleets}
    if config.cluster:
        capacities |= {f"node group {group.name}": group.capacity for group in config.cluster.groups}
    for demand in demands(config):
        capacity = capacities.get(demand.user)
        if isinstance(capacity, ServingReservation | TrainingReservation | CapacityBlock):
            block = capacity if isinstance(capacity, CapacityBlock) else None
            yield Booking(capacity.id, demand.user, demand.types[0], demand.count, demand.zones, block)


def reservation_row(booking: Booking, found: Reservation | None, now: datetime) -> PreflightRow:
    what = f"{'capacity block' if booking.block else 'reservation'} {booking.id} of {booking.user}"
    needed = f"{booking.count} x {booking.type} in {' or '.join(booking.zones)}{_window(booking.block)}"
    if found is None:
        remedy = "correct the id, or use the account and region that own the reservation"
        return row("reservation", what, "no such reservation", needed, remedy, holds=False)
    text = f"{found.state}, {found.count} x {found.type} in {found.zone}{_period(found)}"
    faults = [remedy for wrong, remedy in _faults(booking, found, now) if wrong]
    return row("reservation", what, text, needed, "; ".join(faults), holds=not faults)


def _faults(booking: Booking, found: Reservation, now: datetime) -> Iterator[tuple[bool, str]]:
    block = booking.block
    usable = ("active", "pending", "scheduled", "payment-pending") if block else ("active",)
    yield found.state not in usable, "name a reservation that is active" + (" or scheduled" if block else "")
    yield found.type != booking.type, f"set the instance type to {found.type}"
    yield found.zone not in booking.zones, f"use the zone {found.zone}"
    yield found.count < booking.count, f"reserve {booking.count} instances, or reduce the size"
    ends = block.end if block else found.end
    yield ends is not None and ends <= now, "name a reservation that has not ended"
    if block:
        yield found.start is not None and block.start < found.start, f"set start to {_time(found.start)}"
        yield found.end is not None and block.end > found.end, f"set end to {_time(found.end)}"


def _window(block: CapacityBlock | None) -> str:
    return f", {_time(block.start)} to {_time(block.end)}" if block else ""


def _period(found: Reservation) -> str:
    if found.end is None:
        return ""
    return f", {_time(found.start)} to {_time(found.end)}"


def _time(moment: datetime | None) -> str:
    return "now" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%dT%H:%MZ}"


def provider_row(release: Release, providers: Mapping[str, bool]) -> PreflightRow:
    """`providers`: ARNs of GitHub's OIDC providers, and whether this project's release stack created them."""
    what, found = "OIDC provider of GitHub", ", ".join(sorted(providers)) or "none"
    if release.provider is not None:
        remedy = "remove `provider` from [release], so that the stack creates it, or correct the ARN"
        return row("oidc", what, found, release.provider, remedy, holds=release.provider in providers)
    remedy = f'set provider = "{found}" in [release]; else the release stack fails with EntityAlreadyExists'
    return row("oidc", what, found, "none, or that of this project", remedy, holds=all(providers.values()))


def budget_row(config: Config, unpriced: Sequence[str]) -> PreflightRow:
    found = f"no price of {', '.join(unpriced)} in {config.project.region}" if unpriced else "all prices are known"
    remedy = "remove `monthly` from [budget] and limit the cost with AWS Budgets, or choose types with a known price"
    needed = f"prices of all instance types, for monthly = {config.budget.monthly}"
    return row("budget", "[budget] monthly", found, needed, remedy, holds=not unpriced)


def priced_types(config: Config) -> list[str]:
    """Instance types that a budget has to know the price of; a capacity block is paid at its purchase."""
    paid = {booking.user for booking in bookings(config) if booking.block}
    types = [name for demand in demands(config) if demand.user not in paid for name in demand.types]
    return sorted({*types, *(endpoint.instance_type for endpoint in config.endpoints)})


def bootstrap_row(version: int | None, account: str, region: str) -> PreflightRow:
    found = "not bootstrapped" if version is None else f"version {version}"
    remedy = f"npx cdk bootstrap aws://{account}/{region}"
    holds = version is not None and version >= _BOOTSTRAP
    return row("bootstrap", f"CDK in {region}", found, f"version {_BOOTSTRAP} or later", remedy, holds=holds)


_BOOTSTRAP: Final = 6  # the version that templates of the default synthesizer require


def encryption_row(key: str, account: str, *, granted: bool) -> PreflightRow:
    """The key that encrypts new EBS volumes by default. AWS's own needs no grant."""
    what, needed = "default key of EBS", "aws/ebs, or a grant for AWSServiceRoleForAutoScaling"
    role = f"arn:aws:iam::{account}:role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
    remedy = (
        f"aws kms create-grant --key-id {key} --grantee-principal {role} --operations Encrypt Decrypt ReEncryptFrom"
        " ReEncryptTo GenerateDataKey GenerateDataKeyWithoutPlaintext DescribeKey CreateGrant; else launches end with"
        " Client.InternalError"
    )
    return row("ebs-key", what, f"{key}{'' if granted else ', no grant'}", needed, remedy, holds=granted)


def subscription_row(emails: Sequence[str], confirmed: Mapping[str, bool] | None) -> PreflightRow:
    """`confirmed` by address; None before the first deployment, which subscribes them."""
    what, needed = "alarm e-mails", f"{', '.join(emails)} confirmed"
    if confirmed is None:
        return PreflightRow("subscription", what, "no topic yet", "a confirmation by each, once deployed", "ok")
    waiting = [email for email in emails if not confirmed.get(email)]
    found = f"not confirmed: {', '.join(waiting)}" if waiting else "confirmed"
    remedy = "open the link in the mail of AWS Notifications; deploy again if it has expired"
    return row("subscription", what, found, needed, remedy, holds=not waiting)
