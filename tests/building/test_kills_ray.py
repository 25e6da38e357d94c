"""The same on a Ray cluster of two nodes, whose workers are no children of the driver."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.building.killing import Kind, how_long, kill_and_resume
from tests.building.world import Running, World, saved_world
from tests.executors.ray_cluster import ray_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def on_ray() -> Iterator[Kind]:
    with ray_cluster() as cluster:

        def world(folder: Path) -> World:
            saved = saved_world(folder)
            return World(folder, (*saved.words, "--executor", "ray", "--address", cluster.address))

        yield world


@pytest.fixture(scope="module")
def seconds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], float]:
    return how_long(tmp_path_factory)


def at_work(run: Running) -> set[int]:
    """The cluster's processes that carry out an item: it calls them after what they do."""
    return {pid for pid in _descendants(os.getpid()) if b"m.onnx" in _title(pid)} - run.processes()


def _title(pid: int) -> bytes:
    with suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        return title if title.startswith(b"ray::") else b""
    return b""


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                yield child
                yield from _descendants(child)


@pytest.mark.parametrize("seed", range(300, 400))
def test_a_build_on_a_cluster_that_is_killed_at_any_moment_is_taken_up_where_it_was(
    seed: int, on_ray: Kind, seconds: Callable[[Kind], float], tmp_path: Path
) -> None:
    kill_and_resume(on_ray(tmp_path), seed, seconds(on_ray), at_work)
