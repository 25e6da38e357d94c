"""A worker of the local executor: items come on stdin, a line of JSON each; events go out on stdout in the same way.

It ends when its driver is gone, in the middle of an item too: what it would still make, the next build makes.
"""

import ctypes
import json
import os
import queue
import signal
import sys
import threading
from typing import IO, Final

from nxpipe.pipeline.build.carry_out import carry_out
from nxpipe.pipeline.build.events import Event, to_document
from nxpipe.pipeline.build.item import Item

_DRIVER_GONE: Final = 75
_AT_DEATH_OF_PARENT: Final = 1  # PR_SET_PDEATHSIG of prctl(2)


def main() -> None:
    _end_with_the_driver()
    out = _own_stdout()

    def write(document: object) -> None:
        out.write(json.dumps(document) + "\n")
        out.flush()

    def tell(event: Event) -> None:
        write(to_document(event))

    items: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(items,), name="items", daemon=True).start()
    while True:
        tell(carry_out(Item.from_document(json.loads(items.get())), tell))


def _end_with_the_driver() -> None:
    """Even one that hangs and notices nothing. Elsewhere than on Linux, and if the driver is gone by now, the end of
    stdin says so.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_AT_DEATH_OF_PARENT, signal.SIGKILL)


def _own_stdout() -> IO[str]:
    """Events have the pipe to themselves: whatever a library prints goes where errors go."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def _read(items: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        items.put(line)
    os._exit(_DRIVER_GONE)


if __name__ == "__main__":
    main()
