"""Under which circumstances a file had the bytes that were hashed, so that it need not be hashed again.

Time stamps are coarse: a second write a millisecond after the first leaves the same one. So a stamped file gets a
modification time that no clock shows any more; whoever writes to it, however soon, gives it another.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_WRITTEN: Final = 946_684_800 * 10**9  # the year 2000, in nanoseconds
_USED_AGAIN_AFTER: Final = 60.0  # seconds within which a second use is not noted


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


class Stamps:
    """A folder of stamps by digest; each is dated by the last use of what it vouches for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def fits(self, digest: str, seen: os.stat_result) -> bool:
        path = self._path(digest)
        try:
            stamped = path.read_text(errors="replace")
            used = path.stat().st_mtime
        except FileNotFoundError:
            return False
        if not stamped or stamped != stamp(seen):
            return False
        if time.time() - used > _USED_AGAIN_AFTER:
            with suppress(OSError):  # read-only for us; its owner's uses count
                os.utime(path)
        return True

    def put(self, digest: str, hashed: os.stat_result) -> None:
        """One that is torn, or written over by another process, fits nothing: the bytes are hashed again."""
        path = self._path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stamp(hashed))

    def last_used(self, digest: str) -> float:
        try:
            return self._path(digest).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def forget(self, digest: str) -> None:
        self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._root / digest[:2] / digest


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
