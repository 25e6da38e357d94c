"""How moto is mended: our function stands before one of its methods."""

from typing import Any


def around(kind: type, name: str, new: Any) -> None:
    """The function gets the method itself as its first argument, to call it or not."""
    stock = getattr(kind, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return new(stock, self, *args, **kwargs)

    call.__name__ = name
    setattr(kind, name, call)
