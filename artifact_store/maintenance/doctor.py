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
    Found,
    NotApplicable,
    Payload,
    Probe,
    Probed,
    Violated,
    insist,
)
from nxpipe.artifact_store.errors import Changed, Denied, StoreUnavailable, UnsafeBackend

_RIVALS: Final = 16
_DRIFT: Final = 300.0  # seconds; S3 refuses requests at 900
_NEXT_TICK: Final = 1.1  # seconds: buckets keep times in whole ones

_ONE_WINNER: Final = "every race of the store is settled by creating; two winners would be two histories"
_READ_AFTER_WRITE: Final = "what a reader is told to look for must be there"


class Common:
    """Experiments in one folder, each on objects of its own."""

    def __init__(self, backend: Backend, folder: str) -> None:
        self._backend = backend
        self._folder = folder

    def all(self) -> Iterator[Probe]:
        yield Probe(
            "absence is told from failure", "a miss must not look like an error, nor an error like a miss", self.absent
        )
        yield Probe("create refuses a taken path", _ONE_WINNER, self.create_refuses)
        yield Probe(f"one of {_RIVALS} creators at once wins", _ONE_WINNER, self.race)
        yield Probe("create works again after a removal", "collected artifacts are published again", self.create_again)
        yield Probe("empty objects are kept", "a tensor or a log may be empty", self.empty)
        yield Probe("a replacement is visible at once", _READ_AFTER_WRITE, self.replace)
        yield Probe("a listing shows what was just written", "collection keeps what it is shown", self.listing)
        yield Probe("ranged reads are exact", "large blobs are fetched in ranges", self.ranges)
        yield Probe(
            "a ranged read of a changed object is refused", "ranges of two versions must not be mixed", self.pinned
        )
        yield Probe("look-up and listing agree", "collection removes the version that was listed", self.tags)
        yield Probe("an object can be made young", "collection spares what is about to be named again", self.touch)
        yield Probe("removal spares a changed object", "somebody needs it again", self.remove_refuses)
        yield Probe("removal is visible at once", "collection must not be misled by ghosts", self.remove)
        yield Probe("new objects are as old as the clock says", "the grace protects what is new", self.ages)
        yield Probe(
            "this machine's clock is near the store's",
            "expiry and signatures are judged by it",
            self.drift,
            vital=False,
        )

    def absent(self) -> None:
        path = self._path("absent")
        insist(self._backend.stat(path) is None and self._backend.read(path) is None, "an absent object was found")

    def create_refuses(self) -> None:
        path = self._path("taken")
        insist(self._create(path, b"first"), "a free path was refused")
        insist(not self._create(path, b"second"), "the second creation of one path succeeded")
        self._insist_on(path, b"first")

    def race(self) -> None:
        path, start = self._path("race"), Barrier(_RIVALS)

        def create(rival: int) -> bool:
            start.wait()
            return self._create(path, str(rival).encode())

        with ThreadPoolExecutor(_RIVALS) as pool:
            won = list(pool.map(create, range(_RIVALS)))
        insist(won.count(True) == 1, f"{won.count(True)} of {_RIVALS} creations of one path succeeded")
        self._insist_on(path, str(won.index(True)).encode())

    def create_again(self) -> None:
        path = self._path("again")
        insist(self._create(path, b"first"), "a free path was refused")
        insist(self._backend.remove(self._listed(path)), "an object that nobody changed was not removed")
        insist(self._create(path, b"second"), "the path of a removed object was refused")
        self._insist_on(path, b"second")

    def empty(self) -> None:
        path = self._path("empty")
        insist(self._create(path, b""), "a free path was refused")
        self._insist_on(path, b"")

    def replace(self) -> None:
        path = self._path("replaced")
        for content in (b"first", b"the second", b"3"):
            self._backend.replace(path, Payload.of(content))
            self._insist_on(path, content)

    def listing(self) -> None:
        paths = [self._path(f"listed/{number}") for number in range(3)]
        for at, path in enumerate(paths, 1):
            self._create(path, b"here")
            seen = sorted(self._backend.paths(self._path("listed/")))
            insist(seen == paths[:at], f"{len(seen)} of {at} objects were listed")

    def ranges(self) -> None:
        path, content = self._path("ranges"), bytes(range(256)) * 16
        self._create(path, content)
        for start, stop in ((0, 1), (1, 4096), (4095, 4096), (17, 1000), (4096, 4096)):
            seen = b"".join(self._backend.read(path, start, stop) or ())
            insist(seen == content[start:stop], f"bytes {start} to {stop} came out as {len(seen)} other ones")

    def pinned(self) -> None:
        path = self._path("pinned")
        self._backend.replace(path, Payload.of(b"the first version"))
        tag = self._listed(path).tag
        insist(b"".join(self._backend.read(path, 4, 9, tag=tag) or ()) == b"first", "its own version was refused")
        self._backend.replace(path, Payload.of(b"the other version"))
        try:
            seen = b"".join(self._backend.read(path, 4, 9, tag=tag) or ())
        except Changed:
            return
        insist(False, f"a read of the first version gave {seen!r} of the second")

    def tags(self) -> None:
        path = self._path("tags")
        self._create(path, b"first")
        stat, listed = self._backend.stat(path), self._listed(path)
        insist(stat is not None and (stat.size, stat.tag) == (listed.size, listed.tag), f"{stat} is not {listed}")
        self._backend.replace(path, Payload.of(b"other"))
        insist(self._listed(path).tag != listed.tag, "another content has the same tag")

    def touch(self) -> None:
        path = self._path("touched")
        self._create(path, b"kept")
        before = self._listed(path)
        time.sleep(_NEXT_TICK)
        insist(self._backend.touch(path), "an object that is there was said to be gone")
        after = self._listed(path)
        insist(after.modified > before.modified and after.tag != before.tag, "it is as old as before")
        self._insist_on(path, b"kept")
        insist(not self._backend.touch(self._path("no such")), "an absent object was made young")

    def remove_refuses(self) -> None:
        path = self._path("spared")
        self._create(path, b"kept")
        before = self._listed(path)
        time.sleep(_NEXT_TICK)
        self._backend.touch(path)
        insist(not self._backend.remove(before), "a version that is no more was removed")
        self._insist_on(path, b"kept")

    def remove(self) -> None:
        path = self._path("removed/it")
        self._create(path, b"gone soon")
        insist(self._backend.remove(self._listed(path)), "an object that nobody changed was not removed")
        insist(self._backend.stat(path) is None, "a removed object is looked up")
        insist(not self._backend.paths(self._path("removed/")), "a removed object is listed")

    def ages(self) -> str:
        path = self._path("age")
        self._create(path, b"new")
        age = self._backend.now() - self._listed(path).modified
        insist(abs(age) < _DRIFT, f"an object made just now is {age:.0f} s old")
        return f"a new object is {age:.1f} s old"

    def drift(self) -> str:
        offset = time.time() - self._backend.now()
        insist(abs(offset) < _DRIFT, f"this machine's clock is {offset:+.0f} s off the store's; set it")
        return f"{offset:+.1f} s"

    def _path(self, name: str) -> str:
        return self._folder + name

    def _create(self, path: str, content: bytes) -> bool:
        return self._backend.create(path, Payload.of(content), durable=True)

    def _insist_on(self, path: str, content: bytes) -> None:
        seen = b"".join(self._backend.read(path) or ())
        insist(seen == content, f"{content[:40]!r} was written, and {seen[:40]!r} read")

    def _listed(self, path: str) -> Found:
        found = [each for each in self._backend.walk(path.rpartition("/")[0] + "/") if each.path == path]
        insist(len(found) == 1, f"an object that was just written is listed {len(found)} times")
        return found[0]


Verdict = Literal["pass", "fail", "not applicable", "not proved"]


@dataclass(frozen=True)
class Diagnosis:
    """What became of one experiment.

    `not proved`: it could not be made, which tells nothing of the property; `denied` when it was not permitted.
    """

    probe: Probe
    verdict: Verdict
    detail: str
    denied: Denied | None = None


def examine(backend: Backend) -> Iterator[Diagnosis]:
    """Make every experiment, and clean up."""
    folder = f"doctor-{secrets.token_hex(8)}/"
    # One that is out of reach is said to be so once, and not by each experiment; one that forbids things, by each.
    with suppress(Denied):
        backend.stat(f"{folder}absent")

    def clean_up() -> None:
        for found in list(backend.walk(folder)):
            backend.remove(found)

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


def insist_on_safety(url: str, diagnoses: Sequence[Diagnosis]) -> None:
    """Refuse a backend without one of the vital properties, by their names."""
    vital = [diagnosis for diagnosis in diagnoses if diagnosis.probe.vital]
    failed = [diagnosis for diagnosis in vital if diagnosis.verdict == "fail"]
    if failed:
        raise UnsafeBackend(url, [f"{each.probe.name} ({each.detail})" for each in failed])
    unproved = [diagnosis for diagnosis in vital if diagnosis.verdict == "not proved"]
    if unproved:
        denied = {each.denied.permission: each.denied.operation for each in unproved if each.denied}
        lacking = "; ".join(f"{permission} ({operation})" for permission, operation in sorted(denied.items()))
        cause = f"this identity is denied {lacking}" if denied else f"the store {unproved[0].detail}"
        raise StoreUnavailable(
            f"{len(unproved)} vital properties of {url} could not be proved, which is not to say that they fail, for "
            f"{cause}; mend that and examine it again"
        )


def _diagnosis(probe: Probe) -> Diagnosis:
    try:
        return Diagnosis(probe, "pass", probe.run() or "")
    except NotApplicable as reason:
        return Diagnosis(probe, "not applicable", str(reason))
    except Violated as seen:
        return Diagnosis(probe, "fail", str(seen))
    except Denied as error:
        detail = f"{error.permission} is denied ({error.operation}), so it could not be proved"
        return Diagnosis(probe, "not proved", detail, error)
    except StoreUnavailable as error:
        return Diagnosis(probe, "not proved", str(error))
