"""Content-addressed store of compiled models, in a folder or in S3; docs/reference/store-format.md is its contract."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxpipe.artifact_store.records import Published
    from nxpipe.artifact_store.store import Store
    from nxpipe.artifact_store.url import open_store

__all__ = ["Published", "Store", "open_store"]

_HOMES = {"Published": "records", "Store": "store", "open_store": "url"}


def __getattr__(name: str) -> Any:
    """Import on first use: a caller that only handles the errors does not pay for pydantic."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
