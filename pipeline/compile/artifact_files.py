"""What an artifact keeps beside its programs, by path; section 4 of docs/reference/store-format.md."""

from typing import Final

UTILISATION: Final = "utilisation.json"
CACHE: Final = "neuron-cache"


def graph(program: str) -> str:
    """What the program of instructions was made of."""
    return f"graphs/{program}"


def constant(digest: str) -> str:
    """A table that is too large to stand in each program that reads it."""
    return f"constants/{digest}"


def cached(program: str, file: str) -> str:
    """What AWS's compiler left in its own cache; `file` is as it lies there, its two folders first."""
    return f"{CACHE}/{program}/{file}"
