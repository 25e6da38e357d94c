"""A whole file out of whatever is nearest: what an interrupted fetch left, this machine's tier, the store."""

import hashlib
from collections.abc import Sequence
from itertools import accumulate

from nxpipe.artifact_store.backends.files import copy_into
from nxpipe.artifact_store.backends.protocol import Backend, Sent
from nxpipe.artifact_store.blobs import Blobs
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.transfer.at_once import at_once
from nxpipe.artifact_store.transfer.partial import Partial
from nxpipe.artifact_store.transfer.ranges import Piece, fill, ranges_of
from nxpipe.artifact_store.transfer.source import Sources
from nxpipe.artifact_store.transfer.spans import chunks_between
from nxpipe.artifact_store.transfer.tier import Tier
from nxpipe.artifact_store.transfer.whole import Placed, Whole
from nxpipe.artifact_store.weights import read_weights


def stretches_of(whole: Whole) -> int:
    """How many parts of it come by themselves."""
    return sum(ranges_of(stored) for stored in whole.stored)


def assemble(whole: Whole, file: Partial, blobs: Blobs, sources: Sources, tier: Tier | None, sent: Sent) -> None:
    """Bring every object to its places, each proved right; then the head, with which the file is finished."""
    firsts = accumulate(map(ranges_of, whole.stored), initial=0)
    pieces = {
        stored: Piece(stored, placed[0].at, first)
        for (stored, placed), first in zip(whole.stored.items(), firsts, strict=False)
    }

    def place(stored: Blob) -> None:
        placed = whole.stored[stored]
        if placed[0].tensor.pack is not None:
            _unpack(blobs, placed, file)
            sent(stored.size)
            return
        piece = pieces[stored]
        if _came_before(file, piece) or (tier and _is_near(file, piece, tier)):
            sent(stored.size)
        else:
            sources.first(f"blob {stored.sha256}", lambda place: _filled(file, piece, place, sent))
        _repeat(file, piece, placed[1:])

    at_once(place, [(stored, stored) for stored in whole.stored])
    file.write(whole.head, 0)
    file.finish()


def _filled(file: Partial, piece: Piece, place: Backend, sent: Sent) -> bool:
    fill(file, piece, place, sent)
    return True


def _unpack(blobs: Blobs, placed: Sequence[Placed], file: Partial) -> None:
    tensors = [each.tensor for each in placed]
    for (_, data), each in zip(read_weights(blobs, tensors), placed, strict=True):
        file.write(data, each.at)


def _came_before(file: Partial, piece: Piece) -> bool:
    """Of a blob in several ranges those that are missing come, and all of it is hashed then."""
    if piece.ranges > 1 or not file.has(piece.first):
        return False
    hasher = hashlib.sha256()
    file.feed(hasher, piece.at, piece.at + piece.blob.size)
    return hasher.hexdigest() == piece.blob.sha256


def _is_near(file: Partial, piece: Piece, tier: Tier) -> bool:
    opened = tier.open(piece.blob)
    if opened:
        with opened:
            copy_into(file.descriptor, opened, piece.at)
    elif not tier.held.copy(piece.blob, lambda data, at: file.write(data, piece.at + at)):
        return False
    for number in range(piece.ranges):
        start, stop = piece.span(number)
        file.complete(piece.first + number, stop - start)
    return True


def _repeat(file: Partial, piece: Piece, others: Sequence[Placed]) -> None:
    """Equal tensors are one object, and lie in the file several times."""
    for other in others:
        at = other.at
        for chunk in chunks_between(file.descriptor, piece.at, piece.at + piece.blob.size):
            file.write(chunk, at)
            at += len(chunk)
