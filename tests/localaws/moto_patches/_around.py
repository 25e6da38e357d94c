"""Replacement of a method of moto by a function that can call it."""

from typing import Any


def around(kind: type, name: str, new: Any) -> None:
    """Replace a method by a function that gets the original method as its first argument."""
    stock = getattr(kind, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return new(stock, self, *args, **kwargs)

    call.__name__ = name
    setattr(kind, name, call)
