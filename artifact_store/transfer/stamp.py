"""Under which circumstances a file had the bytes that were hashed, so that it need not be hashed again.

Time stamps are coarse: a second write a millisecond after the first leaves the same one. So a stamped file gets a
modification time that no clock shows any more; whoever writes to it, however soon, gives it another.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.backends.beneath import Beneath, NotAFile, is_ours
from nxpipe.artifact_store.backends.files import scratch

_WRITTEN: Final = 946_684_800 * 10**9  # the year 2000, in nanoseconds
_LONGEST: Final = 1024  # bytes of a stamp
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


class Stamps:
    """A folder of stamps by digest; each is dated by the last use of what it vouches for.

    In a cache that several users share, anybody may have written a stamp and the file that it fits: both count only
    where no other user can have written them. The digest is in the stamp, for a stranger may rename what is ours.
    """

    def __init__(self, files: Beneath, folder: str) -> None:
        self._files = files
        self._folder = folder

    def fits(self, digest: str, seen: os.stat_result) -> bool:
        stamped, used = self._read(digest)
        if not is_ours(seen) or not stamp(seen) or stamped != f"{digest} {stamp(seen)}":
            return False
        if time.time() - used > _USED_AGAIN_AFTER:
            with suppress(OSError):  # read-only for us; its owner's uses count
                self._files.touch(self._path(digest))
        return True

    def put(self, digest: str, hashed: os.stat_result) -> None:
        """One that another process has written over fits nothing: the bytes are hashed again."""
        path = self._path(digest)
        folder = self._files.root / path.rpartition("/")[0]
        with scratch(folder, 0o644, self._files) as file:
            file.write(f"{digest} {stamp(hashed)}".encode())
            file.finish()
            self._files.rename(file.path.relative_to(self._files.root).as_posix(), path)

    def last_used(self, digest: str) -> float:
        try:
            return self._files.status(self._path(digest)).st_mtime
        except FileNotFoundError:
            return 0.0

    def forget(self, digest: str) -> None:
        with suppress(FileNotFoundError, PermissionError):
            self._files.remove(self._path(digest))

    def _read(self, digest: str) -> tuple[str, float]:
        """What a stamp of ours says, and when it was last used; nothing where there is none."""
        try:
            file = self._files.reader(self._path(digest))
        except (FileNotFoundError, PermissionError, NotAFile):
            return "", 0.0
        with file:
            seen = os.fstat(file.fileno())
            return (file.read(_LONGEST).decode(errors="replace"), seen.st_mtime) if is_ours(seen) else ("", 0.0)

    def _path(self, digest: str) -> str:
        return f"{self._folder}/{digest[:2]}/{digest}"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
