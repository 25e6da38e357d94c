"""Information in a store that saves a later build work: known failures and leases."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.builds import Leases
from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.hardware import instance
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.source import resolve
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.models.weights import RandomWeights
from nxpipe.pipeline.util.errors import BuildRefused, VerificationFailed
from tests.pipeline.walk import build

pytestmark = pytest.mark.sample(12)

ALLOWED = Thresholds(0.9, 0.1)
STRICT = Thresholds(0.9, 1e-9)


class Steps:
    """Records the steps of a build, and may fail at one of them."""

    def __init__(self, error: BaseException | None = None, at: str = "compile") -> None:
        self.taken: list[str] = []
        self._error = error
        self._at = at

    @contextmanager
    def __call__(self, title: str) -> Iterator[None]:
        self.taken.append(title)
        if self._error and title.startswith(self._at):
            raise self._error
        yield


def done(steps: Steps) -> list[str]:
    """The computed steps, in order."""
    return [title.partition(" ")[0] for title in steps.taken if title.startswith(("compile", "emit", "emulate"))]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def request_(bert: Path) -> BuildSpec:
    return BuildSpec(resolve(str(bert)), RandomWeights(0), (Shape("forward", 1, 8),), instance("inf2.xlarge"))


def key_of(request: BuildSpec, shape: Shape | None = None) -> str:
    """The cache key of the first step."""
    return request.program_key(shape or min(request.shapes))


def test_a_build_that_is_interrupted_between_two_programs_publishes_nothing_and_is_taken_up_where_it_was(
    request_: BuildSpec, store: Store
) -> None:
    two = replace(request_, shapes=(Shape("forward", 1, 8), Shape("forward", 1, 16)))
    with pytest.raises(KeyboardInterrupt):
        build(two, store, Steps(KeyboardInterrupt(), "emit forward-b1-s16"), nobody, thresholds=ALLOWED)
    assert not store.list()
    assert Leases(store.backend).current(key_of(two, two.shapes[1])) is None
    steps = Steps()
    assert not build(two, store, steps, nobody, thresholds=ALLOWED).cached
    assert [title for title in steps.taken if title.partition(" ")[0] in ("compile", "emit", "emulate")] == [
        f"{work} forward-b1-s16" for work in ("compile", "emit", "emulate")
    ]


def test_new_weights_and_equal_cores_write_no_program_again_and_force_takes_nothing_for_granted(
    request_: BuildSpec, store: Store
) -> None:
    def steps_of(request: BuildSpec, *, force: bool = False) -> list[str]:
        steps, heard = Steps(), list[str]()
        build(request, store, steps, heard.append, thresholds=ALLOWED, force=force)
        return done(steps)

    assert steps_of(request_) == ["compile", "emit", "emulate"]
    assert steps_of(replace(request_, weights=RandomWeights(1))) == ["compile", "emulate"]
    assert steps_of(replace(request_, target=instance("trn1.2xlarge"))) == ["compile", "emulate"]  # the same cores
    assert steps_of(request_, force=True) == ["compile", "emit", "emulate"]


def nobody(text: str) -> None:
    raise AssertionError(f"nobody else was at work, and it said: {text}")


def failing(request: BuildSpec, store: Store, error: BaseException) -> None:
    with pytest.raises(type(error)):
        build(request, store, Steps(error), nobody, thresholds=ALLOWED)


def test_a_failure_of_the_request_itself_is_answered_without_work_and_force_tries_again(
    request_: BuildSpec, store: Store
) -> None:
    failing(request_, store, CaptureError("the model decides by a value"))
    steps = Steps()
    with pytest.raises(BuildRefused, match=r"decides by a value \(known failure of .* UTC.*--force tries again\)"):
        build(request_, store, steps, nobody, thresholds=ALLOWED)
    assert not steps.taken
    assert not build(request_, store, steps, nobody, thresholds=ALLOWED, force=True).cached
    assert build(request_, store, Steps(), nobody, thresholds=ALLOWED).cached


def _out_of_memory_behind_it() -> CaptureError:
    error = CaptureError("the model could not be traced")
    error.__cause__ = MemoryError()
    return error


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(28, "No space left on device"),
        KeyboardInterrupt(),
        SystemExit(143),
        TimeoutError(),
        ZeroDivisionError(),
        _out_of_memory_behind_it(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_may_pass_is_tried_again(error: BaseException, request_: BuildSpec, store: Store) -> None:
    failing(request_, store, error)
    assert not build(request_, store, Steps(), nobody, thresholds=ALLOWED).cached


def test_an_answer_beyond_some_thresholds_is_remembered_for_those_alone(request_: BuildSpec, store: Store) -> None:
    with pytest.raises(VerificationFailed):
        build(request_, store, Steps(), nobody, thresholds=STRICT)
    steps = Steps()
    with pytest.raises(VerificationFailed, match="known failure"):
        build(request_, store, steps, nobody, thresholds=STRICT)
    assert not steps.taken
    assert not build(request_, store, Steps(), nobody, thresholds=ALLOWED).cached


def test_a_memory_that_rotted_spares_nobody_the_work(request_: BuildSpec, store: Store, tmp_path: Path) -> None:
    failing(request_, store, CaptureError("no"))
    path = tmp_path / "store" / "failures" / key_of(request_)
    path.chmod(0o600)
    path.write_bytes(b"rot")
    assert not build(request_, store, Steps(), nobody, thresholds=ALLOWED).cached


def test_whoever_comes_second_waits_says_for_whom_and_finds_what_the_first_published(
    request_: BuildSpec, store: Store
) -> None:
    leases, heard = Leases(store.backend), list[str]()
    first = leases.take(key_of(request_), "builder-7:4711 0123456789abcdef")
    assert first is not None

    def first_finishes(text: str) -> None:
        heard.append(text)
        build(request_, store, Steps(), nobody, thresholds=ALLOWED, force=True)
        leases.give_back(first)

    steps = Steps()
    assert build(request_, store, steps, first_finishes, thresholds=ALLOWED).cached
    assert not steps.taken
    assert len(heard) == 1
    assert "waiting for builder-7:4711, which has held the lease" in heard[0]
    assert "0123456789abcdef" not in heard[0]


def test_nobody_waits_for_a_builder_that_died(request_: BuildSpec, store: Store) -> None:
    heard = list[str]()
    assert Leases(store.backend, seconds=0.5).take(key_of(request_), "dead 1") is not None
    assert not build(request_, store, Steps(), heard.append, thresholds=ALLOWED).cached
    assert len(heard) <= 1


def test_a_builder_that_was_killed_on_this_machine_is_not_waited_for_at_all(request_: BuildSpec, store: Store) -> None:
    killed = subprocess.Popen([sys.executable, "-c", "pass"])
    killed.wait()
    assert Leases(store.backend).take(key_of(request_), f"{socket.gethostname()}:{killed.pid} 0123") is not None
    assert not build(request_, store, Steps(), nobody, thresholds=ALLOWED).cached


@pytest.mark.parametrize(
    "error", [None, CaptureError("no"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
def test_the_lease_is_given_back_however_the_work_ends(
    error: BaseException | None, request_: BuildSpec, store: Store
) -> None:
    if error is None:
        build(request_, store, Steps(), nobody, thresholds=ALLOWED)
    else:
        failing(request_, store, error)
    assert Leases(store.backend).current(key_of(request_)) is None
