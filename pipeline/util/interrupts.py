"""Ctrl-C and SIGTERM: the work is unwound, so that its temporary files go; nobody waits for a server that is silent.

A thread cannot be stopped while it waits for an answer, which takes minutes to time out. What it leaves behind is what
a killed process leaves: nothing that a reader sees, and nothing that a retry stumbles over.
"""

import os
import signal
from types import FrameType
from typing import Final, NoReturn

from nxpipe.pipeline.util.exit_codes import INTERRUPTED, TERMINATED

_PATIENCE: Final = 3  # seconds
_CUT_SHORT: Final = b"\nInterrupted, and a request was not waited for; a retry is safe.\n"


def heed_interrupts() -> None:
    """One that was to be ignored, as a shell has it for what runs in the background, stays ignored."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def unwound(code: int) -> None:
    """The last word has been said; threads that still wait have no more to say."""
    if left := signal.alarm(0):
        signal.signal(signal.SIGALRM, lambda *_: os._exit(code))
        signal.alarm(left)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    _be_gone_soon(INTERRUPTED.number)
    raise KeyboardInterrupt


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    _be_gone_soon(TERMINATED.number)
    raise SystemExit(TERMINATED.number)


def _be_gone_soon(code: int) -> None:
    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        os.write(2, _CUT_SHORT)
        os._exit(code)

    if signal.alarm(_PATIENCE):
        leave(signal.SIGALRM, None)  # whoever asks twice means it
    signal.signal(signal.SIGALRM, leave)
