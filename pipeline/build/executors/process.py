"""A worker of the local executor: items come on stdin, a line of JSON each; events go out on stdout in the same way.

It ends when its driver is gone, in the middle of an item too: what it would still make, the next build makes.
"""

import ctypes
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from nxpipe.pipeline.build.jobs import Event, Job, from_document, to_document
from nxpipe.pipeline.build.worker import run_job

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
        tell(run_job(Job.from_document(json.loads(items.get())), tell))


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


_MODULE: Final = "nxpipe.pipeline.build.executors.process"
# Of numpy's and PyTorch's arithmetic: workers beside each other must not share out the same processors twice.
_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LAST_WORDS: Final = 8000  # bytes of what it said on stderr
_CHUNK: Final = 1 << 16
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class WorkerProcess:
    """In a session of its own, so that Ctrl-C is the driver's to answer, and all that it started ends with it."""

    def __init__(self, threads: int) -> None:
        self._said = tempfile.TemporaryFile(prefix="nxpipe-worker-")  # noqa: SIM115 - closed by `kill`
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],  # no module of the folder that a build runs in
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | dict.fromkeys(_THREADS, str(threads)),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._unread = b""
        self.job: Job | None = None
        self._began = 0.0
        self._is_new = False
        self.peak = 0

    @property
    def name(self) -> str:
        return f"process {self._process.pid}"

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def give(self, job: Job) -> None:
        """One that has died meanwhile is found out when it is listened to."""
        assert self._process.stdin is not None
        self.job, self._began, self._is_new, self.peak = job, time.monotonic(), True, 0
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job.document()).encode() + b"\n")
            self._process.stdin.flush()

    def is_new_to_its_item(self) -> bool:
        """True once for each item."""
        was, self._is_new = self._is_new, False
        return was

    def take_back(self) -> int:
        """Its item has ended; the most memory that was seen of it."""
        self.measure()
        self.job = None
        return self.peak

    @staticmethod
    def wait_for_news(workers: Iterable["WorkerProcess"], seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                assert worker._process.stdout is not None
                selector.register(worker._process.stdout, selectors.EVENT_READ)
            selector.select(seconds)

    def read(self) -> list[Event]:
        """What it has told since; half a line waits for its other half."""
        assert self._process.stdout is not None
        while chunk := self._process.stdout.read(_CHUNK):
            self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        return [from_document(json.loads(line)) for line in lines]

    def death(self) -> str | None:
        """How it ended, in words; None while it lives."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
            return f"was ended by {signal.Signals(-code).name}{hint}"
        return f"ended with exit code {code}"

    def last_words(self) -> str:
        end = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(end - _LAST_WORDS, 0))
        return self._said.read().decode(errors="replace")

    def measure(self) -> int:
        """Bytes of memory that it and its children hold now; 0 where the system does not say."""
        now = sum(map(_resident, _with_children(self._process.pid)))
        self.peak = max(self.peak, now)
        return now

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                with suppress(BrokenPipeError):  # an item that it had not read
                    pipe.close()


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in path.read_text().split():
                yield from _with_children(int(child))


def _resident(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0
