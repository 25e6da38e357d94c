"""Blobs of one backend: written once, verified by digest on every read."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.backends.files import new_file, os_errors, scratch, write_at
from nxpipe.artifact_store.backends.protocol import Backend, Payload, Sent, Stat, ignore_progress, in_turn
from nxpipe.artifact_store.canonical import sha256_of_chunks
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument, NotFound
from nxpipe.artifact_store.layout import blob_path


def checked(chunks: Iterable[bytes], blob: Blob, where: str, way_out: str) -> Iterator[bytes]:
    """The same chunks; raises at the end, or as soon as there are too many, if they are not this blob."""
    hasher = hashlib.sha256()
    size = 0
    for chunk in chunks:
        hasher.update(chunk)
        size += len(chunk)
        if size > blob.size:
            raise Corrupt(where, f"it has more than its {blob.size} bytes", way_out)
        yield chunk
    if size < blob.size:
        raise Corrupt(where, f"it has {size} of its {blob.size} bytes", way_out)
    if hasher.hexdigest() != blob.sha256:
        raise Corrupt(where, f"its {size} bytes have the SHA-256 {hasher.hexdigest()}", way_out)


def read_at_most(limit: int, chunks: Iterable[bytes]) -> bytes:
    """All of a document, without taking a huge stranger into memory."""
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise InvalidDocument(f"it has more than the allowed {limit} bytes")
        parts.append(chunk)
    return b"".join(parts)


GRACE: Final = 24 * 3600.0  # seconds in which nothing is collected
PUBLISH_AGAIN: Final = "publish the artifact again to repair it"


class Blobs:
    """Every call may be repeated, and any number of processes may call at once."""

    def __init__(self, backend: Backend, grace: float = GRACE) -> None:
        self._backend = backend
        self._grace = grace
        self._had_the_last = False

    def put(self, data: bytes | memoryview, sent: Sent = ignore_progress) -> Blob:
        """Keep these bytes. Nothing is written when the store holds them intact."""
        return self.keep(self._backend.hashed(data), sent)

    def put_all(self, datas: Sequence[bytes | memoryview], sent: Sent = ignore_progress) -> Iterable[Blob]:
        """The same of several, at once where that is faster; in order."""
        tell = in_turn(sent)
        return self._backend.each(lambda data: self.put(data, tell), datas)

    def put_file(self, path: Path, sent: Sent = ignore_progress) -> Blob:
        """Keep a file's bytes, which need not fit in memory; it is left where it is."""
        with os_errors(f"read {path}"):
            payload = self._backend.hashed(path)
        return self.keep(payload, sent)

    def put_stream(self, chunks: Iterable[bytes], sent: Sent = ignore_progress) -> Blob:
        """Keep bytes that need not fit in memory."""
        with scratch(self._backend.scratch_folder) as file:
            for chunk in chunks:
                file.write(chunk)
            return self.keep(file.finish(), sent)

    def keep(self, payload: Payload, sent: Sent = ignore_progress) -> Blob:
        """A large one is asked for before it is sent; a small one just sent, unless the store had the last one."""
        blob = Blob(sha256=payload.sha256, size=payload.size)
        path = blob_path(blob)
        asks = self._had_the_last or payload.size >= self._backend.sent_unasked_below
        if asks and self.is_kept(blob):
            self._had_the_last = True
            sent(blob.size)
            return blob
        created = self._backend.create(path, payload, sent=sent)
        self._had_the_last = not created
        # What was there first may be a damaged file, of which only a repair gets rid.
        if not created and not self.is_kept(blob):
            self._backend.replace(path, payload, sent=sent)
        return blob

    def read(self, blob: Blob) -> bytes:
        """The bytes, verified."""
        return b"".join(self.chunks(blob))

    def chunks(self, blob: Blob, sent: Sent = ignore_progress) -> Iterator[bytes]:
        """The bytes in chunks; only when the last one has come are they verified."""
        path = blob_path(blob)
        chunks = self._backend.read(path)
        if chunks is None:
            raise NotFound(f"{self._backend.url} holds no blob {blob.sha256} of {blob.size} bytes; {PUBLISH_AGAIN}")
        return checked(_told(chunks, sent), blob, f"{self._backend.url}/{path}", PUBLISH_AGAIN)

    def copy_to(self, blob: Blob, path: Path, sent: Sent = ignore_progress) -> None:
        """Write the bytes to a file, which appears when they have proved right; its folder is made if need be."""
        with new_file(path.parent) as file, os_errors(f"write {path}"):
            self.copy_into(blob, file.descriptor, (0,), sent)
            os.fsync(file.descriptor)
            file.close()
            file.path.replace(path)

    def copy_into(self, blob: Blob, descriptor: int, offsets: Sequence[int], sent: Sent = ignore_progress) -> None:
        """Write the bytes to these places of an open file; what is there is only known to be right at the end.

        An OSError is the file's, whose name the caller knows.
        """
        at = 0
        for chunk in self.chunks(blob, sent):
            for offset in offsets:
                write_at(descriptor, chunk, offset + at)
            at += len(chunk)

    def settle(self, blobs: Sequence[Blob], *, sent_by_us: bool = False) -> Iterator[tuple[Blob, str]]:
        """Look at blobs that are about to be named: keeps them young, and gives those that are missing or wrong.

        With `sent_by_us`, an answer by which the backend has just proved what we sent counts as that look.
        """
        asked = [blob for blob in blobs if not (sent_by_us and self._has_just_proved(blob))]
        for blob, fault in zip(asked, self._backend.each(self._fault, asked), strict=True):
            if fault:
                yield blob, fault

    def is_intact(self, blob: Blob) -> bool:
        """Present, and by its content: a name alone proves nothing after a power loss."""
        return self._intact(blob) is not None

    def is_kept(self, blob: Blob) -> bool:
        """Intact, and young from now on, for whoever is about to name it."""
        stat = self._intact(blob)
        return stat is not None and self._keep_young(blob_path(blob), stat)

    def keep_young(self, path: str) -> bool:
        """The same of another object that is about to be relied on, whose content the caller has read."""
        stat = self._backend.stat(path)
        return stat is not None and self._keep_young(path, stat)

    def _has_just_proved(self, blob: Blob) -> bool:
        return self._backend.has_just_proved(blob_path(blob), blob.sha256, blob.size)

    def _fault(self, blob: Blob) -> str | None:
        """By what the backend knows without reading; where it knows no digest, the writer has compared the content."""
        stat = self._backend.stat(blob_path(blob))
        if stat is not None and not _may_be(blob, stat):
            return f"has {stat.size} bytes, SHA-256 {stat.sha256 or 'not kept'}"
        return None if stat is not None and self._keep_young(blob_path(blob), stat) else "is missing"

    def _keep_young(self, path: str, stat: Stat) -> bool:
        """Whoever names a blob again keeps it from being collected before the name stands. False: it is gone."""
        old = self._backend.now() - stat.modified > self._grace / 2
        return not old or self._backend.touch(path)

    def _intact(self, blob: Blob) -> Stat | None:
        path = blob_path(blob)
        stat = self._backend.stat(path)
        if stat is None or not _may_be(blob, stat):
            return None
        if stat.sha256 is None and sha256_of_chunks(self._backend.read(path) or ()) != blob.sha256:
            return None
        return stat


def _may_be(blob: Blob, stat: Stat) -> bool:
    return stat.size == blob.size and stat.sha256 in (None, blob.sha256)


def _told(chunks: Iterator[bytes], sent: Sent) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        sent(len(chunk))
