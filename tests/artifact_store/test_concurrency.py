"""Concurrent publishers: real processes, one folder, no locks."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, TypeAlias

from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.errors import Conflict
from tests.artifact_store.samples import Folder, folder, put, tree

WRITERS = 8
ROUNDS = 40

# fork: eight interpreters would take longer to start than the test takes to run.
FORK: Any = multiprocessing.get_context("fork")

Answer: TypeAlias = tuple[str, str]
Work: TypeAlias = Callable[[Folder, int, int], Answer]


def together(root: Path, work: Work) -> list[list[Answer]]:
    """Start each round in all writers at the same moment; the result of each writer, by round."""
    barrier, answers = FORK.Barrier(WRITERS), FORK.Queue()
    writers = [FORK.Process(target=_write, args=(root, work, number, barrier, answers)) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    by_writer = [answers.get(timeout=120) for _ in writers]
    for writer in writers:
        writer.join()
    return [[rounds[number] for rounds in by_writer] for number in range(ROUNDS)]


def _write(root: Path, work: Work, writer: int, barrier: Barrier, answers: Any) -> None:
    place, found = folder(root), []
    for number in range(ROUNDS):
        barrier.wait(timeout=60)
        try:
            found.append(work(place, number, writer))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    answers.put(found)


def publish_the_same(place: Folder, number: int, writer: int) -> Answer:
    published = place.store.publish(put(place.store, f"round {number}", request=number))
    return published.manifest_digest, published.published_at


def publish_another(place: Folder, number: int, writer: int) -> Answer:
    """Equal key, different bytes: a build that is not reproducible, on eight machines at once."""
    manifest = put(place.store, request=number, graph=f"0.{writer}")
    try:
        return "won", place.store.publish(manifest).manifest_digest
    except Conflict as conflict:
        return "lost to", conflict.stored


def test_writers_of_one_artifact_all_succeed_and_leave_one_record(tmp_path: Path) -> None:
    rounds = together(tmp_path, publish_the_same)
    records = {entry.request_key: entry for entry in folder(tmp_path).store.list()}
    assert len(records) == ROUNDS
    stored = {(record.manifest_digest, record.published_at) for record in records.values()}
    for answers in rounds:
        assert len(set(answers)) == 1
        assert answers[0] in stored
    for record in records.values():
        for blob in record.manifest.blobs():
            folder(tmp_path).store.read_blob(blob)
    assert not [path for path in tree(tmp_path) if path.startswith("tmp/")]


def test_of_writers_of_different_artifacts_one_wins_and_the_others_are_told(tmp_path: Path) -> None:
    rounds = together(tmp_path, publish_another)
    stored = {entry.manifest_digest for entry in folder(tmp_path).store.list()}
    assert len(stored) == ROUNDS
    for answers in rounds:
        (winner,) = {digest for _, digest in answers}
        assert winner in stored
        assert sorted(outcome for outcome, _ in answers) == ["lost to"] * (WRITERS - 1) + ["won"]


def test_removals_at_the_same_moment_do_not_disturb_each_other(tmp_path: Path) -> None:
    backend = folder(tmp_path).backend
    names = [f"pins/{number}" for number in range(400)]
    for name in names:
        backend.create(name, Payload.of(name.encode()))
    listed = list(backend.walk("pins/"))
    with ThreadPoolExecutor(16) as pool:
        gone = list(pool.map(backend.remove, [*listed, *listed]))
    assert gone.count(True) == len(names)
    assert tree(tmp_path) == set()
