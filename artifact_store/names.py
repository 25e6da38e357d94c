"""Artifact names as users type them, resolved to one artifact."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.errors import NotFound

if TYPE_CHECKING:
    from nxpipe.artifact_store.records import Published

SHOWN: Final = 12  # hex digits of a key that are displayed; as a prefix they name the artifact
_MIN_PREFIX: Final = 6
_KEY_PREFIX: Final = re.compile(rf"[0-9a-f]{{{_MIN_PREFIX},64}}")
_MAX_CANDIDATES: Final = 5


def short_name(model_id: str, request_key: str) -> str:
    return f"{model_id}@{request_key[:SHOWN]}"


def choose(
    name: str, published: "Sequence[Published]", url: str, channels_of: Callable[[], Mapping[str, Sequence[str]]] = dict
) -> "Published":
    """The only artifact that matches `MODEL`, `MODEL@KEYPREFIX` or `KEYPREFIX`. `channels_of` returns the channels that
    serve an artifact, by its manifest's digest, for the error message of an ambiguous name."""
    matches = _matches(name, published)
    if len(matches) == 1:
        return matches[0]
    if matches:
        listing = "; ".join(_candidates(matches, channels_of()))
        raise NotFound(f"{name!r} matches {len(matches)} artifacts in {url}: {listing}; name one of them")
    if not published:
        raise NotFound(f"there is no artifact {name!r} in {url}, which is empty; build one, or pass --store URL")
    raise NotFound(f"there is no artifact {name!r} in {url}; {_nearest(name, published)}")


def _candidates(published: "Sequence[Published]", served: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The candidates for an ambiguous name, each with what distinguishes it; the newest first."""
    newest = sorted(published, key=lambda artifact: artifact.record.published_at, reverse=True)
    for artifact in newest[:_MAX_CANDIDATES]:
        channels = served.get(artifact.manifest_digest, ())
        where = f", on {', '.join(channels)}" if channels else ""
        day = artifact.record.published_at[:16].replace("T", " ")
        yield f"{artifact.name} for {artifact.record.target} ({day}{where})"
    if len(published) > _MAX_CANDIDATES:
        yield f"and {len(published) - _MAX_CANDIDATES} more"


def _matches(name: str, published: "Sequence[Published]") -> "list[Published]":
    by_model = [artifact for artifact in published if artifact.model_id == name]
    if by_model:
        return by_model
    model, at, prefix = name.rpartition("@")
    if at:
        of_model = [artifact for artifact in published if artifact.model_id == model and prefix]
        return [artifact for artifact in of_model if artifact.request_key.startswith(prefix)]
    if _KEY_PREFIX.fullmatch(name):
        return [artifact for artifact in published if artifact.request_key.startswith(name)]
    return []


def _nearest(name: str, published: "Sequence[Published]") -> str:
    import difflib

    models = sorted({artifact.model_id for artifact in published})
    model = name.rpartition("@")[0] or name
    close = difflib.get_close_matches(model, models, n=_MAX_CANDIDATES, cutoff=0.6)
    if close:
        return f"did you mean {_summary([artifact for artifact in published if artifact.model_id in close])}?"
    return f"it holds {_summary(published)}; give MODEL, MODEL@KEY or at least {_MIN_PREFIX} hex digits of a key"


def _summary(published: "Sequence[Published]") -> str:
    names = [artifact.name for artifact in published[:_MAX_CANDIDATES]]
    more = len(published) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
