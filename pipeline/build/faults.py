"""From an error to what the driver of a build makes of it: docs/reference/building.md, section 4."""

import traceback
from typing import Final

from nxpipe.artifact_store.errors import BadUrl, Changed, Denied, Incomplete, StoreUnavailable, UnsafeBackend
from nxpipe.emulator.errors import LimitExceeded
from nxpipe.pipeline.build.events import Fault, Sort
from nxpipe.pipeline.build.failed import is_of_the_machine
from nxpipe.pipeline.util.errors import AwsError, MissingSoftware, NotEnoughMemory, sentence_of
from nxpipe.pipeline.util.exit_codes import INTERNAL, exit_code_of
from nxpipe.pipeline.util.process import report_crash

# No other cell would fare better.
_HERE: Final = (MissingSoftware, AwsError, BadUrl, Denied, UnsafeBackend)
_MAY_PASS: Final = (OSError, MemoryError, StoreUnavailable, Changed, Incomplete, NotEnoughMemory)


def fault_of(error: Exception) -> Fault:
    row = exit_code_of(error)
    return Fault(
        sort=sort_of(error),
        kind=type(error).__qualname__,
        message=_line(error) if row else report_crash(error),
        code=(row or INTERNAL).number,
        log="".join(traceback.format_exception(error)),
    )


def sort_of(error: Exception) -> Sort:
    """Only what is known to pass is tried again: an error that nobody foresaw would come again."""
    if isinstance(error, _HERE):
        return "here"
    if isinstance(error, LimitExceeded):
        return "limit"
    passes = isinstance(error, _MAY_PASS) or is_of_the_machine(error)
    return "environmental" if passes else "deterministic"


def _line(error: Exception) -> str:
    """It stands in tables and in logs of others."""
    return " ".join(sentence_of(error).split())
