"""What a worker does: one item, from its document to its end. The store it names is all that it has to do with."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from nxpipe.emulator.confinement import confined, limits_now
from nxpipe.pipeline.build.cell import Maker
from nxpipe.pipeline.build.events import Ended, Event, Said
from nxpipe.pipeline.build.faults import fault_of
from nxpipe.pipeline.build.item import Item
from nxpipe.pipeline.build.proved import doubt_of
from nxpipe.pipeline.util.text import human_bytes
from nxpipe.pipeline.verify.materials import Shelf

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.backends.protocol import Sent

_SHELF: Final = Shelf()  # of this process, which mostly makes one cell of a model after the other
_SAID_EVERY: Final = 2.0  # seconds
_KIB: Final = 1024


def carry_out(item: Item, tell: Callable[[Event], None]) -> Ended:
    """Whatever goes wrong is in what it returns; only an interruption is raised."""
    began, fault, made = time.monotonic(), None, False
    try:
        with confined(limits_now()):
            made = _made(item, tell)
    except Exception as error:
        fault = fault_of(error)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB + _of_readers()
    return Ended(item.key, time.monotonic() - began, cached=not made, memory=memory, fault=fault)


def _made(item: Item, tell: Callable[[Event], None]) -> bool:
    def say(text: str) -> None:
        tell(Said(item.key, text.strip()))

    @contextmanager
    def step(title: str) -> Iterator[None]:
        say(title)
        yield

    request = item.asked.request()
    request.check()
    store = _store(item.store, item.kms_key)
    maker = Maker(store, step, say, item.thresholds, force=item.force, shelf=_SHELF)
    if item.shape is not None:
        return maker.make(request, item.shape)
    published = None if item.force else store.find(item.key)
    if published is not None and doubt_of(published, store, request, item.thresholds) is None:
        return False
    maker.publish(request, partial(_watched, say))
    return True


def _of_readers() -> int:
    """The most memory that a process took which reads models for this one."""
    client = sys.modules.get("nxpipe.emulator.confinement.client")  # which is imported by the first question
    return client.peak() if client is not None else 0


@cache
def _store(url: str, kms_key: str | None) -> "Store":
    from nxpipe.artifact_store.url import open_store

    return open_store(url, kms_key=kms_key)


@contextmanager
def _watched(say: Callable[[str], None], title: str, total: int) -> Iterator["Sent"]:
    """Bytes on their way, told from time to time."""
    done, spoke = 0, time.monotonic()

    def sent(size: int) -> None:
        nonlocal done, spoke
        done += size
        if time.monotonic() - spoke >= _SAID_EVERY:
            spoke = time.monotonic()
            say(f"{title}: {100 * min(done, total) // max(total, 1)} % of {human_bytes(total)}")

    yield sent
