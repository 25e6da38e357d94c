"""Conversion between template properties and call arguments: names differ in case, and template values are often text.

`shaped` converts properties to arguments by the service's own description; `differences` compares the properties of a
template with those that a service returns.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, TypeAlias

from tests.localaws.formation.faults import Refused

Shape: TypeAlias = Any  # botocore's


def shaped(client: Any, operation: str, properties: Mapping[str, Any], *, exclude: frozenset[str] = frozenset()) -> Any:
    """The properties as the arguments of a call. Raises for a property that the call does not take; drops none."""
    model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation]).input_shape
    return _shaped(model, {name: value for name, value in properties.items() if name not in exclude}, operation)


def _shaped(shape: Shape, value: Any, path: str) -> Any:
    if shape.type_name == "structure":
        if not isinstance(value, Mapping):
            raise Refused(f"{path}: found {value!r}; expected an object")
        members = {name.lower(): name for name in shape.members}
        if unknown := [name for name in value if name.lower() not in members]:
            raise Refused(f"{path} takes no {', '.join(unknown)}")
        names = {name: members[name.lower()] for name in value}
        return {
            names[name]: _shaped(shape.members[names[name]], item, f"{path}.{name}") for name, item in value.items()
        }
    if shape.type_name == "list":
        return [_shaped(shape.member, entry, path) for entry in (value if isinstance(value, list) else [value])]
    if shape.type_name == "map":
        return {name: _shaped(shape.value, item, path) for name, item in value.items()}
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


def differences(expected: Any, actual: Any, path: str = "") -> Iterator[str]:
    """The differences between the properties of a template and those of a service; additional ones of the service are
    ignored."""
    if isinstance(expected, Mapping):
        members = {name.lower(): value for name, value in actual.items()} if isinstance(actual, Mapping) else {}
        for name, value in expected.items():
            if name.lower() not in members:
                yield f"{path}.{name}: expected {value!r}, found nothing"
            else:
                yield from differences(value, members[name.lower()], f"{path}.{name}")
    elif isinstance(expected, list):
        yield from _list_differences(expected, actual, path)
    elif isinstance(actual, datetime) and isinstance(expected, str):
        if datetime.fromisoformat(expected) != actual:
            yield f"{path}: expected {expected}, found {actual}"
    elif _plain(expected) != _plain(actual):
        yield f"{path}: expected {expected!r}, found {actual!r}"


def _list_differences(expected: list[Any], actual: Any, path: str) -> Iterator[str]:
    """The differences between two lists without regard to order, because services keep their own."""
    if not isinstance(actual, list | tuple) or len(actual) != len(expected):
        yield f"{path}: expected {expected!r}, found {actual!r}"
        return
    remaining = list(actual)
    for number, item in enumerate(expected):
        match = next((candidate for candidate in remaining if not any(differences(item, candidate))), None)
        if match is None and item is not None:
            yield f"{path}[{number}]: expected {item!r}, found {actual!r}"
        elif match in remaining:
            remaining.remove(match)


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(int(value)) if float(value).is_integer() else str(value)
    return value


def tags(properties: Mapping[str, Any]) -> list[dict[str, str]]:
    """The tags in CloudFormation's usual form, from either of its two forms."""
    declared = properties.get("Tags", [])
    if isinstance(declared, Mapping):
        return [{"Key": key, "Value": value} for key, value in declared.items()]
    return [{"Key": tag["Key"], "Value": tag["Value"]} for tag in declared]


def labels(properties: Mapping[str, Any], name: str = "Tags") -> dict[str, str]:
    """The tags as a map, the form of most newer services."""
    return {tag["Key"]: tag["Value"] for tag in tags({"Tags": properties.get(name, [])})}


def removed_tags(before: Mapping[str, Any], desired: Mapping[str, Any], name: str = "Tags") -> list[str]:
    """The names of the tags that an update removes."""
    return sorted(labels(before, name).keys() - labels(desired, name))


def listed(tag_map: Mapping[str, str]) -> list[dict[str, str]]:
    """A service's map of tags in the form of a template."""
    return [{"Key": key, "Value": value} for key, value in tag_map.items()]
