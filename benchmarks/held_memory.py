"""Hold the free memory of this machine, and release it as other processes take it.

    python benchmarks/held_memory.py

The host of a virtual machine may take free memory back, and give it again on first use, which costs more than to write
to it. The memory of an EC2 instance is always its own. What this process holds is not free, so the host leaves it where
it is; what it releases is in use again at once. It prints a line when it holds all, and ends when it has nothing left.
"""

import mmap
import time
from pathlib import Path
from typing import Final

_CHUNK: Final = 64 * 1024**2
_LEFT_FREE: Final = 1024**3
_PERIOD: Final = 0.01  # seconds between two looks
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python has no name for


def _free() -> int:
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemFree:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    held: list[mmap.mmap] = []
    while _free() > _LEFT_FREE * 3 // 2:
        chunk = mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        chunk.madvise(mmap.MADV_HUGEPAGE)
        chunk.madvise(_POPULATE_WRITE)
        held.append(chunk)
    print(f"{len(held) * _CHUNK / 2**30:.1f} GiB are held", flush=True)
    while held:
        while held and _free() < _LEFT_FREE:
            held.pop().close()
        time.sleep(_PERIOD)


if __name__ == "__main__":
    main()
