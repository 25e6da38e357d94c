"""`python -m tests.localaws.faulty_server FAULT NXPIPE-COMMAND...`: `nxpipe serve` on a device with a fault.

The faults are of the layer that runs programs: `slow` programs take longer, and those of `crashing` end the process
after so many runs, as a device that takes its driver down.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

from nxpipe.pipeline.cli.entry import main
from nxpipe.pipeline.serving.programs import Decoder

_DELAY: Final = 0.08  # seconds of each run
_RUNS: Final = 120


def _slow(run: Callable[..., Any], runs: "Iterator[int]") -> Callable[..., Any]:
    def slowly(*arguments: Any) -> Any:
        time.sleep(_DELAY)
        return run(*arguments)

    return slowly


def _crashing(run: Callable[..., Any], runs: "Iterator[int]") -> Callable[..., Any]:
    def until_it_crashes(*arguments: Any) -> Any:
        if next(runs) >= _RUNS:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(*arguments)

    return until_it_crashes


_FAULTS: Final = {"slow": _slow, "crashing": _crashing}

if __name__ == "__main__":
    fault, *sys.argv[1:] = sys.argv[1:]
    Decoder._run = _FAULTS[fault](Decoder._run, count())  # type: ignore[method-assign]
    main()
