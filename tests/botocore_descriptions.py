"""A cache of botocore's service descriptions for this process.

Otherwise each session parses them again, which is a fifth of a test's time: each store and each account of moto starts
a session.
"""

from functools import cache
from typing import Any, Final

from botocore.loaders import Loader

_READ: Final[dict[Any, Any]] = {}


@cache
def share_descriptions() -> None:
    stock: Any = Loader.__init__

    def share(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self._cache = _READ

    setattr(Loader, "__init__", share)  # noqa: B010
