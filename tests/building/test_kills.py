"""SIGKILL of a driver, or of a worker, at a random moment: what was committed stays, the next build makes the rest."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.building.killing import Kind, how_long, kill_and_resume
from tests.building.world import models_world, saved_world

pytestmark = pytest.mark.sample(24)


@pytest.fixture(scope="module")
def seconds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], float]:
    return how_long(tmp_path_factory)


@pytest.mark.parametrize("seed", range(1))
def test_a_build_that_is_killed_is_taken_up_where_it_was(
    seed: int, seconds: Callable[[Kind], float], tmp_path: Path
) -> None:
    kill_and_resume(saved_world(tmp_path), seed, seconds(saved_world))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_a_build_that_is_killed_at_any_moment_is_taken_up_where_it_was(
    seed: int, seconds: Callable[[Kind], float], tmp_path: Path
) -> None:
    kill_and_resume(saved_world(tmp_path), seed, seconds(saved_world))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 220))
def test_a_build_of_models_that_is_killed_at_any_moment_is_taken_up_where_it_was(
    seed: int, seconds: Callable[[Kind], float], tmp_path: Path
) -> None:
    kill_and_resume(models_world(tmp_path), seed, seconds(models_world))
