"""The tie of a process to its parent, without which a killed parent leaves its processes behind."""

import ctypes
import os
import signal
import sys
from typing import Final

_SET_PDEATHSIG: Final = 1  # an option of prctl(2)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
