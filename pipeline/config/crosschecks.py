"""Rules between tables: a fleet names an existing model, names are unique, fleets lie in zones that have subnets.

`cross_check` runs on every table that is valid by itself, even if others are not, so that one run reports all faults.
`check_placement` applies to stacks only: a build needs neither a region nor zones.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from nxpipe.emulator.hardware import INSTANCES, Instance
from nxpipe.pipeline.config.cloud import ExistingNetwork
from nxpipe.pipeline.config.cluster import Cluster
from nxpipe.pipeline.config.endpoints import ModelEndpoint
from nxpipe.pipeline.config.faults import KeyPath, Violation
from nxpipe.pipeline.config.fleets import Fleet, ServingFleet, TrainingFleet
from nxpipe.pipeline.config.messages import shown
from nxpipe.pipeline.config.models import Model
from nxpipe.pipeline.config.root import Config
from nxpipe.pipeline.util.text import nearest


@dataclass(frozen=True)
class Tables:
    """The valid tables by position in the file, and the names of all tables; a missing name is empty."""

    models: Mapping[int, Model]
    fleets: Mapping[int, ServingFleet | TrainingFleet]
    endpoints: Mapping[int, ModelEndpoint]
    model_names: tuple[str, ...]
    fleet_names: tuple[str, ...]
    fleet_models: tuple[str, ...]
    endpoint_names: tuple[str, ...]
    endpoint_models: tuple[str, ...]

    @classmethod
    def of(cls, config: Config) -> "Tables":
        return cls(
            models=dict(enumerate(config.models)),
            fleets=dict(enumerate(config.fleets)),
            endpoints=dict(enumerate(config.endpoints)),
            model_names=tuple(model.name for model in config.models),
            fleet_names=tuple(fleet.name for fleet in config.fleets),
            fleet_models=tuple(fleet.model for fleet in config.fleets),
            endpoint_names=tuple(endpoint.name for endpoint in config.endpoints),
            endpoint_models=tuple(endpoint.model for endpoint in config.endpoints),
        )


def cross_check(tables: Tables) -> Iterator[Violation]:
    yield from _repeated_names("models", tables.model_names)
    yield from _repeated_names("fleets", tables.fleet_names)
    yield from _repeated_names("endpoints", tables.endpoint_names)
    yield from _missing_models("fleets", tables.fleet_models, tables.model_names)
    yield from _missing_models("endpoints", tables.endpoint_models, tables.model_names)
    by_name = {model.name: model for model in tables.models.values()}
    for index, fleet in tables.fleets.items():
        if fleet.model in by_name:
            for position, name in enumerate(fleet.instance_types):
                path = ("fleets", index, "instance_types", position)
                yield from _model_fits(path, name, INSTANCES[name], by_name[fleet.model])
    for index, endpoint in tables.endpoints.items():
        if endpoint.model in by_name:
            at = ("endpoints", index, "instance_type")
            yield from _model_fits(at, endpoint.instance_type, endpoint.hardware, by_name[endpoint.model])


def _repeated_names(section: str, names: tuple[str, ...]) -> Iterator[Violation]:
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        if name and seen[name]:
            allowed = f"a unique name; {section}[{names.index(name)}] has the same"
            yield Violation((section, index, "name"), shown(name), allowed)
        seen[name] += 1


def _missing_models(section: str, references: tuple[str, ...], names: tuple[str, ...]) -> Iterator[Violation]:
    known = list(filter(None, dict.fromkeys(names)))
    allowed = f"the name of a model of this file: {', '.join(known) or 'it has none'}"
    for index, model in enumerate(references):
        if model and model not in known:
            yield Violation((section, index, "model"), shown(model), allowed, nearest(model, known))


def _model_fits(path: KeyPath, name: str, entry: Instance, model: Model) -> Iterator[Violation]:
    """A program loads on instances of its target only, and needs as many logical cores as its tp."""
    target = INSTANCES[model.target].compiler_target
    if entry.compiler_target != target:
        allowed = f'an instance type for {target} programs, the target of model "{model.name}"'
        yield Violation(path, f'"{name}", which runs {entry.compiler_target} programs', allowed)
    elif entry.logical_cores < model.tp:
        allowed = f'at least {model.tp} logical cores, the tp of model "{model.name}"'
        yield Violation(path, f'"{name}", which has {entry.logical_cores} logical cores', allowed)


_T = TypeVar("_T")


def valid_tables(document: dict[str, Any]) -> Tables:
    """The valid tables of a document that has faults, by their position in it."""
    models, fleets, endpoints = (_items(document, section) for section in ("models", "fleets", "endpoints"))
    fleet: TypeAdapter[ServingFleet | TrainingFleet] = TypeAdapter(Fleet)
    return Tables(
        models=_valid(TypeAdapter(Model), models),
        fleets=_valid(fleet, fleets),
        endpoints=_valid(TypeAdapter(ModelEndpoint), endpoints),
        model_names=_texts(models, "name"),
        fleet_names=_texts(fleets, "name"),
        fleet_models=_texts(fleets, "model"),
        endpoint_names=_texts(endpoints, "name"),
        endpoint_models=_texts(endpoints, "model"),
    )


def _items(document: dict[str, Any], section: str) -> list[Any]:
    items = document.get(section)
    return items if isinstance(items, list) else []


def _texts(items: list[Any], key: str) -> tuple[str, ...]:
    """One text for each item, empty where the item has none."""
    values = (item.get(key) if isinstance(item, dict) else None for item in items)
    return tuple(value if isinstance(value, str) else "" for value in values)


def _valid(adapter: TypeAdapter[_T], items: list[Any]) -> dict[int, _T]:
    valid: dict[int, _T] = {}
    for index, item in enumerate(items):
        try:
            valid[index] = adapter.validate_python(item)
        except ValidationError:
            continue  # pydantic's own validation of the document reports it
    return valid


LONGEST_ENDPOINT_NAME: Final = 63


def has_network(config: Config) -> bool:
    """True if the file describes machines; a project that only stores artifacts needs no network."""
    return bool(config.fleets or config.endpoints or config.farm or config.cluster)


def zones_of(config: Config) -> tuple[str, ...]:
    """The availability zones that have a subnet, in the order of the file."""
    network, region = config.network, config.project.region
    if isinstance(network, ExistingNetwork):
        return tuple(each.zone for each in network.subnets)
    return network.zones or (f"{region}a", f"{region}b")


def check_placement(config: Config) -> Iterator[Violation]:
    """Violations that prevent a deployment: zones without a subnet, names that AWS refuses, keys without an ARN."""
    yield from _moving_key(config)
    region = config.project.region
    if not has_network(config):
        return
    if region is None:
        yield Violation(("project", "region"), "nothing", "a region; the subnets of the fleets lie in its zones")
        return
    zones = zones_of(config)
    yield from _misplaced_zones(config, region, zones)
    yield from _misplaced_fleets(config, zones)
    if config.cluster:
        yield from _misplaced_nodes(config.cluster, zones)
    yield from _misplaced_endpoints(config)


def _moving_key(config: Config) -> Iterator[Violation]:
    named = {("signing", "key"): config.signing.key} | {
        ("signing", "promoting", at, "key"): each.key for at, each in enumerate(config.signing.promoting)
    }
    for place, key in named.items() if config.release else ():
        if ":alias/" not in (key or ""):
            continue
        allowed = 'the ARN of the key, not of an alias ("kms:arn:...:key/ID"); the role of releases is limited to it'
        yield Violation(place, shown(key), allowed)


def _misplaced_zones(config: Config, region: str, zones: tuple[str, ...]) -> Iterator[Violation]:
    for index, zone in enumerate(zones):
        if not zone.startswith(region) or len(zone) != len(region) + 1:
            yield Violation(_path(config, index), shown(zone), f"a zone of {region}, the region of the project")
        elif zone in zones[:index]:
            yield Violation(_path(config, index), shown(zone), "a zone that is not listed yet")


def _misplaced_fleets(config: Config, zones: tuple[str, ...]) -> Iterator[Violation]:
    for index, fleet in enumerate(config.fleets):
        if isinstance(fleet, TrainingFleet) and fleet.zone not in zones:
            allowed = f"a zone that has a subnet: {', '.join(zones)} (network.zones)"
            yield Violation(("fleets", index, "zone"), shown(fleet.zone), allowed)
        if isinstance(fleet, TrainingFleet) and fleet.capacity.kind == "spot" and fleet.nodes > 1:
            allowed = "1, or another kind of capacity; AWS Batch runs multi-node jobs on no spot instances"
            yield Violation(("fleets", index, "nodes"), shown(fleet.nodes), allowed)


def _misplaced_nodes(cluster: Cluster, zones: tuple[str, ...]) -> Iterator[Violation]:
    if len(zones) < 2:
        yield Violation(("cluster",), shown(zones), "two zones in network.zones; EKS places network interfaces in both")
    for index, group in enumerate(cluster.groups):
        if group.zone not in zones:
            allowed = f"a zone that has a subnet: {', '.join(zones)} (network.zones)"
            yield Violation(("cluster", "groups", index, "zone"), shown(group.zone), allowed)


def _misplaced_endpoints(config: Config) -> Iterator[Violation]:
    longest = LONGEST_ENDPOINT_NAME - len(config.project.name) - 1
    for index, endpoint in enumerate(config.endpoints):
        if len(endpoint.name) > longest:
            allowed = f"at most {longest} characters; SageMaker takes {LONGEST_ENDPOINT_NAME} with PROJECT- in front"
            yield Violation(("endpoints", index, "name"), shown(endpoint.name), allowed)
        if f".ecr.{config.project.region}." not in endpoint.image:
            allowed = f"an image in ECR of {config.project.region}; SageMaker pulls from its own region only"
            yield Violation(("endpoints", index, "image"), shown(endpoint.image), allowed)


def _path(config: Config, index: int) -> tuple[str | int, ...]:
    if isinstance(config.network, ExistingNetwork):
        return ("network", "subnets", index, "zone")
    return ("network", "zones", index)
