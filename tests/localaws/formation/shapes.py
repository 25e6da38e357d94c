"""Between templates and calls: CloudFormation's names are nearly those of the services, its values often text.

`shaped` gives a call its arguments by the service's own description of them; `differences` compares what a template
wants with what a service tells.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, TypeAlias

from tests.localaws.formation.faults import Refused

Shape: TypeAlias = Any  # botocore's


def shaped(client: Any, operation: str, properties: Mapping[str, Any], *, but: frozenset[str] = frozenset()) -> Any:
    """The properties as the arguments of a call. One that the call does not take is an error: nothing is dropped."""
    model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation]).input_shape
    return _shaped(model, {name: value for name, value in properties.items() if name not in but}, operation)


def _shaped(shape: Shape, value: Any, path: str) -> Any:
    if shape.type_name == "structure":
        if not isinstance(value, Mapping):
            raise Refused(f"{path}: found {value!r}; expected an object")
        members = {name.lower(): name for name in shape.members}
        if unknown := [name for name in value if name.lower() not in members]:
            raise Refused(f"{path} takes no {', '.join(unknown)}")
        names = {name: members[name.lower()] for name in value}
        return {
            names[name]: _shaped(shape.members[names[name]], each, f"{path}.{name}") for name, each in value.items()
        }
    if shape.type_name == "list":
        return [_shaped(shape.member, each, path) for each in (value if isinstance(value, list) else [value])]
    if shape.type_name == "map":
        return {name: _shaped(shape.value, each, path) for name, each in value.items()}
    return _scalar(shape, value)


def _scalar(shape: Shape, value: Any) -> Any:
    kind = shape.type_name
    if kind == "boolean":
        return value if isinstance(value, bool) else str(value).lower() == "true"
    if kind in ("integer", "long"):
        return int(value)
    if kind in ("float", "double"):
        return float(value)
    if kind == "string" and not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return value


def differences(wanted: Any, found: Any, path: str = "") -> Iterator[str]:
    """Where a service tells otherwise than the template says. What it tells beyond that is its own business."""
    if isinstance(wanted, Mapping):
        told = {name.lower(): each for name, each in found.items()} if isinstance(found, Mapping) else {}
        for name, each in wanted.items():
            if name.lower() not in told:
                yield f"{path}.{name}: wanted {each!r}, found nothing"
            else:
                yield from differences(each, told[name.lower()], f"{path}.{name}")
    elif isinstance(wanted, list):
        yield from _of_lists(wanted, found, path)
    elif isinstance(found, datetime) and isinstance(wanted, str):
        if datetime.fromisoformat(wanted) != found:
            yield f"{path}: wanted {wanted}, found {found}"
    elif _plain(wanted) != _plain(found):
        yield f"{path}: wanted {wanted!r}, found {found!r}"


def _of_lists(wanted: list[Any], found: Any, path: str) -> Iterator[str]:
    """Each wanted item is found, wherever it stands: services keep their own order."""
    if not isinstance(found, list | tuple) or len(found) != len(wanted):
        yield f"{path}: wanted {wanted!r}, found {found!r}"
        return
    left = list(found)
    for number, each in enumerate(wanted):
        match = next((one for one in left if not any(differences(each, one))), None)
        if match is None and each is not None:
            yield f"{path}[{number}]: wanted {each!r}, found {found!r}"
        elif match in left:
            left.remove(match)


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(int(value)) if float(value).is_integer() else str(value)
    return value


def tags(properties: Mapping[str, Any]) -> list[dict[str, str]]:
    """In CloudFormation's usual form, whichever of its two a type has."""
    found = properties.get("Tags", [])
    if isinstance(found, Mapping):
        return [{"Key": key, "Value": value} for key, value in found.items()]
    return [{"Key": one["Key"], "Value": one["Value"]} for one in found]


def labels(properties: Mapping[str, Any], name: str = "Tags") -> dict[str, str]:
    """The tags as most of the newer services take them."""
    return {one["Key"]: one["Value"] for one in tags({"Tags": properties.get(name, [])})}


def gone(before: Mapping[str, Any], wanted: Mapping[str, Any], name: str = "Tags") -> list[str]:
    """The names of the tags that are no longer wanted."""
    return sorted(labels(before, name).keys() - labels(wanted, name))


def listed(found: Mapping[str, str]) -> list[dict[str, str]]:
    """A service's map of tags as a template has them."""
    return [{"Key": key, "Value": value} for key, value in found.items()]
