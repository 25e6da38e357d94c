"""Shadow requests: a second endpoint gets a copy of each request, and both answers are recorded as a pair.

The client sees the answer of the first endpoint, the stable version, alone. A pair is bad for the canary if it did not
answer with 200, or if less than `match` of the tokens are the stable version's up to the first difference. Requests
that are sampled get a seed, so that equal versions draw equal tokens.

`pairs.jsonl` has a line for each pair, and `batches.jsonl` one for each minute, in the form that the canary judge reads
(`pipeline.canary.metrics.Batch`).

The second endpoint, its share of requests and the folder of the record are given once, or by a control file that is
read again every second: a rollout switches its shadow phase on and off without a restart of the server.
"""

import asyncio
import http.client
import itertools
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from nxpipe.pipeline.canary.metrics import METRICS, Arm, Batch, Pairs
from nxpipe.pipeline.util.errors import InputInvalid

_MOST_PENDING: Final = 256
_REREAD: Final = 1.0  # seconds between two looks at a control file
_DROPPED_FIELDS: Final = ("stream", "stream_options")


@dataclass(frozen=True)
class ShadowAnswer:
    """What one version answered: the tokens of each choice, or None without an answer."""

    tokens: tuple[tuple[int, ...], ...] | None
    seconds: float
    status: int = 200


@dataclass
class _Minute:
    """The pairs of a minute; `canary_alone` are those that are bad for the canary only."""

    pairs: int = 0
    canary_bad: int = 0
    stable_bad: int = 0
    canary_alone: int = 0
    stable_alone: int = 0

    def batch(self, minute: int) -> Batch:
        others = (0,) * (len(METRICS) - 1)
        pairs = Pairs((self.canary_alone, *others), (self.stable_alone, *others))
        return Batch(minute, Arm(self.pairs, self.canary_bad), Arm(self.pairs, self.stable_bad), pairs)


@dataclass(frozen=True)
class Mirroring:
    """Which requests are mirrored, where to, and where their pairs are recorded."""

    urls: tuple[str, ...]  # in turn
    record: Path
    percent: float = 100.0
    headers: Mapping[str, str] = field(default_factory=dict)  # of mirrored requests

    def __post_init__(self) -> None:
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme != "http" or not parts.hostname:
                raise InputInvalid(f"shadow address {url}: pass an address such as http://10.0.0.7:8000")
        if not 0 < self.percent <= 100:
            raise InputInvalid(f"shadow percent {self.percent}: pass more than 0 and at most 100")

    @staticmethod
    def of(document: Mapping[str, Any]) -> "Mirroring | None":
        """What a control file says; None if nothing is mirrored, as by an empty document."""
        if not document.get("urls") or not document.get("percent", 100):
            return None
        record, percent = Path(document["record"]), float(document.get("percent", 100))
        return Mirroring(tuple(document["urls"]), record, percent, dict(document.get("headers", {})))


@dataclass
class ControlFile:
    """A JSON file with the fields of Mirroring. One that is absent or invalid mirrors nothing."""

    path: Path
    _read_at: float = -math.inf
    _stamp: tuple[int, int] | None = None
    _value: Mirroring | None = None

    def mirroring(self) -> Mirroring | None:
        if time.monotonic() - self._read_at < _REREAD:
            return self._value
        self._read_at = time.monotonic()
        try:
            found = self.path.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp != self._stamp:
                self._stamp, self._value = stamp, Mirroring.of(json.loads(self.path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, InputInvalid):
            self._stamp, self._value = None, None
        return self._value


@dataclass
class ShadowCounts:
    sent: int = 0
    bad: int = 0
    dropped: int = 0  # because too many were pending


@dataclass
class Shadow:
    """The second endpoint, and the record of the pairs."""

    source: "Mirroring | ControlFile"
    match: float = 1.0
    seconds: float = 60.0
    counts: ShadowCounts = field(default_factory=ShadowCounts)
    _minutes: dict[tuple[Path, int], _Minute] = field(default_factory=dict)
    _turn: "itertools.count[int]" = field(default_factory=itertools.count)
    _pending: set["asyncio.Task[None]"] = field(default_factory=set)

    def sampled(self) -> Mirroring | None:
        """How this request is mirrored; None if it is not."""
        now = self.source if isinstance(self.source, Mirroring) else self.source.mirroring()
        return now if now is not None and random.random() * 100 < now.percent else None  # noqa: S311, a sample

    def mirror(self, to: Mirroring, path: str, document: Mapping[str, Any], stable: ShadowAnswer) -> None:
        """Send a request to the second endpoint, without waiting for its answer."""
        if len(self._pending) >= _MOST_PENDING:
            self.counts.dropped += 1
            return
        task = asyncio.get_running_loop().create_task(self._compare(to, path, document, stable))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def close(self) -> None:
        """Wait for the answers that are due, and write the last minutes."""
        await asyncio.gather(*self._pending)
        self._write_minutes(before=None)

    async def _compare(self, to: Mirroring, path: str, document: Mapping[str, Any], stable: ShadowAnswer) -> None:
        minute = int(time.time() // 60)
        canary = await asyncio.to_thread(self._answer, to, path, document)
        matched, diverged = _matched(stable, canary)
        bad = canary.tokens is None or matched < self.match
        self.counts.sent += 1
        self.counts.bad += bad
        self._add(to.record, minute, canary_bad=bad, stable_bad=stable.tokens is None)
        pair = {
            "minute": minute,
            "path": path,
            "stable": _described(stable),
            "canary": _described(canary),
            "match": round(matched, 4),
            "diverged_at": diverged,
            "bad": bad,
        }
        _append(to.record / "pairs.jsonl", pair)
        self._write_minutes(before=int(time.time() // 60) - 1)

    def _answer(self, to: Mirroring, path: str, document: Mapping[str, Any]) -> ShadowAnswer:
        """The second endpoint's answer; what it refuses or breaks is its answer too."""
        body = {name: value for name, value in document.items() if name not in _DROPPED_FIELDS}
        url, started = urlsplit(to.urls[next(self._turn) % len(to.urls)]), time.monotonic()
        headers = {**to.headers, "content-type": "application/json"}
        try:
            with closing(http.client.HTTPConnection(url.hostname or "", url.port, timeout=self.seconds)) as connection:
                data = json.dumps(body | {"return_token_ids": True}).encode()
                connection.request("POST", path, data, headers)
                response = connection.getresponse()
                answer, status = response.read(), response.status
            tokens = tuple(tuple(choice["token_ids"]) for choice in json.loads(answer)["choices"])
        except (OSError, http.client.HTTPException):
            return ShadowAnswer(None, time.monotonic() - started, 0)
        except (ValueError, KeyError, TypeError):
            return ShadowAnswer(None, time.monotonic() - started, status)
        return ShadowAnswer(tokens if status == 200 else None, time.monotonic() - started, status)

    def _add(self, record: Path, minute: int, *, canary_bad: bool, stable_bad: bool) -> None:
        own = self._minutes.setdefault((record, minute), _Minute())
        own.pairs += 1
        own.canary_bad += canary_bad
        own.stable_bad += stable_bad
        own.canary_alone += canary_bad and not stable_bad
        own.stable_alone += stable_bad and not canary_bad

    def _write_minutes(self, before: int | None) -> None:
        """Write the minutes that no pair will be added to; a request takes at most `seconds`."""
        last = None if before is None else before - int(self.seconds // 60)
        for record, minute in sorted(self._minutes):
            if last is None or minute < last:
                counted = self._minutes.pop((record, minute))
                _append(record / "batches.jsonl", counted.batch(minute).as_json())


def _append(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(document, separators=(",", ":")) + "\n")


def _matched(stable: ShadowAnswer, canary: ShadowAnswer) -> tuple[float, int | None]:
    """The part of the tokens before the first difference, and its place; the worst of all choices."""
    if stable.tokens is None or canary.tokens is None:
        return (1.0, None) if stable.tokens is canary.tokens else (0.0, 0)
    if len(stable.tokens) != len(canary.tokens):
        return 0.0, 0
    worst: tuple[float, int | None] = (1.0, None)
    for ours, theirs in zip(stable.tokens, canary.tokens, strict=True):
        if ours != theirs:
            same = _common(ours, theirs)
            worst = min(worst, (same / max(len(ours), len(theirs)), same), key=lambda each: each[0])
    return worst


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    differing = (place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    return next(differing, min(len(ours), len(theirs)))


def _described(answer: ShadowAnswer) -> dict[str, Any]:
    tokens = None if answer.tokens is None else sum(map(len, answer.tokens))
    return {"status": answer.status, "tokens": tokens, "seconds": round(answer.seconds, 4)}
