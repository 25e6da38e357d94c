"""Thousands of hostile configurations: each ends in a graph or a sentence, and in nothing else."""

import contextlib
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from nxpipe import emulator
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.emulator.capture import CaptureRequest, capture
from nxpipe.emulator.errors import CompileError
from nxpipe.pipeline.check.model_files import review_config
from nxpipe.pipeline.compile.findings import Severity
from nxpipe.pipeline.models.configuration import Shape, all_phases
from nxpipe.pipeline.models.source import resolve
from nxpipe.pipeline.models.versions import digest_of
from nxpipe.pipeline.util.errors import ModelSourceError
from tests.security.audit import Seen, watched
from tests.security.hostile_config import MODELS, Variant, variants

_SEED = 17
_LONGEST = 300  # seconds, only to end what hangs
_MOST_MEMORY = 6 << 30
_CAPTURED = 20  # of so many models one is traced, the others are built
# Nothing of these is imported because a configuration says so: transformers' own modules by its closed table, and
# what these import themselves.
_ALLOWED = ("transformers", "torch", "torchgen", "numpy", "scipy", "sympy", "mpmath", "encodings", "PIL", "torchvision")
_HARMLESS = ("ctypes.dlopen", "ctypes.dlsym")  # of a library's own modules, when they are imported


class _Hangs(BaseException):
    pass


@contextlib.contextmanager
def _ended_at_last() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise _Hangs

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(_LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tried(variant: Variant, folder: Path) -> tuple[str, Seen]:
    """The result, as `check` computes it; other errors than a typed refusal are raised."""
    with watched() as seen, _ended_at_last():
        return _ending(variant, folder), seen


def _ending(variant: Variant, folder: Path) -> str:
    try:
        source = resolve(str(variant.write(folder)))
        if any(finding.severity is Severity.ERROR for finding in review_config(source)):
            return "refused at sight"
        shape = Shape(all_phases(source.task)[0], 1, 16)
        digest_of(source.key_inputs((shape,)))
        wanted = source.capture_request(shape)
        if variant.number % _CAPTURED:
            return _built(wanted)
        capture(wanted)
    except (ModelSourceError, InvalidDocument, CompileError) as refused:
        return type(refused).__name__ if str(refused) else "without a word"
    return "captured"


def _built(wanted: CaptureRequest) -> str:
    from nxpipe.emulator.capture.model import build_model

    build_model(wanted)
    return "built"


def _hold(numbers: range, folder: Path) -> Counter[str]:
    for name, config in MODELS.items():  # what it imports and opens the first time is its own
        number = 0 if name in ("bert", "llama") else 1
        plain = Variant(number, {"model_type": name, **config})
        assert tried(plain, folder / "plain" / name)[0] == ("built" if number else "captured"), name
    endings: Counter[str] = Counter()
    for variant in variants(numbers, _SEED):
        ending, seen = tried(variant, folder / "m")
        endings[ending] += 1
        assert not seen.imports_beyond(*_ALLOWED), variant
        assert not seen.files_outside(folder, Path(emulator.__file__).parent), variant  # its lines, for the refusal
        assert [event for event in seen.forbidden if event[0] not in _HARMLESS] == [], variant
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < _MOST_MEMORY
    assert not endings["without a word"]
    return endings


@pytest.mark.sample(4)
def test_a_hostile_configuration_ends_in_a_graph_or_a_sentence(tmp_path: Path) -> None:
    endings = _hold(range(90), tmp_path)
    assert endings["refused at sight"] > 9
    assert endings["CaptureError"] > 9
    assert endings["built"] > 9


def test_no_token_of_the_hub_is_looked_up_for_a_part_that_is_named(tmp_path: Path) -> None:
    """A backbone by name: the hub is offline, and the user's token would be read before that is found."""
    assert sum(_hold(range(10872, 10873), tmp_path).values()) == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("thousand", range(33))
def test_so_do_33_000_of_them(thousand: int, tmp_path: Path) -> None:
    assert sum(_hold(range(1000 * thousand, 1000 * (thousand + 1)), tmp_path).values()) == 1000
