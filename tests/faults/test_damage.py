"""Flipped bits, truncated and exchanged files: no reader ever uses bytes that were not written.

Each object is read by its users. The result must be the one from before the damage, or a refusal.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Final

import pytest

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.builds import Leases, failure_of, keep_step_result, new_holder, record_failure, step_result
from nxpipe.artifact_store.channel.change import Requirements, promote
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Corrupt
from nxpipe.artifact_store.fetch.cached_store import MirroredBlobs
from nxpipe.artifact_store.fetch.mirrors import Sources
from nxpipe.artifact_store.fetch.read_cache import ReadCache
from nxpipe.artifact_store.index import segments
from nxpipe.artifact_store.layout import BLOBS, LISTINGS
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.pins import Pins
from nxpipe.artifact_store.trust.keys import KeyFile, PublicKey, make_key_file
from nxpipe.artifact_store.trust.signatures import Signatures
from nxpipe.artifact_store.weights import Elements, put_weights, read_weights
from tests.artifact_store.samples import Folder, folder, publish_verified
from tests.faults.damage import DAMAGES
from tests.faults.operations import AUTHOR, artifact

LARGE: Final = 70_000  # bytes of a tensor: a blob of its own
LOG: Final = b"compiler said no"
NEVER_READ_PAST: Final = (BLOBS, "ac/", "channels/prod/log/", "pins/", "parts/", "failures/", "sig/", "evidence/")
A_DAY: Final = 86_400.0  # seconds: longer than any sweep


class Hopeless(Exception):
    deterministic = True


@dataclass(frozen=True)
class Place:
    """A store with one object of each kind, and the uses of each kind."""

    folder: Folder
    published: tuple[Published, Published]
    signer: PublicKey

    @property
    def store(self) -> Store:
        return self.folder.store

    def uses(self) -> Mapping[str, Callable[[], object]]:
        """The uses by the start of a path; the first match applies."""
        digest = self.published[0].manifest_digest
        log = ChannelLog(self.store.backend, "prod")
        return {
            BLOBS: self._artifacts,
            "ac/": self._artifacts,
            "index/": lambda: [entry.record for entry in self.store.list()],
            "channels/prod/log/": lambda: list(log.back_from(log.tip())),
            "channels/prod/head": log.tip,
            "pins/": Pins(self.store.backend).all,
            "parts/": lambda: step_result(self.store, "0" * 64),
            "failures/": lambda: failure_of(self.store, "1" * 64),
            "leases/": lambda: Leases(self.store.backend).current("2" * 64),
            "evidence/": lambda: [self.store.evidence(entry.manifest_digest) for entry in self.published],
            "sig/": lambda: Signatures(self.store).by(self.signer, digest),
        }

    def use(self, path: str) -> object:
        return next(use for start, use in self.uses().items() if path.startswith(start))()

    def _artifacts(self) -> object:
        """Fetch as a fleet does."""
        found = [self.store.find(entry.request_key) for entry in self.published]
        log = failure_of(self.store, "1" * 64)
        assert log is not None
        assert log.log is not None
        return [self.store.read_blob(log.log), *(self._whole(entry.manifest) for entry in found if entry)]

    def _whole(self, manifest: Manifest) -> object:
        evidence = self.store.evidence(manifest.digest)
        named = [*manifest.blobs(), *(blob for entry in evidence for blob in entry.blobs())]
        blobs = [self.store.read_blob(blob) for blob in named]
        weights = [bytes(data) for _, data in read_weights(self.store.blobs, manifest.weights)]
        return blobs, weights, self.store.key_inputs(manifest)


def filled(root: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = folder(root / "store")
    store = place.store
    both = tuple(_published(store, request) for request in ("one", "two"))
    for entry in both:
        promote(store, "prod", [entry], AUTHOR, Requirements())
    keep_step_result(store, "0" * 64, {"program": both[0].manifest.executables[0].blob}, {"instructions": 12})
    record_failure(store, "1" * 64, Hopeless("no"), log=LOG)
    assert Leases(store.backend, A_DAY).take("2" * 64, new_holder("ann"))
    Pins(store.backend).add("keep", both[0].record.manifest, actor="ann", reason="because")
    make_key_file(root / "key")
    signer = KeyFile.open(root / "key")
    Signatures(store).add(both[0], signer, "https://example.com/builder")
    with monkeypatch.context() as patched:
        patched.setattr(segments, "MANY_READ", 0)
        store.list()
    return Place(place, (both[0], both[1]), signer.public)


def _published(store: Store, request: str) -> Published:
    large = memoryview(request.encode() * LARGE)[:LARGE]
    weights = put_weights(store.blobs, [Elements("large", "uint8", (LARGE,), large)])
    made = artifact(store, request, request, tensors=3)
    return publish_verified(store, made.model_copy(update={"weights": (*made.weights, *weights)}))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return filled(tmp_path, monkeypatch)


def damaged_objects(place: Place) -> list[str]:
    """Every object that is ever read, without the listing for people."""
    return sorted(path for path in place.folder.objects() if not path.startswith(LISTINGS))


def harmless(path: str) -> tuple[object, ...]:
    """A damaged lease counts as absent: that costs a second build and is otherwise harmless."""
    return (None,) if path.startswith("leases/") else ()


def assert_damage_is_caught(place: Place, damages: int, seed: int) -> Counter[str]:
    """The number of damaged objects of each kind."""
    chance, counted = Random(seed), Counter[str]()
    paths = damaged_objects(place)
    intact = place.folder.objects()
    answers = {path: place.use(path) for path in paths}
    for number in range(damages):
        path = paths[number % len(paths)]
        place.folder.write(path, chance.choice(DAMAGES)(intact[path], chance))
        try:
            answer = place.use(path)
        except Corrupt:
            pass
        else:
            assert answer == answers[path] or answer in harmless(path), path
            assert not path.startswith(NEVER_READ_PAST), path
        place.folder.write(path, intact[path])
        counted[path.partition("/")[0]] += 1
    assert answers == {path: place.use(path) for path in paths}
    return counted


def assert_swaps_are_caught(place: Place, most: int, seed: int) -> int:
    """Swap each pair of objects: every use of either is refused, or correct."""
    intact = place.folder.objects()
    pairs = list(combinations(damaged_objects(place), 2))
    chosen = Random(seed).sample(pairs, min(most, len(pairs)))
    answers = {path: place.use(path) for path in damaged_objects(place)}
    for value, other in chosen:
        place.folder.write(value, intact[other])
        place.folder.write(other, intact[value])
        for path in (value, other):
            try:
                assert place.use(path) == answers[path] or place.use(path) in harmless(path), (value, other)
            except Corrupt:
                continue
        place.folder.write(value, intact[value])
        place.folder.write(other, intact[other])
    return len(chosen)


def test_every_kind_of_object_has_a_use(place: Place) -> None:
    folders = {path.partition("/")[0] for path in damaged_objects(place)}
    assert folders == {start.partition("/")[0] for start in place.uses()}


def test_damage_is_caught_before_use(place: Place) -> None:
    counted = assert_damage_is_caught(place, 600, seed=1)
    assert min(counted.values()) >= 20


def test_objects_that_changed_places_are_caught_before_use(place: Place) -> None:
    assert_swaps_are_caught(place, 100, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_damages_are_caught_before_use(place: Place) -> None:
    damages = assert_damage_is_caught(place, 10_000, seed=3)
    swaps = assert_swaps_are_caught(place, 1_000, seed=4)
    print(f"{sum(damages.values())} damages {dict(damages)}, {swaps} swaps")  # noqa: T201


@pytest.fixture
def afar(place: Place, tmp_path: Path) -> MirroredBlobs:
    """Reads through a read-through cache from the store, and from a mirror when the store fails."""
    mirror = folder(tmp_path / "mirror")
    for path, data in place.folder.objects().items():
        if path.startswith(BLOBS):
            assert mirror.store.put_blob(data) == Blob.of(data)
    sources = Sources([place.store.backend, LocalFolder(tmp_path / "mirror")])
    return MirroredBlobs(place.store.backend, sources, ReadCache(tmp_path / "tier"))


def assert_good_copies_are_used(place: Place, afar: MirroredBlobs, root: Path, damages: int, seed: int) -> None:
    """Damage the cache, the store behind it, or both: the result is always correct."""
    chance = Random(seed)
    blobs = {blob: place.store.read_blob(blob) for entry in place.published for blob in entry.manifest.blobs()}
    paths = {blob: f"{BLOBS}{blob.sha256[:2]}/{blob.sha256}" for blob in blobs}
    for blob in blobs:
        afar.read(blob)
    for _ in range(damages):
        blob = chance.choice(list(blobs))
        for place_of_copy in chance.choice([["tier"], ["store"], ["tier", "store"]]):
            (root / place_of_copy / paths[blob]).write_bytes(chance.choice(DAMAGES)(blobs[blob], chance))
        assert afar.read(blob) == blobs[blob]
        assert (root / "tier" / paths[blob]).read_bytes() == blobs[blob]
        place.folder.write(paths[blob], blobs[blob])


def test_a_damaged_copy_is_fetched_again_from_a_good_one(place: Place, afar: MirroredBlobs, tmp_path: Path) -> None:
    assert_good_copies_are_used(place, afar, tmp_path, 200, seed=5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_thousands_of_damaged_copies_each_is_fetched_again(
    place: Place, afar: MirroredBlobs, tmp_path: Path
) -> None:
    assert_good_copies_are_used(place, afar, tmp_path, 4_000, seed=6)
