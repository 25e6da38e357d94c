"""TODO."""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from nxpipe.artifact_store.errors import BadUrl, Changed, Denied, Incomplete, StoreUnavailable, UnsafeBackend
from nxpipe.emulator.errors import LimitExceeded
from nxpipe.pipeline.util.crash import report_crash
from nxpipe.pipeline.util.errors import AwsError, MissingSoftware, NotEnoughMemory, sentence_of
from nxpipe.pipeline.util.exit_codes import INTERNAL, exit_code_of

# What becomes of a failed item: docs/building.md, section 4.
Sort: TypeAlias = Literal["deterministic", "environmental", "limit", "here"]


@dataclass(frozen=True)
class Fault:
    """Why an item failed. `kind` is the error's class, `code` its number in the table of exit codes."""

    sort: Sort
    kind: str
    message: str
    code: int
    log: str = ""  # the traceback, or the end of what a process said


# Behind an error of the request's own may stand one of this machine: no memory, no disk, a package that is missing.
_OF_THE_MACHINE = (MemoryError, OSError, ImportError)


def is_of_the_machine(error: BaseException) -> bool:
    """Whether this machine's state is behind it, however it was wrapped."""
    return any(isinstance(cause, _OF_THE_MACHINE) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


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
