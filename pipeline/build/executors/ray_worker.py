"""What runs on the nodes of a Ray cluster: an item, and the box into which it puts what it has to say."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.build.events import Begun, Ended, Event
from nxpipe.pipeline.build.item import Item

_BEAT: Final = 1.0  # seconds between two signs of life
_PATIENCE: Final = 5.0  # seconds that an end waits for what was said before it

Work: TypeAlias = Callable[[Item, Callable[[Event], None]], Ended]


@dataclass(frozen=True)
class Alive:
    """A sign of life: the item was begun, even where the letter that said so was lost, and holds so many bytes."""

    memory: int


Letter: TypeAlias = tuple[int, Event | Alive]


class Mailbox:
    """An actor: letters of the tasks, by their numbers, until the driver fetches them.

    It may die with letters in it. They are talk; what an item came to is what its task returns.
    """

    def __init__(self) -> None:
        self._letters: list[Letter] = []

    def put(self, task: int, said: Event | Alive) -> None:
        self._letters.append((task, said))

    def take(self) -> list[Letter]:
        letters, self._letters = self._letters, []
        return letters


class _Voice:
    """Never waits and never fails: no work is lost because nobody listens."""

    def __init__(self, task: int, mailbox: Any) -> None:
        self._task = task
        self._mailbox = mailbox
        self._last: Any = None

    def say(self, said: Event | Alive) -> None:
        self._last = self._mailbox.put.remote(self._task, said)

    def be_heard(self) -> None:
        """One task's letters arrive in their order: with the last, all have."""
        import ray

        ray.wait([self._last], timeout=_PATIENCE)


def carried_out(task: int, item: Item, mailbox: Any, work: Work | None) -> Ended:
    """The task itself. Nothing of it is said after it has returned."""
    work = work or _usual_work()
    voice = _Voice(task, mailbox)
    voice.say(Begun(item.key, f"{socket.gethostname()}/{os.getpid()}"))
    with _signs_of_life(voice):
        ended = work(item, voice.say)
    voice.be_heard()
    return ended


def _usual_work() -> Work:
    from nxpipe.pipeline.build.carry_out import carry_out

    return carry_out


@contextmanager
def _signs_of_life(voice: _Voice) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT):
            voice.say(Alive(_held()))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _held() -> int:
    """Bytes of memory of this process and of those that it started, as a compiler is."""
    from ray.thirdparty_files import psutil

    own = psutil.Process()
    held = 0
    for process in (own, *own.children(recursive=True)):
        try:
            held += process.memory_info().rss
        except psutil.NoSuchProcess:  # it has just ended
            continue
    return held
