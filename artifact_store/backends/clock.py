"""A backend's own clock, read rarely and carried on by the machine's steady one."""

import time
from collections.abc import Callable
from typing import Final

_HOLDS: Final = 60.0  # seconds; no two steady clocks drift apart in that time


class Clock:
    def __init__(self, look: Callable[[], float]) -> None:
        self._look = look
        self._looked = -_HOLDS
        self._seen = 0.0

    def now(self) -> float:
        if time.monotonic() - self._looked >= _HOLDS:
            self._seen, self._looked = self._look(), time.monotonic()
        return self._seen + time.monotonic() - self._looked
