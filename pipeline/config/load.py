"""Loading of nxpipe.toml: file, environment, rules between tables, and the origin of every value.

`cross_check` runs on every table that is valid by itself, even if others are not, so that one run reports all faults.
`check_placement` applies to stacks only: a build needs neither a region nor zones.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from nxpipe.emulator.hardware import INSTANCES, Instance
from nxpipe.pipeline.config.cloud import ExistingNetwork
from nxpipe.pipeline.config.cluster import Cluster
from nxpipe.pipeline.config.endpoints import ModelEndpoint
from nxpipe.pipeline.config.messages import ConfigInvalid, Fault, Violation, key_text, shown, violations
from nxpipe.pipeline.config.models import Model
from nxpipe.pipeline.config.root import Config, Fleet
from nxpipe.pipeline.config.schema import KeyPath, Kind, Table, field_kind, is_table
from nxpipe.pipeline.config.serving_fleet import ServingFleet
from nxpipe.pipeline.config.toml_file import locate, read_document
from nxpipe.pipeline.config.training_fleet import TrainingFleet
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
            key = ("endpoints", index, "instance_type")
            yield from _model_fits(key, endpoint.instance_type, endpoint.hardware, by_name[endpoint.model])


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


def _rollouts_of_nothing(config: Config) -> Iterator[Violation]:
    """[rollout] says how versions take over. A fleet that follows its channel in place has no rollouts; its alarms use
    the guards."""
    serving = [(index, fleet) for index, fleet in enumerate(config.fleets) if isinstance(fleet, ServingFleet)]
    keys = sorted(config.rollout.model_fields_set - {"guards"})
    if not keys or not serving or not all(fleet.updates.are_followed for _, fleet in serving):
        return
    index, fleet = serving[0]
    allowed = (
        f'"none": {keys[0]} of [rollout] is about rollouts, which choose the artifact of an environment, and no '
        "serving fleet of this file would have them; remove one of the two"
    )
    yield Violation(("fleets", index, "updates", "policy"), shown(fleet.updates.policy), allowed)


_Item = TypeVar("_Item")


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
    """The text under the key of each item; empty for an item without one."""
    values = (item.get(key) if isinstance(item, dict) else None for item in items)
    return tuple(value if isinstance(value, str) else "" for value in values)


def _valid(adapter: TypeAdapter[_Item], items: list[Any]) -> dict[int, _Item]:
    valid: dict[int, _Item] = {}
    for index, item in enumerate(items):
        try:
            valid[index] = adapter.validate_python(item)
        except ValidationError:
            continue  # the validation of the whole document reports it
    return valid


LONGEST_ENDPOINT_NAME: Final = 63


def has_network(config: Config) -> bool:
    """True if the file describes machines; a project that only stores artifacts needs no network."""
    return bool(config.fleets or config.endpoints or config.farm or config.prove or config.cluster)


def zones_of(config: Config) -> tuple[str, ...]:
    """The availability zones that have a subnet, in the order of the file."""
    network, region = config.network, config.project.region
    if isinstance(network, ExistingNetwork):
        return tuple(subnet.zone for subnet in network.subnets)
    return network.zones or (f"{region}a", f"{region}b")


def check_placement(config: Config) -> Iterator[Violation]:
    """Violations that prevent a deployment: zones without a subnet, names that AWS refuses, keys without an ARN."""
    yield from _alias_keys(config)
    region = config.project.region
    if not has_network(config):
        return
    if region is None:
        yield Violation(("project", "region"), "nothing", "a region; the subnets of the fleets are in its zones")
        return
    zones = zones_of(config)
    yield from _misplaced_zones(config, region, zones)
    yield from _misplaced_fleets(config, zones)
    yield from _crowded_channels(config)
    yield from _misplaced_caches(config)
    if config.cluster:
        yield from _misplaced_nodes(config.cluster, zones)
    yield from _misplaced_endpoints(config)


def _alias_keys(config: Config) -> Iterator[Violation]:
    keys = {("signing", "key"): config.signing.key} | {
        ("signing", "promoting", index, "key"): entry.key for index, entry in enumerate(config.signing.promoting)
    }
    for path, key in keys.items() if config.release else ():
        if ":alias/" not in (key or ""):
            continue
        allowed = (
            'the ARN of the key, not of an alias ("kms:arn:...:key/ID"); the IAM role of releases is limited to it'
        )
        yield Violation(path, shown(key), allowed)


def _misplaced_zones(config: Config, region: str, zones: tuple[str, ...]) -> Iterator[Violation]:
    for index, zone in enumerate(zones):
        if not zone.startswith(region) or len(zone) != len(region) + 1:
            yield Violation(_zone_path(config, index), shown(zone), f"a zone of {region}, the region of the project")
        elif zone in zones[:index]:
            yield Violation(_zone_path(config, index), shown(zone), "a zone that is not listed yet")


def _misplaced_fleets(config: Config, zones: tuple[str, ...]) -> Iterator[Violation]:
    for index, fleet in enumerate(config.fleets):
        if fleet.zone is not None and fleet.zone not in zones:
            allowed = f"a zone that has a subnet: {', '.join(zones)} (network.zones)"
            yield Violation(("fleets", index, "zone"), shown(fleet.zone), allowed)
        if isinstance(fleet, TrainingFleet) and fleet.capacity.kind == "spot" and fleet.nodes > 1:
            allowed = "1, or another kind of capacity; AWS Batch does not run multi-node jobs on spot instances"
            yield Violation(("fleets", index, "nodes"), shown(fleet.nodes), allowed)


_RELEASED_FLEETS: Final = 9  # of one channel: IAM's limits for the policies of the role that promotes to it


def _crowded_channels(config: Config) -> Iterator[Violation]:
    for channel in config.release.channels if config.release else ():
        fleets = [(index, fleet) for index, fleet in enumerate(config.fleets) if fleet.channel == channel]
        serving = [index for index, fleet in fleets if isinstance(fleet, ServingFleet)]
        if serving[_RELEASED_FLEETS:]:
            allowed = (
                f"a channel of at most {_RELEASED_FLEETS} serving fleets; the IAM role of its releases allows no more"
            )
            yield Violation(("fleets", serving[_RELEASED_FLEETS], "channel"), shown(channel), allowed)


def _misplaced_caches(config: Config) -> Iterator[Violation]:
    """Instances write to their compile cache. In the store's bucket they could damage what other fleets serve."""
    for index, fleet in enumerate(config.fleets):
        if not isinstance(fleet, ServingFleet) or fleet.compile_cache is None:
            continue
        if fleet.compile_cache.split("/")[:3] == config.store.url.split("/")[:3]:  # "s3:", "", and the bucket
            allowed = "a prefix in another bucket than the store's; instances write there"
            yield Violation(("fleets", index, "compile_cache"), shown(fleet.compile_cache), allowed)


def _misplaced_nodes(cluster: Cluster, zones: tuple[str, ...]) -> Iterator[Violation]:
    if len(zones) < 2:
        yield Violation(("cluster",), shown(zones), "two zones in network.zones; EKS requires subnets in two zones")
    for index, group in enumerate(cluster.groups):
        if group.zone not in zones:
            allowed = f"a zone that has a subnet: {', '.join(zones)} (network.zones)"
            yield Violation(("cluster", "groups", index, "zone"), shown(group.zone), allowed)


def _misplaced_endpoints(config: Config) -> Iterator[Violation]:
    longest = LONGEST_ENDPOINT_NAME - len(config.project.name) - 1
    for index, endpoint in enumerate(config.endpoints):
        if len(endpoint.name) > longest:
            allowed = (
                f"at most {longest} characters; SageMaker allows {LONGEST_ENDPOINT_NAME} including the prefix PROJECT-"
            )
            yield Violation(("endpoints", index, "name"), shown(endpoint.name), allowed)
        if f".ecr.{config.project.region}." not in endpoint.image:
            allowed = f"an image in ECR of {config.project.region}; SageMaker pulls from its own region only"
            yield Violation(("endpoints", index, "image"), shown(endpoint.image), allowed)


def _zone_path(config: Config, index: int) -> tuple[str | int, ...]:
    if isinstance(config.network, ExistingNetwork):
        return ("network", "subnets", index, "zone")
    return ("network", "zones", index)


ENVIRONMENT: Final = "environment"  # in place of the file name in a fault
_INTEGER: Final = "[+-]?[0-9]{1,40}"
_FLOAT: Final = "[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?"


@cache
def settable() -> Mapping[str, tuple[KeyPath, Kind]]:
    """Every variable and its key: the scalar keys of the tables that occur once."""
    return {f"NXPIPE_{'_'.join(path).upper()}": (path, kind) for path, kind in _scalar_keys(Config, ())}


def _scalar_keys(table: type[Table], parents: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Kind]]:
    for name, field in table.model_fields.items():
        kind = field_kind(field)
        if is_table(kind.annotation):
            yield from _scalar_keys(kind.annotation, (*parents, name))
        elif kind.is_scalar and parents:
            yield (*parents, name), kind


def set_variables(environ: Mapping[str, str]) -> dict[KeyPath, str]:
    """The variable that sets each key. An empty variable counts as unset, because CI systems define empty ones."""
    return {settable()[name][0]: name for name, value in environ.items() if value and name in settable()}


def unknown_variables(environ: Mapping[str, str]) -> Iterator[Fault]:
    """Variables that begin with NXPIPE_ and the name of a table, and set no key of it."""
    sections = {name.split("_")[1] for name in settable()}
    for name, value in sorted(environ.items()):
        prefix, *words = name.split("_")
        if prefix != "NXPIPE" or len(words) < 2 or words[0] not in sections or name in settable() or not value:
            continue
        known = [variable for variable in settable() if variable.startswith(f"NXPIPE_{words[0]}_")]
        allowed = f"a variable for a scalar key of [{words[0].lower()}]: {', '.join(known)}"
        yield Fault(ENVIRONMENT, None, name, shown(value), allowed, nearest(name, settable()))


def override(document: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The document with the environment's values in place; a section that is not a table keeps its own fault."""
    merged = dict(document)
    for path, name in set_variables(environ).items():
        table: Any = merged
        for step in path[:-1]:
            inner = table.get(step, {})
            if not isinstance(inner, dict):
                break
            table[step] = table = dict(inner)
        else:
            table[path[-1]] = _typed(environ[name], settable()[name][1])
    return merged


def _typed(text: str, kind: Kind) -> object:
    """A number if the key has a numeric type, else the text, validated like a string in the file."""
    if kind.annotation in (int, int | str) and re.fullmatch(_INTEGER, text):
        return int(text)
    if kind.annotation is float and re.fullmatch(_FLOAT, text):
        return float(text)
    return text


# A command that runs without a file, such as `store ls`, still needs a project name.
_DEFAULT_DOCUMENT: Final[dict[str, Any]] = {"project": {"name": "unnamed"}}


def load_config(path: Path, environ: Mapping[str, str], *, missing_ok: bool = False) -> Config:
    """Read the file; `ConfigInvalid` holds all of its faults. `missing_ok`: a missing file means the defaults."""
    return load(read_source(path, environ, missing_ok=missing_ok))


@dataclass(frozen=True)
class Source:
    """The document with the environment's values in place, and the origin of each value."""

    file: str
    text: str
    document: dict[str, Any]
    environ: Mapping[str, str]

    @cached_property
    def lines(self) -> dict[KeyPath, int]:
        return locate(self.text)

    @cached_property
    def variables(self) -> dict[KeyPath, str]:
        return set_variables(self.environ)

    def fault(self, violation: Violation) -> Fault:
        """The violation with its file and line, or with its variable."""
        variable = self.variables.get(violation.path)
        file, line, key = self.file, self._line(violation.path), key_text(violation.path)
        if variable is not None:
            file, line, key = ENVIRONMENT, None, variable
        return Fault(file, line, key, violation.found, violation.allowed, violation.nearest)

    def _line(self, path: KeyPath) -> int | None:
        """The line of a key; of the innermost enclosing table if the file lacks the key."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def read_source(path: Path, environ: Mapping[str, str], *, missing_ok: bool = False) -> Source:
    absent = missing_ok and not path.exists()
    text, document = ("", _DEFAULT_DOCUMENT) if absent else read_document(path)
    return Source(str(path), text, override(document, environ), environ)


def load(source: Source) -> Config:
    """Check every table, then the rules between tables; raise all faults at once."""
    faults = list(unknown_variables(source.environ))
    try:
        config = Config.model_validate(source.document)
    except ValidationError as error:
        faults += map(source.fault, violations(error, Config))
        faults += map(source.fault, cross_check(valid_tables(source.document)))
        raise ConfigInvalid(faults) from None
    faults += map(source.fault, cross_check(Tables.of(config)))
    faults += map(source.fault, _rollouts_of_nothing(config))
    if faults:
        raise ConfigInvalid(faults)
    return config


@dataclass(frozen=True)
class Origin:
    """The source of a value: a line of the file, an environment variable, or the default."""

    kind: Literal["file", "environment", "default"]
    name: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        if self.name is None:
            return self.kind
        return self.name if self.line is None else f"{self.name}:{self.line}"


@dataclass(frozen=True)
class Setting:
    """One key, its effective value in TOML's types (None: not set), and its origin."""

    key: str
    value: object
    origin: Origin


def origins(path: Path, environ: Mapping[str, str]) -> tuple[Setting, ...]:
    """Every effective value of a valid configuration."""
    source = read_source(path, environ)
    values = load(source).model_dump(mode="json")
    return tuple(Setting(key_text(key), value, _origin(source, key)) for key, value in _leaves(values, ()))


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _origin(source: Source, path: KeyPath) -> Origin:
    if path in source.variables:
        return Origin("environment", source.variables[path])
    if path in source.lines:
        return Origin("file", source.file, source.lines[path])
    return Origin("default")
