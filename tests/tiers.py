"""The two tiers of the tests, and what the commit tier takes of a large test. docs/testing.md explains them.

Tests and modules marked `sample(n)` run one n-th of their cases in the commit tier: those where the number of the
commit, a number for the test's name and the indices of the case, one for each `parametrize`, add up to a multiple of n.
So n successive numbers run all cases, a value of one parameter occurs in every run if another has n values, and all
workers and reruns of a commit run the same cases. The other cases get the mark `slow`, which is the nightly tier's.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

EXAMPLES: Final = {"commit": 15, "nightly": 200}  # of each property
_AS_WRITTEN: Final = 50  # the examples of a profile in which `max_examples` of a test holds as it is written


def register_profiles() -> None:
    """A slow machine is no defect: no test fails because it takes long."""
    for name, examples in EXAMPLES.items():
        settings.register_profile(
            name,
            max_examples=examples,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile("commit")


def examples(written: int) -> int:
    """The number of examples of a test that needs more or fewer than others, in the current tier."""
    return max(2, written * settings().max_examples // _AS_WRITTEN)


def commit_number(root: Path, commit: str | None) -> int:
    """Of the given or the checked-out commit; outside of a repository it is 0."""
    if commit is None:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
        commit = asked.stdout.strip() or "0"
    return int(commit[:8], 16)


def mark_unsampled(items: Sequence[pytest.Item], number: int) -> None:
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None and isinstance(item, pytest.Function):
            (parts,) = mark.args
            if (_place(item) + number) % parts:
                item.add_marker("slow")


def _place(item: pytest.Function) -> int:
    """The sum of its indices, one for each `parametrize`; tests of a module begin at different places."""
    place = crc32(item.originalname.encode())
    if not hasattr(item, "callspec"):
        return place
    indices = dict(item.callspec.indices)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        place += max(indices.pop(name.strip()) for name in names)
    return place + sum(indices.values())  # of the parametrized fixtures


def part_of(items: list[pytest.Item], part: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The items of part `k/n`, and the others. It is every n-th, for neighbours take equally long."""
    k, n = (int(number) for number in part.split("/"))
    if not 1 <= k <= n:
        raise pytest.UsageError(f"--part {part}: expected K/N with 1 <= K <= N")
    return items[k - 1 :: n], [item for at, item in enumerate(items) if at % n != k - 1]
