"""What was asked otherwise, in a person's words."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.util.escape import for_terminal
from nxpipe.pipeline.util.text import table

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.index.leaves import Difference
    from nxpipe.artifact_store.index.nearest import NearestArtifact

_SHOWN: Final = 3  # differing fields that fit a line
_WIDEST: Final = 60  # characters of a value in a table
_READ_FOR_A_HINT: Final = 200  # key inputs that are in no index; a build must not wait for thousands


def why_missed(store: "Store", inputs: dict[str, object]) -> str | None:
    """One line for a build that found nothing: the nearest artifact, and where it was asked for otherwise."""
    from nxpipe.artifact_store.errors import StoreError
    from nxpipe.artifact_store.index.nearest import nearest_artifacts
    from nxpipe.pipeline.util.process import no_collection

    try:
        with no_collection():
            found = nearest_artifacts(store, inputs, count=1, at_most=_READ_FOR_A_HINT)
    except StoreError as error:
        # A hint is worth no failed build; a store that is really broken stops the publish.
        return f"  not in the store, and the nearest cannot be told: {error}"
    return f"  not in the store; {_in_one_line(found[0])}" if found else None


def _in_one_line(near: "NearestArtifact") -> str:
    """Ends in the first fields, as `options.autocast: "matmult" there, "all" here`."""
    differing = near.differences[:_SHOWN]
    said = [f"{for_terminal(one.path)}: {value(one.before)} there, {value(one.after)} here" for one in differing]
    more = len(near.differences) - len(said)
    return f"the nearest is {near.published.name}, with {'; '.join(said)}" + (f"; and {more} more" if more else "")


def difference_table(differences: "Sequence[Difference]", before: str, after: str) -> str:
    rows = [(for_terminal(one.path), value(one.before), value(one.after)) for one in differences]
    return table(("field", before, after), rows)


def differences_as_json(differences: "Sequence[Difference]", before: str, after: str) -> list[dict[str, object]]:
    """A side that lacks the field has no word in it."""
    return [
        {"field": one.path}
        | {side: json.loads(text) for side, text in ((before, one.before), (after, one.after)) if text is not None}
        for one in differences
    ]


def value(text: str | None) -> str:
    """Canonical JSON on a terminal; the middle of a long one is left out."""
    if text is None:
        return "-"
    shown = for_terminal(text)
    return shown if len(shown) <= _WIDEST else f"{shown[: _WIDEST - 20]}...{shown[-17:]}"
