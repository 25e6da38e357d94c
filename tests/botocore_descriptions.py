"""botocore's descriptions of the services, read once a process.

Each session reads and parses them for itself: a fifth of a test's time, since each store and each account of moto's
begins a session.
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
