"""What is valid in a document that as a whole is not, so that the rules between tables can be tried all the same."""

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from nxpipe.pipeline.config.crosschecks import Tables
from nxpipe.pipeline.config.endpoints import ModelEndpoint
from nxpipe.pipeline.config.fleets import Fleet, ServingFleet, TrainingFleet
from nxpipe.pipeline.config.models import Model

_T = TypeVar("_T")


def salvage(document: dict[str, Any]) -> Tables:
    """The tables that are valid by themselves, at the positions that they have in the document."""
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
            continue  # its faults are told already
    return valid
