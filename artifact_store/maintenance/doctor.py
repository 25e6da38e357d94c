"""Probes of a backend, run in a scratch folder: the properties that every store relies on."""

import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Barrier
from typing import Final, Literal

from nxpipe.artifact_store.backends.protocol import (
    Backend,
    ListedObject,
    NotApplicable,
    Payload,
    Probe,
    Probed,
    Violated,
    require,
)
from nxpipe.artifact_store.errors import Changed, Denied, StoreUnavailable, UnsafeBackend

_RIVALS: Final = 16
_DRIFT: Final = 300.0  # seconds; S3 refuses requests at 900
_NEXT_TICK: Final = 1.1  # seconds; the times of a bucket are in whole seconds

_ONE_WINNER: Final = "creation decides every race of the store; two winners would create two histories"
_READ_AFTER_WRITE: Final = "a referenced object must be readable at once"


class Common:
    """The probes for every kind of backend, in one folder, each with objects of its own."""

    def __init__(self, backend: Backend, folder: str) -> None:
        self._backend = backend
        self._folder = folder

    def all(self) -> Iterator[Probe]:
        yield Probe(
            "absence is told from failure", "a miss must not look like an error, nor an error like a miss", self.absent
        )
        yield Probe("create refuses a taken path", _ONE_WINNER, self.create_refuses)
        yield Probe(f"one of {_RIVALS} creators at once wins", _ONE_WINNER, self.race)
        yield Probe(
            "create works again after a removal", "collected artifacts may be published again", self.create_again
        )
        yield Probe("empty objects are kept", "a tensor or a log may be empty", self.empty)
        yield Probe("a replacement is visible at once", _READ_AFTER_WRITE, self.replace)
        yield Probe(
            "a listing shows what was just written", "collection keeps the objects that a listing shows", self.listing
        )
        yield Probe("ranged reads are exact", "large blobs are fetched in ranges", self.ranges)
        yield Probe(
            "a ranged read of a changed object is refused", "ranges of two versions must not be mixed", self.pinned
        )
        yield Probe("look-up and listing agree", "collection removes the version that was listed", self.tags)
        yield Probe(
            "an object can be made young",
            "collection must spare objects that are about to be referenced again",
            self.touch,
        )
        yield Probe("removal spares a changed object", "another process needs it again", self.remove_refuses)
        yield Probe("removal is visible at once", "collection must not see removed objects", self.remove)
        yield Probe("new objects are as old as the clock says", "the grace period protects new objects", self.ages)
        yield Probe(
            "this machine's clock is near the store's",
            "expiry and signatures depend on it",
            self.drift,
            vital=False,
        )

    def absent(self) -> None:
        path = self._path("absent")
        require(
            self._backend.stat(path) is None and self._backend.read(path) is None, "a look-up found an absent object"
        )

    def create_refuses(self) -> None:
        path = self._path("taken")
        require(self._create(path, b"first"), "a free path was refused")
        require(not self._create(path, b"second"), "the second creation of one path succeeded")
        self._require_content(path, b"first")

    def race(self) -> None:
        path, start = self._path("race"), Barrier(_RIVALS)

        def create(rival: int) -> bool:
            start.wait()
            return self._create(path, str(rival).encode())

        with ThreadPoolExecutor(_RIVALS) as pool:
            created = list(pool.map(create, range(_RIVALS)))
        require(created.count(True) == 1, f"{created.count(True)} of {_RIVALS} creations of one path succeeded")
        self._require_content(path, str(created.index(True)).encode())

    def create_again(self) -> None:
        path = self._path("again")
        require(self._create(path, b"first"), "a free path was refused")
        require(self._backend.remove(self._listed(path)), "an unchanged object was not removed")
        require(self._create(path, b"second"), "the path of a removed object was refused")
        self._require_content(path, b"second")

    def empty(self) -> None:
        path = self._path("empty")
        require(self._create(path, b""), "a free path was refused")
        self._require_content(path, b"")

    def replace(self) -> None:
        path = self._path("replaced")
        for content in (b"first", b"the second", b"3"):
            self._backend.replace(path, Payload.of(content))
            self._require_content(path, content)

    def listing(self) -> None:
        paths = [self._path(f"listed/{number}") for number in range(3)]
        for count, path in enumerate(paths, 1):
            self._create(path, b"here")
            listed = sorted(self._backend.paths(self._path("listed/")))
            require(listed == paths[:count], f"{len(listed)} of {count} objects were listed")

    def ranges(self) -> None:
        path, content = self._path("ranges"), bytes(range(256)) * 16
        self._create(path, content)
        for start, stop in ((0, 1), (1, 4096), (4095, 4096), (17, 1000), (4096, 4096)):
            data = b"".join(self._backend.read(path, start, stop) or ())
            require(data == content[start:stop], f"the range {start} to {stop} returned {len(data)} wrong bytes")

    def pinned(self) -> None:
        path = self._path("pinned")
        self._backend.replace(path, Payload.of(b"the first version"))
        tag = self._listed(path).tag
        require(
            b"".join(self._backend.read(path, 4, 9, tag=tag) or ()) == b"first",
            "a read of the current version was refused",
        )
        self._backend.replace(path, Payload.of(b"the other version"))
        try:
            data = b"".join(self._backend.read(path, 4, 9, tag=tag) or ())
        except Changed:
            return
        require(False, f"a read of the first version returned {data!r} of the second")

    def tags(self) -> None:
        path = self._path("tags")
        self._create(path, b"first")
        stat, listed = self._backend.stat(path), self._listed(path)
        require(stat is not None and (stat.size, stat.tag) == (listed.size, listed.tag), f"{stat} is not {listed}")
        self._backend.replace(path, Payload.of(b"other"))
        require(self._listed(path).tag != listed.tag, "different content has the same tag")

    def touch(self) -> None:
        path = self._path("touched")
        self._create(path, b"kept")
        before = self._listed(path)
        time.sleep(_NEXT_TICK)
        require(self._backend.touch(path), "an existing object was reported as gone")
        after = self._listed(path)
        require(after.modified > before.modified and after.tag != before.tag, "its age or tag did not change")
        self._require_content(path, b"kept")
        require(not self._backend.touch(self._path("no such")), "an absent object was touched")

    def remove_refuses(self) -> None:
        path = self._path("spared")
        self._create(path, b"kept")
        before = self._listed(path)
        time.sleep(_NEXT_TICK)
        self._backend.touch(path)
        require(not self._backend.remove(before), "an object was removed by a superseded version")
        self._require_content(path, b"kept")

    def remove(self) -> None:
        path = self._path("removed/it")
        self._create(path, b"gone soon")
        require(self._backend.remove(self._listed(path)), "an unchanged object was not removed")
        require(self._backend.stat(path) is None, "a look-up found a removed object")
        require(not self._backend.paths(self._path("removed/")), "a removed object is listed")

    def ages(self) -> str:
        path = self._path("age")
        self._create(path, b"new")
        age = self._backend.now() - self._listed(path).modified
        require(abs(age) < _DRIFT, f"a new object is {age:.0f} s old")
        return f"a new object is {age:.1f} s old"

    def drift(self) -> str:
        offset = time.time() - self._backend.now()
        require(abs(offset) < _DRIFT, f"this machine's clock differs from the store's by {offset:+.0f} s; set it")
        return f"{offset:+.1f} s"

    def _path(self, name: str) -> str:
        return self._folder + name

    def _create(self, path: str, content: bytes) -> bool:
        return self._backend.create(path, Payload.of(content), durable=True)

    def _require_content(self, path: str, content: bytes) -> None:
        data = b"".join(self._backend.read(path) or ())
        require(data == content, f"{content[:40]!r} was written, and {data[:40]!r} read")

    def _listed(self, path: str) -> ListedObject:
        listed = [item for item in self._backend.walk(path.rpartition("/")[0] + "/") if item.path == path]
        require(len(listed) == 1, f"a new object is listed {len(listed)} times")
        return listed[0]


Verdict = Literal["pass", "fail", "not applicable", "not proved"]


@dataclass(frozen=True)
class Diagnosis:
    """The result of one probe.

    `not proved`: the probe could not run, so the property is unknown; `denied` is set if a permission is missing.
    """

    probe: Probe
    verdict: Verdict
    detail: str
    denied: Denied | None = None


def examine(backend: Backend) -> Iterator[Diagnosis]:
    """Run every probe, and clean up."""
    folder = f"doctor-{secrets.token_hex(8)}/"
    # An unreachable backend is reported once, here; missing permissions are reported by each probe.
    with suppress(Denied):
        backend.stat(f"{folder}absent")

    def clean_up() -> None:
        for item in list(backend.walk(folder)):
            backend.remove(item)

    try:
        for probe in Common(backend, folder).all():
            yield _diagnosis(probe)
        for probe in backend.probes(folder) if isinstance(backend, Probed) else ():
            yield _diagnosis(probe)
    except BaseException:
        with suppress(StoreUnavailable):
            clean_up()
        raise
    yield _diagnosis(Probe("the examination leaves nothing behind", "nor would a collection", clean_up, vital=False))


def require_safety(url: str, diagnoses: Sequence[Diagnosis]) -> None:
    """Raise UnsafeBackend for failed vital properties, and StoreUnavailable if one could not be tested."""
    vital = [diagnosis for diagnosis in diagnoses if diagnosis.probe.vital]
    failed = [diagnosis for diagnosis in vital if diagnosis.verdict == "fail"]
    if failed:
        raise UnsafeBackend(url, [f"{diagnosis.probe.name} ({diagnosis.detail})" for diagnosis in failed])
    unproved = [diagnosis for diagnosis in vital if diagnosis.verdict == "not proved"]
    if unproved:
        errors = (diagnosis.denied for diagnosis in unproved if diagnosis.denied)
        denied = {error.permission: error.operation for error in errors}
        missing = "; ".join(f"{permission} ({operation})" for permission, operation in sorted(denied.items()))
        cause = f"this identity is denied {missing}" if denied else f"the store {unproved[0].detail}"
        raise StoreUnavailable(
            f"{len(unproved)} vital properties of {url} could not be tested, so they may hold or fail: "
            f"{cause}; fix that and run the probes again"
        )


def _diagnosis(probe: Probe) -> Diagnosis:
    try:
        return Diagnosis(probe, "pass", probe.run() or "")
    except NotApplicable as reason:
        return Diagnosis(probe, "not applicable", str(reason))
    except Violated as observation:
        return Diagnosis(probe, "fail", str(observation))
    except Denied as error:
        detail = f"{error.permission} is denied ({error.operation}), so it could not be tested"
        return Diagnosis(probe, "not proved", detail, error)
    except StoreUnavailable as error:
        return Diagnosis(probe, "not proved", str(error))
