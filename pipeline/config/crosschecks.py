"""The rules between tables: a fleet must name a model, a name must be its own.

They run on every table that is valid by itself, also when others are not, so that one run tells all.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nxpipe.emulator.hardware import INSTANCES, Instance
from nxpipe.pipeline.config.endpoints import ModelEndpoint
from nxpipe.pipeline.config.faults import Finding, KeyPath
from nxpipe.pipeline.config.fleets import ServingFleet, TrainingFleet
from nxpipe.pipeline.config.models import Model
from nxpipe.pipeline.config.root import Config
from nxpipe.pipeline.config.wording import shown
from nxpipe.pipeline.util.suggest import nearest


@dataclass(frozen=True)
class Tables:
    """The valid tables by their position in the file, and the names in all of them; a missing name is empty."""

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


def cross_check(tables: Tables) -> Iterator[Finding]:
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
                yield from _runs_the_model(path, name, INSTANCES[name], by_name[fleet.model])
    for index, endpoint in tables.endpoints.items():
        if endpoint.model in by_name:
            at = ("endpoints", index, "instance_type")
            yield from _runs_the_model(at, endpoint.instance_type, endpoint.hardware, by_name[endpoint.model])


def _repeated_names(section: str, names: tuple[str, ...]) -> Iterator[Finding]:
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        if name and seen[name]:
            allowed = f"a name of its own: {section}[{names.index(name)}] has this one already"
            yield Finding((section, index, "name"), shown(name), allowed)
        seen[name] += 1


def _missing_models(section: str, references: tuple[str, ...], names: tuple[str, ...]) -> Iterator[Finding]:
    known = list(filter(None, dict.fromkeys(names)))
    allowed = f"the name of a model of this file: {', '.join(known) or 'there is none'}"
    for index, model in enumerate(references):
        if model and model not in known:
            yield Finding((section, index, "model"), shown(model), allowed, nearest(model, known))


def _runs_the_model(path: KeyPath, name: str, entry: Instance, model: Model) -> Iterator[Finding]:
    """Programs for one target do not load on another, nor programs for more cores than there are."""
    target = INSTANCES[model.target].compiler_target
    if entry.compiler_target != target:
        allowed = f'an instance type that runs programs for {target}, as model "{model.name}" is compiled for'
        yield Finding(path, f'"{name}", which runs programs for {entry.compiler_target}', allowed)
    elif entry.logical_cores < model.tp:
        allowed = f'at least the {model.tp} that model "{model.name}" is spread over (tp)'
        yield Finding(path, f'"{name}", which has {entry.logical_cores} logical cores', allowed)
