"""Well-known public models, so that naming one needs no network. Adding a model is adding data to known_models.json.

A configuration there has the entries of the model's own config.json that affect its graph. Together with `task` it
gives a model of exactly `parameters` parameters, the published number.
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
    """One public model under its hub id; `task` is the hub's name for what it is for."""

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
    """Up to three known ids that were probably meant, best first; capitals and a missing owner do not count."""
    from difflib import get_close_matches  # only an error pays for it

    spellings: dict[str, str] = {}
    for name in _ids():
        for spelling in (name, name.rpartition("/")[2]):
            spellings.setdefault(spelling.casefold(), name)
    close = get_close_matches(model_id.casefold(), spellings, n=6, cutoff=0.6)
    return list(dict.fromkeys(spellings[spelling] for spelling in close))[:3]


@cache
def _entries() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads(_DATA.read_text(encoding="utf-8"))
    return entries


@cache
def _ids() -> dict[str, str]:
    """Every spelling that the hub accepts, and the id it stands for."""
    return {name: id_ for id_, entry in _entries().items() for name in (id_, *entry["aliases"])}
