"""Infinity and not-a-number in a configuration, which JSON cannot spell and published models hold.

Files have them in two spellings: Python's bare `Infinity`, and transformers' `{"__float__": "Infinity"}`. The second
is JSON, and unlike a mere text it is read back as a number, so it is the one in keys and in what is published.
"""

import math
from typing import Final

_TAG: Final = "__float__"
_SPELLED: Final = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def meant(value: object) -> object:
    """A value as read from a file, with the numbers that tags stand for."""
    if isinstance(value, dict):
        tag = value.get(_TAG) if len(value) == 1 else None
        return _SPELLED[tag] if isinstance(tag, str) and tag in _SPELLED else {k: meant(v) for k, v in value.items()}
    return [meant(part) for part in value] if isinstance(value, list) else value


def spelled(value: object) -> object:
    """The same value as JSON can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: spelled(part) for key, part in value.items()}
    return [spelled(part) for part in value] if isinstance(value, list | tuple) else value
