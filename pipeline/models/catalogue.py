"""Catalogue of public models, which are resolved without a network. To add a model, add its data to known_models.json.

A configuration in it has those entries of the model's config.json that affect the graph. Together with `task` it
defines a model of exactly `parameters` parameters, the published number.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_DATA = Path(__file__).with_name("known_models.json")


@dataclass(frozen=True)
class KnownModel:
    """A public model under its hub id; `task` is the hub's."""

    id: str
    task: str
    config: Mapping[str, object]
    parameters: int


def find(model_id: str) -> KnownModel | None:
    """The model of that id or alias, spelled exactly as on the hub; its configuration is the caller's own copy."""
    name = _ids().get(model_id)
    if name is None:
        return None
    entry = _entries()[name]
    return KnownModel(name, entry["task"], copy.deepcopy(entry["config"]), entry["parameters"])


def nearest(model_id: str) -> list[str]:
    """Up to three similar ids of the catalogue, best first; case and a missing owner are ignored."""
    from difflib import get_close_matches  # imported for an error only

    spellings: dict[str, str] = {}
    for name in _ids():
        for spelling in (name, name.rpartition("/")[2]):
            spellings.setdefault(spelling.casefold(), name)
    matches = get_close_matches(model_id.casefold(), spellings, n=6, cutoff=0.6)
    return list(dict.fromkeys(spellings[spelling] for spelling in matches))[:3]


@cache
def _entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads(_DATA.read_text(encoding="utf-8"))
    return entries


@cache
def _ids() -> dict[str, str]:
    """Catalogue ids by every spelling that the hub accepts."""
    return {name: id_ for id_, entry in _entries().items() for name in (id_, *entry["aliases"])}
