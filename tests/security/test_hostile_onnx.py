"""Any ONNX file becomes a graph or a typed error; none of it is executed, no other file is opened."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import numpy as np
import pytest
from onnx import external_data_helper

from nxpipe.emulator.capture import capture_file, data_files, dynamic_axes, file_outputs, file_parameters
from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ops import TakeAlong
from tests.security.audit import Seen, watched
from tests.security.hostile_onnx import hostile
from tests.security.onnx_files import projection, saved, weight

# Python's codecs, and the modules of these that load others when they are first used.
_LOADED_LATER: Final = ("nxpipe.emulator", "encodings", "google", "ml_dtypes", "numpy", "onnx")
_SECONDS: Final = 60  # of processor time for one file, ten times what the largest that is allowed takes
_MEMORY: Final = 2 * 2**30
_EVALUATED: Final = 2**16  # elements: on larger graphs onnx's evaluator may loop in Python for minutes


class _Harm(BaseException):
    """Not an Exception, so that no handler takes it for an error of the file."""


@pytest.fixture(autouse=True)
def _onnx_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The onnx package opens files of data in native code, which raises no audit event."""

    def refuse(*arguments: object) -> None:
        raise _Harm(f"onnx would open a file of data: {arguments}")

    monkeypatch.setattr(external_data_helper, "_open_external_data_fd", refuse)


@contextmanager
def _limited(seconds: int, memory: int) -> Iterator[None]:
    """Limits of CPU time and of additional memory; exceeding them fails the test."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Harm(f"more than {seconds} seconds of processor time")

    before, bounds = signal.signal(signal.SIGPROF, stop), resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text().splitlines()
    in_use = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_DATA, (in_use * 1024 + memory, bounds[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, bounds)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _read(path: Path) -> str:
    """Read such a file completely; returns how far that went."""
    try:
        axes = dict.fromkeys(dynamic_axes(path), 2)
        graph = capture_file(path, axes)
        data_files(path)
        file_parameters(path)
    except CompileError as error:
        return type(error).__name__
    # GatherElements of onnx's evaluator is numpy's `choose`, which walks to a place beyond the end step by step; what
    # ends a build of such a file is its limit of time.
    walks = any(isinstance(node.op, TakeAlong) for node in graph.nodes)
    if walks or sum(node.result.type.elements for node in graph.nodes) > _EVALUATED:
        return "graph"
    return _evaluated(path, graph)


def _evaluated(path: Path, graph: Graph) -> str:
    inputs = {name: np.ones(value.type.shape, value.type.dtype.held) for name, value in graph.inputs.items()}
    try:
        file_outputs(path, graph, inputs)
    except CompileError:
        return "graph that onnx does not run"
    return "graph that onnx runs"


def _require_harmless(seen: Seen, folder: Path) -> None:
    assert not seen.forbidden
    assert not seen.files_outside(folder)
    assert not seen.imports_beyond(*_LOADED_LATER)


def _tried(numbers: range, root: Path) -> dict[str, int]:
    _read(saved(projection(weight("w", 8, 4)), root))  # loads what is loaded for any file
    found: dict[str, int] = {}
    for number in numbers:
        folder = root / str(number)
        folder.mkdir()
        path = hostile(number, folder)
        before = set(folder.iterdir())
        try:
            with _limited(_SECONDS, _MEMORY), watched() as seen:
                outcome = _read(path)
            _require_harmless(seen, folder)
            assert set(folder.iterdir()) == before
        except BaseException as fault:
            fault.add_note(f"hostile file {number}")
            raise
        found[outcome] = found.get(outcome, 0) + 1
    return found


@pytest.mark.sample(2)
def test_hostile_files_end_in_a_graph_or_a_typed_error(tmp_path: Path) -> None:
    found = _tried(range(400), tmp_path)
    assert found["graph that onnx runs"] > 5  # not all are so broken that nothing is read of them
    assert len(found) > 4, found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("thousand", range(33))
def test_many_hostile_files_end_in_a_graph_or_a_typed_error(thousand: int, tmp_path: Path) -> None:
    assert _tried(range(1000 * (thousand + 1), 1000 * (thousand + 2)), tmp_path)


def test_a_hostile_file_is_the_same_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    assert hostile(7, first).read_bytes() == hostile(7, second).read_bytes()
