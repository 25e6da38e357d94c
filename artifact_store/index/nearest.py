"""Why a request was not answered: the artifacts whose questions were most like it, and what they asked otherwise."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.digest import sha256_hex
from nxpipe.artifact_store.errors import StoreError
from nxpipe.artifact_store.index.inputs import Fields, path_of, searchable, spelled_field
from nxpipe.artifact_store.index.leaves import Difference, differences, fields_of
from nxpipe.artifact_store.index.segments import Report, unheard
from nxpipe.artifact_store.layout import ACTIONS, is_key
from nxpipe.artifact_store.record import Published
from nxpipe.artifact_store.store import Store


@dataclass(frozen=True)
class Near:
    """An artifact that was asked for in almost these words; `before` of a difference is its word, `after` ours."""

    published: Published
    differences: tuple[Difference, ...]
    fields: int  # of its key inputs


def nearest(
    store: Store,
    wanted: Mapping[str, object],
    *,
    count: int,
    at_most: int | None = None,
    report: Report = unheard,
) -> list[Near]:
    """The `count` artifacts whose key inputs differ from these in the fewest fields, the nearest first.

    An index leads to them, and what is told of them is read from the store and verified. Of the inputs that are in no
    index, `at_most` so many are read.
    """
    key = sha256_hex(canonical_json(wanted))
    others = [name for name in _keys(store) if name != key]
    entries = searchable(store.backend, others, at_most=at_most, report=report)
    return list(islice(_verified(store, wanted, _ranked(wanted, entries), report), count))


def _keys(store: Store) -> Iterator[str]:
    return filter(is_key, (path.removeprefix(ACTIONS) for path in store.backend.paths(ACTIONS)))


def _ranked(wanted: Mapping[str, object], entries: Mapping[str, Fields]) -> list[str]:
    """Keys by the number of paths at which the two differ: those that either has, less those where both agree."""
    asked = fields_of(wanted)
    same = {spelled_field(path, value) for path, value in asked.items()}
    shared = {field for field in frozenset[str]().union(*entries.values()) if path_of(field) in asked}

    def distance(key: str) -> tuple[int, str]:
        fields = entries[key]
        return len(asked) + len(fields) - len(fields & shared) - len(fields & same), key

    return sorted(entries, key=distance)


def _verified(store: Store, wanted: Mapping[str, object], ranked: list[str], report: Report) -> Iterator[Near]:
    for key in ranked:
        try:
            published = store.find(key)
            inputs = store.key_inputs(published.manifest) if published else None
        except StoreError as error:
            report(f"{key} is passed over: {error}")
            continue
        if published is not None and inputs is not None:
            yield Near(published, differences(inputs, wanted), len(fields_of(inputs)))
