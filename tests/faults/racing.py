"""Rounds of writers that start at the same moment, as processes or threads."""

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.errors import StoreUnavailable
from nxpipe.artifact_store.manifest import Manifest
from tests.artifact_store.samples import manifest

# fork: starting so many interpreters takes longer than the test.
FORK: Final[Any] = multiprocessing.get_context("fork")
PATIENCE: Final = 1800  # seconds

Turn: TypeAlias = Callable[[int, int], str]  # (round, writer) -> result of the writer


def smallest(store: Store, number: int, *, answer: str = "") -> Manifest:
    """An artifact of nothing but its question: the fewer requests before its record, the closer the race. Another
    answer to that is of another model."""
    response = store.put_blob(canonical_json({"request": number}))
    stand_in = store.put_blob(b"stand-in")
    whole = manifest([response, stand_in, stand_in], model=f"acme/{answer or 'tiny-bert'}")
    return whole.model_copy(update={"executables": (), "files": (), "weights": ()})


def in_processes(writers: int, rounds: int, turn: Turn) -> list[list[str]]:
    """The result of each writer, by round."""
    barrier, answers = FORK.Barrier(writers), FORK.Queue()

    def write(writer: int) -> None:
        answers.put(_turns(barrier, rounds, writer, turn))

    processes = [FORK.Process(target=write, args=(writer,)) for writer in range(writers)]
    for process in processes:
        process.start()
    result = [answers.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join()
    return [list(entry) for entry in zip(*result, strict=True)]


def in_threads(writers: int, rounds: int, turn: Turn) -> list[list[str]]:
    barrier, told = threading.Barrier(writers), list[list[str]]()
    threads = [
        threading.Thread(target=lambda writer=writer: told.append(_turns(barrier, rounds, writer, turn)))
        for writer in range(writers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [list(entry) for entry in zip(*told, strict=True)]


def _turns(barrier: Any, rounds: int, writer: int, turn: Turn) -> list[str]:
    result = []
    for number in range(rounds):
        barrier.wait(timeout=PATIENCE)
        result.append(_until_answered(turn, number, writer))
    return result


def _until_answered(turn: Turn, number: int, writer: int) -> str:
    """Repeat after an outage, as its message asks, until there is a result."""
    for _ in range(100):
        try:
            return turn(number, writer)
        except StoreUnavailable:
            continue
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "never answered"
