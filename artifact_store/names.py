"""Artifact names as users type them, resolved to one artifact."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.errors import NotFound

if TYPE_CHECKING:
    from nxpipe.artifact_store.records import Published

SHOWN: Final = 12  # hex digits of a key that are shown, and enough to type back
_MIN_PREFIX: Final = 6
_KEY_PREFIX: Final = re.compile(rf"[0-9a-f]{{{_MIN_PREFIX},64}}")
_MAX_CANDIDATES: Final = 5


def short_name(model_id: str, request_key: str) -> str:
    return f"{model_id}@{request_key[:SHOWN]}"


def choose(name: str, published: "Sequence[Published]", url: str) -> "Published":
    """The one artifact that is named `MODEL`, `MODEL@KEYPREFIX` or `KEYPREFIX`."""
    found = _matches(name, published)
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFound(f"{name!r} is the name of {len(found)} artifacts in {url}: {_shown(found)}; name one of them")
    if not published:
        raise NotFound(f"there is no artifact {name!r} in {url}, which is empty; publish one, or use another store")
    raise NotFound(f"there is no artifact {name!r} in {url}; {_nearest(name, published)}")


def _matches(name: str, published: "Sequence[Published]") -> "list[Published]":
    by_model = [one for one in published if one.model_id == name]
    if by_model:
        return by_model
    model, at, prefix = name.rpartition("@")
    if at:
        return [one for one in published if one.model_id == model and prefix and one.request_key.startswith(prefix)]
    if _KEY_PREFIX.fullmatch(name):
        return [one for one in published if one.request_key.startswith(name)]
    return []


def _nearest(name: str, published: "Sequence[Published]") -> str:
    import difflib

    models = sorted({one.model_id for one in published})
    wanted = name.rpartition("@")[0] or name
    close = difflib.get_close_matches(wanted, models, n=_MAX_CANDIDATES, cutoff=0.6)
    if close:
        return f"the nearest are {_shown([one for one in published if one.model_id in close])}"
    return f"it holds {_shown(published)}; a name reads MODEL, MODEL@KEY or at least {_MIN_PREFIX} hex digits of a key"


def _shown(published: "Sequence[Published]") -> str:
    names = [one.name for one in published[:_MAX_CANDIDATES]]
    more = len(published) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
