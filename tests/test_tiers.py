"""Samples and parts leave no test out: n successive commits run every case, and so do the n parts of a tier."""

from collections import Counter
from pathlib import Path

import hypothesis.core
import pytest

from tests import conftest
from tests.tiers import THINNING

MODULE = f"""
import pytest

pytestmark = pytest.mark.sample(2)

@pytest.mark.sample(3)
@pytest.mark.parametrize(("a", "b"), [(number, -number) for number in range(3 * {THINNING})])
@pytest.mark.parametrize("c", range(3))
def test_swept(a, b, c): ...

def test_one(): ...
def test_two(): ...

@pytest.mark.slow
def test_slow(): ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hypothesis.core, "global_force_seed", hypothesis.core.global_force_seed)
    (tmp_path / "test_swept.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    sample(n): n\n    slow: s\n")
    return tmp_path / "test_swept.py"


def selected(module: Path, *options: str) -> list[str]:
    names: list[str] = []

    class Names:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            names.extend(item.name for item in session.items)

    words = ["--collect-only", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *options, str(module)]
    assert pytest.main(words, plugins=[conftest, Names()]) == pytest.ExitCode.OK
    return names


def test_as_many_successive_commits_as_a_sample_has_parts_run_every_case_once(module: Path) -> None:
    runs = [selected(module, "-m", "not slow", "--sample", f"{number:08x}") for number in range(6 * THINNING)]
    every = selected(module, "-m", "")
    counts = Counter(name for run in runs for name in run)
    assert counts == {name: 2 if "[" in name else 3 for name in every if name != "test_slow"}
    for run in runs:
        assert {name.partition("[")[2][0] for name in run if "[" in name} == {"0", "1", "2"}  # each value of c


def test_all_samples_are_all_cases_of_the_commit_tier(module: Path) -> None:
    every = selected(module, "-m", "")
    assert selected(module, "-m", "not slow", "--all-samples") == [name for name in every if name != "test_slow"]


def test_a_commit_always_runs_the_same_cases(module: Path) -> None:
    one, again = (selected(module, "-m", "not slow", "--sample", "0123abcd" + more) for more in ("", "ef" * 16))
    assert one == again != []


def test_the_parts_of_a_tier_are_the_tier(module: Path) -> None:
    parts = [selected(module, "-m", "", "--part", f"{number}/4") for number in (1, 2, 3, 4)]
    assert sorted(name for part in parts for name in part) == sorted(selected(module, "-m", ""))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
