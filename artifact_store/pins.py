"""Pins: named records that exempt manifests from garbage collection, permanently or during an operation."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

from nxpipe.artifact_store.backends.protocol import Backend, ListedObject
from nxpipe.artifact_store.documents import (
    Blob,
    Label,
    Name,
    Sealed,
    Text,
    Time,
    as_time,
    seconds_since_1970,
    written_now,
)
from nxpipe.artifact_store.errors import NotFound, Refused
from nxpipe.artifact_store.layout import PINS, pin_path
from nxpipe.artifact_store.records import Records

HOLD_SECONDS: Final = 3600.0  # seconds for which a promotion pins the manifests that it checks


class Pin(Sealed):
    format: Literal["nxpipe.pin/1"] = "nxpipe.pin/1"
    name: Label
    manifest: Blob
    reason: Text
    actor: Name
    at: Time
    expires_at: Time | None

    @property
    def path(self) -> str:
        return pin_path(self.name)

    def holds(self, now: float) -> bool:
        return self.expires_at is None or seconds_since_1970(self.expires_at) > now


class Pins:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._records = Records(backend)

    def add(self, name: str, manifest: Blob, *, actor: str, reason: str, seconds: float | None = None) -> Pin:
        """Keep a manifest and every blob that it names: permanently, or for `seconds`."""
        pin = Pin(
            name=name,
            manifest=manifest,
            reason=reason,
            actor=actor,
            at=written_now(),
            expires_at=None if seconds is None else as_time(self._backend.now() + seconds),
        )
        winner = self._records.create_or_read(pin)
        if winner.manifest != manifest:
            raise Refused(
                f"pin {name} of {self._backend.url} already pins manifest {winner.manifest.sha256}; "
                "choose another name, or remove that pin first"
            )
        return winner

    def remove(self, name: str) -> None:
        path = pin_path(name)
        stat = self._backend.stat(path)
        if stat is None:
            others = ", ".join(pin.name for pin in self.all()) or "none"
            raise NotFound(f"there is no pin {name} in {self._backend.url}; it has {others}")
        self._backend.remove(ListedObject(path, stat.size, stat.tag, stat.modified))

    def all(self) -> list[Pin]:
        """Every pin, whether or not it has expired."""
        paths = [path for path in self._backend.paths(PINS) if "/" not in path.removeprefix(PINS)]
        return [pin for path in paths if (pin := self._records.read(Pin, path))]

    @contextmanager
    def pinned(self, manifests: Sequence[Blob], *, actor: str, reason: str) -> Iterator[None]:
        """Pin manifests while the block runs; if the process is killed, the pins expire after an hour."""
        names = [f"held-{secrets.token_hex(12)}" for _ in manifests]
        try:
            for name, manifest in zip(names, manifests, strict=True):
                self.add(name, manifest, actor=actor, reason=reason, seconds=HOLD_SECONDS)
            yield
        finally:
            for name in names:
                if self._backend.stat(pin_path(name)) is not None:
                    self.remove(name)
