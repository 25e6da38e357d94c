"""Turns pydantic's errors into findings of our own wording."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nxpipe.pipeline.config.faults import Finding
from nxpipe.pipeline.config.forms import RULE, listed
from nxpipe.pipeline.config.table import TAG, Kind, Place, Table, tag_of, walk
from nxpipe.pipeline.config.wording import allowed_text, choices_of, shown
from nxpipe.pipeline.util.suggest import nearest


def findings(error: ValidationError, root: type[Table]) -> Iterator[Finding]:
    """One finding for each fault, wherever in the document it is."""
    for details in error.errors(include_url=False):
        if not _is_consequence(details):
            yield _finding(details, walk(root, details["loc"]))


def _is_consequence(details: ErrorDetails) -> bool:
    """Follows from an error that is told itself: a default made from a faulty key, a list short of its faulty items."""
    if details["type"] == "too_short":
        return bool(len(details["input"]) >= details["ctx"]["min_length"])
    return details["type"] == "default_factory_not_called"


def _finding(details: ErrorDetails, place: Place) -> Finding:
    value, kind = details["input"], place.kind
    if kind is None:
        return _unknown_key(place)
    if details["type"] == RULE:
        rule = details["ctx"]
        return Finding(place.path, rule["found"] or shown(value), rule["allowed"])
    allowed = allowed_text(kind, ".".join(step for step in place.path if isinstance(step, str)))
    if details["type"] == "missing":
        return Finding(place.path, "nothing", allowed)
    if kind.variants and isinstance(value, dict):
        return _wrong_shape(value, place, kind)
    return Finding(place.path, shown(value), allowed, _guess(value, choices_of(kind)))


def _wrong_shape(value: dict[str, Any], place: Place, kind: Kind) -> Finding:
    tag = value.get(TAG)
    found = "nothing" if TAG not in value else shown(tag)
    return Finding((*place.path, TAG), found, listed(kind.variants), _guess(tag, tuple(kind.variants)))


def _unknown_key(place: Place) -> Finding:
    table, key = place.table, place.path[-1]
    assert table is not None, "only a table refuses keys"
    known = tuple(table.model_fields)
    elsewhere = [tag_of(shape) for shape in place.siblings if key in shape.model_fields]
    if elsewhere:
        allowed = f'a key of kind "{tag_of(table)}": {", ".join(known)}'
        return Finding(place.path, f"a key that only {TAG} = {listed(elsewhere)} has", allowed)
    what = "section" if len(place.path) == 1 else "key"
    allowed = f"one of {', '.join(known)}"
    return Finding(place.path, f"a {what} that nxpipe does not know", allowed, _guess(key, known))


def _guess(value: object, choices: tuple[str, ...]) -> str | None:
    return nearest(value, choices) if isinstance(value, str) and choices else None
