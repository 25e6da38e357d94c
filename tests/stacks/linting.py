"""cfn-lint in this process: rules are loaded once, and common parts of templates are linted once."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeAlias, TypeVar

from cfnlint.config import ConfigMixIn
from cfnlint.decode.decode import decode_str
from cfnlint.runner import Runner

Template: TypeAlias = Mapping[str, Any]
Name = TypeVar("Name")


def complaints(template: Template, *regions: str) -> list[str]:
    """The findings, with rule and place."""
    return _complaints(template, _runner(regions))


def _complaints(template: Template, runner: Runner) -> list[str]:
    decoded, faults = decode_str(json.dumps(template))
    found = faults or list(runner.validate_template(decoded))
    return [f"{entry.rule.id} {'/'.join(map(str, entry.path or ()))}: {entry.message}" for entry in found]


def complaints_of_alike(templates: Mapping[Name, Template], region: str) -> dict[Name, list[str]]:
    """Of stacks of one kind, by their names. They are judged as one template that has each resource of theirs once:
    what several say in the same words, and beside it the variants, whose references lead to the first of a kind.
    E3019 would say that variants have the same name.
    """
    variants = _variants(templates.values())
    together = {f"{id_}{number or ''}": value for id_, every in variants.items() for number, value in enumerate(every)}
    first = next(iter(templates.values()))
    found: dict[Name, list[str]] = defaultdict(list)
    for said in _complaints({**first, "Resources": together}, _runner((region,), ("E3019",))):
        place = said.partition(":")[0].partition("/")[2].partition("/")[0]
        for name, template in templates.items():
            if place not in together or together[place] in template["Resources"].values():
                found[name].append(said)
    return found


def _variants(templates: Iterable[Template]) -> dict[str, list[Any]]:
    """Resources by logical id; equal ids have equal types."""
    found: dict[str, list[Any]] = defaultdict(list)
    for template in templates:
        for id_, resource in template["Resources"].items():
            assert all(entry["Type"] == resource["Type"] for entry in found[id_]), id_
            if resource not in found[id_]:
                found[id_].append(resource)
    return found


@cache
def _runner(regions: tuple[str, ...], ignored: tuple[str, ...] = ()) -> Runner:
    return Runner(ConfigMixIn(regions=list(regions), ignore_checks=list(ignored)))
