"""Several writers of one store, of which one at a time does one operation, in any chosen interleaving."""

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.backends.protocol import Backend, Payload, Sent, ignore_progress

T = TypeVar("T")
R = TypeVar("R")

_OPERATIONS: Final = (
    *("create", "replace", "read", "stat", "paths", "walk", "touch"),
    *("remove", "abandoned", "remove_abandoned", "now", "make_durable", "recover"),
)


class Killed(BaseException):
    """Raised in a writer that must stop; its `finally` clauses do not reach the store."""


class Task:
    """Work in a thread of its own that stops before each operation of its backend."""

    def __init__(self, name: str, work: Callable[[Backend], object], inner: Backend) -> None:
        self.name = name
        self.result: object = None
        self.error: Exception | None = None
        self.done = False
        self._killed = False
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work, inner), name=name, daemon=True)
        self._thread.start()
        self._stands.acquire()

    def step(self) -> None:
        """Run until before the next operation, or to the end."""
        if not self.done:
            self._go.release()
            self._stands.acquire()

    def finish(self) -> None:
        while not self.done:
            self.step()

    def kill(self) -> None:
        self._killed = True
        self.finish()

    def wait_for_turn(self) -> None:
        self._stands.release()
        self._go.acquire()
        if self._killed:
            raise Killed

    def _run(self, work: Callable[[Backend], object], inner: Backend) -> None:
        try:
            self.wait_for_turn()
            self.result = work(cast(Backend, _InTurn(inner, self)))
        except Killed:
            self.result = "killed"
        except Exception as error:
            self.error = error
        self.done = True
        self._stands.release()


class _InTurn:
    """A backend each use of which waits for its task's turn."""

    def __init__(self, inner: Backend, task: Task) -> None:
        self._inner = inner
        self._task = task

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """Run in the task's own thread."""
        return [function(item) for item in items]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in _OPERATIONS:
            return value

        def in_turn(*arguments: Any, **named: Any) -> Any:
            self._task.wait_for_turn()
            return value(*arguments, **named)

        return in_turn


class TimedFolder(LocalFolder):
    """A folder with a clock set by the test, for interleaved writers only."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.time = 1_800_000_000.0

    def now(self, *, read_only: bool = False) -> float:
        return self.time

    def create(self, path: str, payload: Payload, *, durable: bool = False, sent: Sent = ignore_progress) -> bool:
        return super().create(path, payload, durable=durable, sent=sent) and self._date(path)

    def replace(self, path: str, payload: Payload, *, sent: Sent = ignore_progress) -> None:
        super().replace(path, payload, sent=sent)
        self._date(path)

    def touch(self, path: str) -> bool:
        return super().touch(path) and self._date(path)

    def _date(self, path: str) -> bool:
        os.utime(self._root / path, (self.time, self.time))
        return True
