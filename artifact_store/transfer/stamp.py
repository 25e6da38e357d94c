"""Under which circumstances a file had the bytes that were hashed, so that it need not be hashed again.

Time stamps are coarse: a second write a millisecond after the first leaves the same one. So a stamped file gets a
modification time that no clock shows any more; whoever writes to it, however soon, gives it another.
"""

import os
from pathlib import Path
from typing import Final

_WRITTEN: Final = 946_684_800 * 10**9  # the year 2000, in nanoseconds


def date(file: Path | int) -> None:
    """To be done before the bytes are hashed, or while nobody else knows the file."""
    os.utime(file, ns=(_WRITTEN, _WRITTEN))


def stamp(seen: os.stat_result) -> str:
    """Empty where nothing can be promised: for a file that somebody has written to since it was dated, and where the
    system does not say which start of it this is, since after a power loss a file may hold other bytes."""
    boot = _boot()
    if not boot or seen.st_mtime_ns != _WRITTEN:
        return ""
    return f"{boot} {seen.st_dev} {seen.st_ino} {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns}"


def stamp_of(path: Path) -> str:
    """The same of what lies there; empty when nothing does."""
    try:
        return stamp(os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
