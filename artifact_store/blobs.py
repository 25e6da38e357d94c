"""Blobs of one backend: written once, verified by digest on every read."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.backends.files import new_file, os_errors, scratch, write_at
from nxpipe.artifact_store.backends.protocol import Backend, Payload, Sent, Stat, ignore_progress, serialized
from nxpipe.artifact_store.canonical import sha256_of_chunks
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument, NotFound
from nxpipe.artifact_store.layout import blob_path


def checked(chunks: Iterable[bytes], blob: Blob, where: str, remedy: str) -> Iterator[bytes]:
    """Yield the chunks of a blob. A wrong digest or size raises Corrupt at the end, an excess of bytes at once."""
    hasher = hashlib.sha256()
    size = 0
    for chunk in chunks:
        hasher.update(chunk)
        size += len(chunk)
        if size > blob.size:
            raise Corrupt(where, f"it has more than its {blob.size} bytes", remedy)
        yield chunk
    if size < blob.size:
        raise Corrupt(where, f"it has {size} of its {blob.size} bytes", remedy)
    if hasher.hexdigest() != blob.sha256:
        raise Corrupt(where, f"its {size} bytes have the SHA-256 {hasher.hexdigest()}", remedy)


def read_at_most(limit: int, chunks: Iterable[bytes]) -> bytes:
    """The bytes of a document; more than `limit` bytes raise InvalidDocument, and are never all in memory."""
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise InvalidDocument(f"it has more than the allowed {limit} bytes")
        parts.append(chunk)
    return b"".join(parts)


GRACE: Final = 24 * 3600.0  # seconds; younger objects are not collected
PUBLISH_AGAIN: Final = "publish the artifact again to repair it"


class Blobs:
    """Blobs of one backend. Every call may be repeated, and any number of processes may call at once."""

    def __init__(self, backend: Backend, grace: float = GRACE) -> None:
        self._backend = backend
        self._grace = grace
        self._last_was_stored = False

    def put(self, data: bytes | memoryview, sent: Sent = ignore_progress) -> Blob:
        """Store bytes. Nothing is written if the store holds them intact."""
        return self.keep(self._backend.hashed(data), sent)

    def put_all(self, datas: Sequence[bytes | memoryview], sent: Sent = ignore_progress) -> Iterable[Blob]:
        """Store several byte strings, concurrently where that is faster; the blobs are in the order of the input."""
        report = serialized(sent)
        return self._backend.each(lambda data: self.put(data, report), datas)

    def put_file(self, path: Path, sent: Sent = ignore_progress) -> Blob:
        """Store the bytes of a file, which need not fit in memory; the file stays."""
        with os_errors(f"read {path}"):
            payload = self._backend.hashed(path)
        return self.keep(payload, sent)

    def put_stream(self, chunks: Iterable[bytes], sent: Sent = ignore_progress) -> Blob:
        """Store bytes that need not fit in memory."""
        with scratch(self._backend.scratch_folder) as file:
            for chunk in chunks:
                file.write(chunk)
            return self.keep(file.finish(), sent)

    def keep(self, payload: Payload, sent: Sent = ignore_progress) -> Blob:
        """Store a payload. A large payload is looked up first; a small one only if the store held the previous one."""
        blob = Blob(sha256=payload.sha256, size=payload.size)
        path = blob_path(blob)
        looks_up = self._last_was_stored or payload.size >= self._backend.lookup_threshold
        if looks_up and self.is_kept(blob):
            self._last_was_stored = True
            sent(blob.size)
            return blob
        created = self._backend.create(path, payload, sent=sent)
        self._last_was_stored = not created
        # The existing object may be damaged; only a replacement repairs it.
        if not created and not self.is_kept(blob):
            self._backend.replace(path, payload, sent=sent)
        return blob

    def read(self, blob: Blob) -> bytes:
        """The bytes, verified."""
        return b"".join(self.chunks(blob))

    def chunks(self, blob: Blob, sent: Sent = ignore_progress) -> Iterator[bytes]:
        """The bytes in chunks; they are verified only after the last chunk."""
        path = blob_path(blob)
        chunks = self._backend.read(path)
        if chunks is None:
            raise NotFound(f"{self._backend.url} holds no blob {blob.sha256} of {blob.size} bytes; {PUBLISH_AGAIN}")
        return checked(_with_progress(chunks, sent), blob, f"{self._backend.url}/{path}", PUBLISH_AGAIN)

    def copy_to(self, blob: Blob, path: Path, sent: Sent = ignore_progress) -> None:
        """Write the bytes to a file, which appears once they are verified; create its folder if necessary."""
        with new_file(path.parent) as file, os_errors(f"write {path}"):
            self.copy_into(blob, file.descriptor, (0,), sent)
            os.fsync(file.descriptor)
            file.close()
            file.path.replace(path)

    def copy_into(self, blob: Blob, descriptor: int, offsets: Sequence[int], sent: Sent = ignore_progress) -> None:
        """Write the bytes at each offset of an open file; they are verified only when this returns.

        An OSError comes from the file; the caller adds its name.
        """
        position = 0
        for chunk in self.chunks(blob, sent):
            for offset in offsets:
                write_at(descriptor, chunk, offset + position)
            position += len(chunk)

    def settle(self, blobs: Sequence[Blob], *, sent_by_us: bool = False) -> Iterator[tuple[Blob, str]]:
        """Refresh blobs before a document names them; yield each missing or wrong blob with its fault.

        With `sent_by_us`, a blob that the backend has just confirmed in response to our write is not checked again.
        """
        unproved = [blob for blob in blobs if not (sent_by_us and self._has_just_proved(blob))]
        for blob, fault in zip(unproved, self._backend.each(self._fault, unproved), strict=True):
            if fault:
                yield blob, fault

    def is_intact(self, blob: Blob) -> bool:
        """True if the blob is stored and its content is verified: after a power loss the name proves nothing."""
        return self._intact(blob) is not None

    def is_kept(self, blob: Blob) -> bool:
        """True if the blob is intact; it is refreshed, so that a document may name it."""
        stat = self._intact(blob)
        return stat is not None and self._keep_young(blob_path(blob), stat)

    def keep_young(self, path: str) -> bool:
        """Refresh an object whose content the caller has verified. False: it is gone."""
        stat = self._backend.stat(path)
        return stat is not None and self._keep_young(path, stat)

    def _has_just_proved(self, blob: Blob) -> bool:
        return self._backend.has_just_proved(blob_path(blob), blob.sha256, blob.size)

    def _fault(self, blob: Blob) -> str | None:
        """The fault by size and digest, without reading; a backend without digests compared the content on writing."""
        stat = self._backend.stat(blob_path(blob))
        if stat is not None and not _may_be(blob, stat):
            return f"has {stat.size} bytes, SHA-256 {stat.sha256 or 'not kept'}"
        return None if stat is not None and self._keep_young(blob_path(blob), stat) else "is missing"

    def _keep_young(self, path: str, stat: Stat) -> bool:
        """Refresh an old object, so that it is not collected before a document names it. False: it is gone."""
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


def _with_progress(chunks: Iterator[bytes], sent: Sent) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        sent(len(chunk))
