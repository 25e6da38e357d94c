"""Build cache of a store: the lease on a cache key, the negative cache of known failures, timings of cache misses,
and the log of hits and misses.

A lease keeps two builders from compiling the same key at once: the second waits, and has a cache hit. It is an
optimisation only: if it is lost, both compile, and the store's conditional create decides which result is kept.
"""

import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.builds import Failure as KnownFailure
from nxpipe.artifact_store.builds import Leases, failure_of, new_holder
from nxpipe.artifact_store.builds import record_failure as store_failure
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.errors import StoreError
from nxpipe.pipeline.build.jobs import is_caused_by_machine
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.models.versions import digest_of
from nxpipe.pipeline.util.errors import BuildRefused, DoesNotFit, PipelineError, VerificationFailed
from nxpipe.pipeline.util.files import MiB, json_of, read_file, user_state_folder, write_whole

_POLL: Final = 1.0  # seconds between two attempts to acquire a lease
# Known failures that are raised as their original class, for its exit code; all others become BuildRefused.
_KINDS: Final[dict[str, type[PipelineError]]] = {kind.__qualname__: kind for kind in (VerificationFailed, DoesNotFit)}


@contextmanager
def hold_lease(store: Store, key: str, log: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease on a cache key; wait while another builder holds it."""
    leases = Leases(store.backend)
    own = new_holder(f"{socket.gethostname()}:{os.getpid()}")
    logged = ""
    while (lease := leases.take(key, own)) is None:
        other = leases.current(key)
        if other is not None and _is_dead(other.holder):
            leases.give_back(other)
            continue
        if other is not None and other.holder != logged:
            logged = other.holder
            name, since = logged.rpartition(" ")[0], other.acquired_at[:16].replace("T", " ")
            log(f"  waiting for {name}, which has held the lease since {since} UTC (--force does not wait)")
        time.sleep(_POLL)
    with leases.kept(lease):
        yield


def _is_dead(holder: str) -> bool:
    """True if the holder is an ended process of this machine. Processes of other machines cannot be checked: their
    leases expire."""
    host, _, number = holder.rpartition(" ")[0].rpartition(":")
    if host != socket.gethostname() or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def raise_known_failure(store: Store, key: str, thresholds: Thresholds) -> None:
    """Raise the recorded failure of this cache key, if it would fail again in the same way."""
    try:
        failure = failure_of(store, key)
        if failure is None or not _is_valid(store, failure, thresholds):
            return
    except (StoreError, ValueError):  # without a readable record, the cell is built
        return
    kind = _KINDS.get(failure.kind, BuildRefused)
    when = failure.at[:16].replace("T", " ")
    raise kind(f"{failure.message.rstrip('.')} (known failure of {when} UTC; --force tries again)")


@contextmanager
def record_failure(store: Store, key: str, thresholds: Thresholds) -> Iterator[None]:
    """Record a deterministic error of the block as a known failure of the cache key."""
    try:
        yield
    except Exception as error:
        if not is_caused_by_machine(error):
            log = {"verify": asdict(thresholds), "traceback": "".join(traceback.format_exception(error))}
            with suppress(StoreError):  # the error itself matters more
                store_failure(store, key, error, log=canonical_json(log))
        raise


def _is_valid(store: Store, failure: KnownFailure, thresholds: Thresholds) -> bool:
    """False for a failed verification under other thresholds, which are not part of the key."""
    if failure.kind != VerificationFailed.__qualname__:
        return True
    return failure.log is not None and json_of(store.read_blob(failure.log))["verify"] == asdict(thresholds)


_KEPT: Final = 2000  # newest timings in the file


class Timings:
    """Build times by timing key, in a file that may be deleted at any time. The key ignores the compiler: its next
    release takes about as long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[float]] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError):  # no file yet, or another format
            document = json_of(read_file(path, limit=4 * MiB))
            self._known = {str(name): [float(work), float(seconds)] for name, (work, seconds) in document.items()}

    @classmethod
    def kept_in(cls, state: Path) -> Self:
        return cls(state / "timings.json")

    def estimate(self, name: str, work: float) -> float | None:
        """Seconds of the cell's last build, else a fit of the other timings by work; None before the first build."""
        if name in self._known:
            return self._known[name][1]
        if not self._known:
            return None
        rate, base = _line(self._known.values())
        return max(rate * work + base, 0.1)

    def note(self, built: Mapping[str, tuple[float, float]]) -> None:
        """Record work and seconds by timing key."""
        if not built:
            return
        for name, (work, seconds) in built.items():
            self._known.pop(name, None)
            self._known[name] = [work, round(seconds, 2)]
        kept = dict(list(self._known.items())[-_KEPT:])
        with suppress(OSError):  # an estimate is not worth a failed build
            write_whole(self._path, json.dumps(kept).encode())


_LOG_FORMAT: Final = "nxpipe.build/1"
_LARGEST_LOG: Final = 8 * MiB


class BuildLog:
    """One line for each artifact of each build of this user: its cache hits, and the seconds of its misses.

    A line is one `write` to a file that is open for appending, so that builds that run at once need no lock. The file
    may be deleted at any time; at its largest size it is set aside, in place of an older one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of_user(cls) -> Self:
        return cls(user_state_folder() / "builds.jsonl")

    def note(self, entries: Iterable[Mapping[str, object]]) -> None:
        """Append the entries. A build does not fail for a line that cannot be written."""
        with suppress(OSError, StoreError):
            lines = b"".join(canonical_json({"format": _LOG_FORMAT, **entry}) + b"\n" for entry in entries)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, lines)
                if os.fstat(file).st_size > _LARGEST_LOG:
                    self._path.replace(self._aside)
            finally:
                os.close(file)

    def entries(self) -> Iterator[Mapping[str, Any]]:
        """The entries, oldest first. A line that was cut short, or is of another version, is left out."""
        for path in (self._aside, self._path):
            try:
                lines = read_file(path, limit=2 * _LARGEST_LOG).splitlines()
            except (OSError, ValueError):  # no build yet
                continue
            for line in lines:
                with suppress(ValueError):
                    entry = json_of(line)
                    if isinstance(entry, dict) and entry.get("format") == _LOG_FORMAT:
                        yield entry

    @property
    def _aside(self) -> Path:
        return self._path.with_suffix(".1.jsonl")


def timing_key(request: BuildSpec, shape: Shape) -> str:
    """Key of a cell that ignores its compiler and its weights."""
    return digest_of(
        {
            "model": request.source.id,
            "shape": [shape.phase, shape.batch, shape.sequence],
            "target": request.target.compiler_target,
            "tp": request.tensor_parallel,
            "backend": request.backend,
            "verified": request.verified,
        }
    )


def _line(timings: Iterable[list[float]]) -> tuple[float, float]:
    """Least-squares line of seconds by work (slope, offset); a constant if all have the same work."""
    points = list(timings)
    middle = sum(work for work, _ in points) / len(points)
    mean = sum(seconds for _, seconds in points) / len(points)
    spread = sum((work - middle) ** 2 for work, _ in points)
    rate = sum((work - middle) * (seconds - mean) for work, seconds in points) / spread if spread else 0.0
    return max(rate, 0.0), mean - max(rate, 0.0) * middle
