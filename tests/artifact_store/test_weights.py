"""Tensors in packs and in blobs of their own: equal ones are shared, damaged ones refused."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store import Store, weights
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt, InvalidDocument
from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.manifest import Tensor
from nxpipe.artifact_store.weights import (
    MAX_PACK_BYTES,
    PACKED_BELOW,
    Elements,
    packed,
    put_weights,
    read_weights,
    unpacked,
)
from tests.artifact_store.samples import Place


def pack_of(*parts: bytes) -> bytes:
    return packed({Blob.of(part): part for part in parts})


def elements(*sizes: int, seed: int = 0) -> list[Elements]:
    chance = random.Random(seed)
    return [
        Elements(f"layer.{number}", "uint8", (size,), memoryview(chance.randbytes(size)))
        for number, size in enumerate(sizes)
    ]


def read(store: Store, tensors: tuple[Tensor, ...]) -> list[bytes]:
    return [bytes(data) for _, data in read_weights(store.blobs, tensors)]


@given(st.sets(st.binary(max_size=300), min_size=1, max_size=20))
def test_a_pack_gives_back_every_tensor_by_its_digest(parts: set[bytes]) -> None:
    found = unpacked(pack_of(*parts))
    assert {digest: bytes(piece) for digest, piece in found.items()} == {Blob.of(part).sha256: part for part in parts}


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=8, unique=True), st.randoms())
def test_equal_sets_of_tensors_are_one_pack_in_whatever_order_they_came(
    parts: list[bytes], chance: random.Random
) -> None:
    shuffled = chance.sample(parts, len(parts))
    assert pack_of(*parts) == pack_of(*shuffled)


PACK = pack_of(b"alpha", b"beta" * 40, b"")


@given(st.integers(0, len(PACK) * 8 - 1))
def test_no_bit_of_a_pack_can_change_unnoticed(bit: int) -> None:
    damaged = bytearray(PACK)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(InvalidDocument):
        unpacked(bytes(damaged))


@given(st.integers(0, len(PACK) - 1), st.binary(min_size=1, max_size=70))
def test_a_pack_that_is_cut_or_continued_is_refused(length: int, more: bytes) -> None:
    for wrong in (PACK[:length], PACK + more):
        with pytest.raises(InvalidDocument):
            unpacked(wrong)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_a_pack_only_if_packing_what_they_hold_gives_them_back(data: bytes) -> None:
    for candidate in (data, b"NXPACK1\n" + data):
        try:
            found = unpacked(candidate)
        except InvalidDocument:
            continue
        assert pack_of(*map(bytes, found.values())) == candidate


def test_weights_come_back_in_their_order_whatever_their_size(place: Place) -> None:
    sent = elements(10, PACKED_BELOW, PACKED_BELOW - 1, 0, 3 * PACKED_BELOW, 10)
    tensors = put_weights(place.store.blobs, sent)
    assert [tensor.name for tensor in tensors] == [entry.name for entry in sent]
    assert [tensor.pack is None for tensor in tensors] == [False, True, False, False, True, False]
    assert read(place.store, tensors) == [bytes(entry.data) for entry in sent]
    assert read(place.store, tensors[::-1]) == [bytes(entry.data) for entry in sent[::-1]]


def test_many_small_tensors_are_few_objects_and_no_pack_is_too_large(place: Place) -> None:
    tensors = put_weights(place.store.blobs, elements(*[PACKED_BELOW - 1] * 100, *[100] * 500))
    packs = {tensor.pack for tensor in tensors if tensor.pack}
    assert len(packs) == 2
    assert all(pack.size <= MAX_PACK_BYTES for pack in packs)
    assert len(place.objects()) == 2


def test_a_change_of_one_small_tensor_leaves_the_other_packs_as_they_are(place: Place) -> None:
    before = elements(*[PACKED_BELOW - 1] * 200)
    after = [*before]
    after[0] = Elements(before[0].name, "uint8", before[0].shape, memoryview(bytes(PACKED_BELOW - 1)))
    first = {tensor.pack for tensor in put_weights(place.store.blobs, before)}
    second = {tensor.pack for tensor in put_weights(place.store.blobs, after)}
    assert len(first) == len(second) == 4
    assert len(first & second) == 3


def test_equal_tensors_are_stored_once(place: Place) -> None:
    same = memoryview(bytes(100))
    tensors = put_weights(place.store.blobs, [Elements(name, "uint8", (100,), same) for name in "abc"])
    assert len({(tensor.blob, tensor.pack) for tensor in tensors}) == 1
    assert len(place.objects()) == 1


def test_tensors_that_are_stored_in_several_batches_keep_their_order(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_IN_MEMORY", 3 * PACKED_BELOW)
    given = elements(10, PACKED_BELOW, 20, *[PACKED_BELOW + size for size in range(8)], 4 * PACKED_BELOW, 30)
    result: list[int] = []
    stored = put_weights(place.store.blobs, given, result.append)
    assert [tensor.name for tensor in stored] == [entry.name for entry in given]
    assert read(place.store, stored) == [bytes(entry.data) for entry in given]
    assert sum(result) == sum(blob.size for blob in {tensor.stored for tensor in stored})


def test_a_pack_without_the_tensor_that_a_manifest_says_is_in_it_is_corrupt(place: Place) -> None:
    (tensor,) = put_weights(place.store.blobs, elements(10))
    wrong = tensor.model_copy(update={"blob": Blob.of(b"another")})
    with pytest.raises(Corrupt, match=r"does not hold layer\.0"):
        read(place.store, (wrong,))


def test_a_damaged_pack_is_corrupt(place: Place) -> None:
    (tensor,) = put_weights(place.store.blobs, elements(10))
    assert tensor.pack is not None
    path = blob_path(tensor.pack)
    place.write(path, place.objects()[path][:-1] + b"?")
    with pytest.raises(Corrupt):
        read(place.store, (tensor,))


def test_a_blob_that_is_no_pack_is_corrupt(store: Store) -> None:
    blob = store.put_blob(b"not a pack")
    tensor = Tensor(name="a", dtype="uint8", shape=(1,), blob=Blob.of(b"x"), pack=blob)
    with pytest.raises(Corrupt, match="pack"):
        read(store, (tensor,))
