"""A local store with a clock set by the test, and with other writers' operations at any request."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.backends.protocol import Backend, Payload, Sent, ignore_progress
from nxpipe.artifact_store.builds import StepResult, keep_step_result, step_result
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.channel.change import Author, Requirements, promote, rollback
from nxpipe.artifact_store.channel.log import ChannelLog, channels
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, Incomplete, NotFound, Refused, StoreUnavailable
from nxpipe.artifact_store.layout import PARTS
from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, plan
from nxpipe.artifact_store.maintenance.reachability import DAY, History
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.pins import Pins
from tests.artifact_store.samples import manifest, publish_verified

_BEGIN = 1_800_000_000.0
_TICK = 0.001


class ClockedFolder(LocalFolder):
    """A folder whose objects have the test's times; no two are equal."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.time = _BEGIN
        self._folder = root

    def now(self, *, read_only: bool = False) -> float:
        return self.time

    def create(self, path: str, payload: Payload, *, durable: bool = False, sent: Sent = ignore_progress) -> bool:
        created = super().create(path, payload, durable=durable, sent=sent)
        if created:
            self._stamp(path)
        return created

    def replace(self, path: str, payload: Payload, *, sent: Sent = ignore_progress) -> None:
        super().replace(path, payload, sent=sent)
        self._stamp(path)

    def touch(self, path: str) -> bool:
        touched = super().touch(path)
        if touched:
            self._stamp(path)
        return touched

    def age(self, path: str, seconds: float) -> None:
        time = (self._folder / path).stat().st_mtime - seconds
        os.utime(self._folder / path, (time, time))

    def _stamp(self, path: str) -> None:
        self.time += _TICK
        os.utime(self._folder / path, (self.time, self.time))


class Killed(BaseException):
    """Simulates SIGKILL: no handler catches it."""


class Interrupted:
    """A backend that runs something else before its n-th request, reads included."""

    def __init__(self, inner: Backend, at: int, happen: Callable[[], None]) -> None:
        self._inner = inner
        self._left = at
        self._happen = happen

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return self._counted(value) if callable(value) and name not in ("each", "now") else value

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self._happen()
            return call(*arguments, **named)

        return counted


def interrupted(inner: Backend, at: int, happen: Callable[[], None]) -> Backend:
    return cast(Backend, Interrupted(inner, at, happen))


GRACE = DAY
HISTORY = History(seconds=5 * DAY, generations=2)
ANYBODY = Author("ann", "because")
MODELS = ("acme/bert", "acme/llama")
Act = Callable[[Backend], None]

# Errors that a process may get during a collection and must retry; no loss is permitted.
LOST_RACES = (Incomplete, NotFound, Refused, StoreUnavailable, Corrupt)


def contents(request: int) -> list[bytes]:
    """A request document, a program, tensors and a file; neighbours share most of them."""
    texts = [f"program {request // 4}", f"tensor {request // 2}", "tensor", f"file {request % 3}"]
    return [canonical_json({"request": request}), *(text.encode() for text in texts)]


def sample(store: Store, request: int) -> Manifest:
    blobs = [store.put_blob(data) for data in contents(request)]
    return manifest(blobs, model=MODELS[request % 2])


def program_of(store: Store, request: int) -> StepResult:
    """The program of a request, built if absent; neighbours share it."""
    program = contents(request)[1]
    key = sha256_hex(program)
    return step_result(store, key) or keep_step_result(store, key, {"program": store.put_blob(program)}, {})


def publish(request: int) -> Act:
    def act(backend: Backend) -> None:
        store = Store(backend, grace=GRACE)
        part = program_of(store, request)
        made = sample(store, request)
        assert part.blob("program") == made.executables[0].blob
        publish_verified(store, made)

    return act


def chosen(store: Store, number: int) -> Published:
    every = store.list()
    if not every:
        raise NotFound("an empty store")
    return every[number % len(every)]


def promoting(number: int, channel: str) -> Act:
    def act(backend: Backend) -> None:
        store = Store(backend, grace=GRACE)
        promote(store, channel, [chosen(store, number)], ANYBODY, Requirements())

    return act


def rolling_back(channel: str, to: int | None) -> Act:
    def act(backend: Backend) -> None:
        rollback(Store(backend, grace=GRACE), channel, ANYBODY, to=to)

    return act


def pinning(number: int, name: str, days: int) -> Act:
    def act(backend: Backend) -> None:
        one = chosen(Store(backend, grace=GRACE), number)
        Pins(backend).add(name, one.record.manifest, actor="ann", reason="test", seconds=days * DAY)

    return act


def unpinning(name: str) -> Act:
    return lambda backend: Pins(backend).remove(name)


def collecting(keep: int | None, days: int | None, budget: int | None) -> Act:
    rules = Rules(keep=keep, max_age=days and days * DAY, budget=budget, history=HISTORY)

    def act(backend: Backend) -> None:
        store = Store(backend, grace=GRACE)
        backend.recover()
        apply_plan(store, plan(store, rules, backend.now()))

    return act


def losses(backend: Backend) -> list[str]:
    """Reachable objects that are missing, computed without the collector's code."""
    store = Store(backend, grace=GRACE)
    lost = []
    for where, needed in _needed(store):
        if not store.blobs.is_intact(needed):
            lost.append(f"{where}: manifest {needed.sha256}")
            continue
        document = Manifest.from_bytes(store.read_blob(needed))
        lost += [f"{where}: {blob.sha256}" for blob in document.blobs() if not store.blobs.is_intact(blob)]
    return [*lost, *_dangling(store)]


def _dangling(store: Store) -> Iterator[str]:
    for path in store.backend.paths(PARTS):
        part = store.records.read(StepResult, path)
        if part is not None and not all(map(store.blobs.is_intact, part.blobs())):
            yield f"{part.path} outlives what it names"


def _needed(store: Store) -> Iterator[tuple[str, Blob]]:
    for entry in store.list():
        yield entry.request_key, entry.record.manifest
    for pin in Pins(store.backend).all():
        if pin.holds(store.backend.now()):
            yield pin.name, pin.manifest
    for channel in channels(store.backend):
        log = ChannelLog(store.backend, channel)
        for generation in list(log.back_from(log.tip()))[: HISTORY.generations]:
            for served in generation.artifacts:
                yield generation.path, served.manifest
