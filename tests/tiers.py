"""The two tiers of the tests, and the sample of a large test in the commit tier (docs/testing.md).

Tests and modules marked `sample(n)` run one (4 n)-th of their cases in the commit tier (`THINNING` is 4): those where
the number of the commit, a number for the test's name and the number of the case add up to a multiple of 4 n. So 4 n
successive numbers run all cases, and all workers and reruns of a commit run the same cases. The other cases get the
mark `slow`, which is the nightly tier's. `sample(n, "name")` runs all cases of all tests with this name on one of 4 n
commits: those with one expensive fixture.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

THINNING: Final = 4  # keeps the commit tier within its six minutes; a mark states the share of a test beside others
EXAMPLES: Final = {"commit": 10, "nightly": 200}  # examples of each property
NIGHTLY_TIMEOUT: Final = 1800.0  # seconds of a test, for 20 times the examples of the commit tier's five minutes
_AS_WRITTEN: Final = 50  # the profile size at which a test's own number applies unscaled


def register_profiles() -> None:
    """Register the profiles, without deadlines: no test fails because the machine is slow."""
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
    """The number of the given or the checked-out commit; 0 outside of a repository."""
    if commit is None:
        result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
        commit = result.stdout.strip() or "0"
    return int(commit[:8], 16)


def mark_unsampled(items: Sequence[pytest.Item], number: int) -> None:
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None and isinstance(item, pytest.Function):
            parts, *group = (mark.args[0] * THINNING, *mark.args[1:])
            place = crc32(group[0].encode()) if group else _place(item)
            if (place + number) % parts:
                item.add_marker("slow")


def _place(item: pytest.Function) -> int:
    """The number of the case among those of its test, from a start number for the test's name."""
    indices = item.callspec.indices.values() if hasattr(item, "callspec") else ()
    return crc32(item.originalname.encode()) + max(indices, default=0)


def part_of(items: list[pytest.Item], part: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The items of part `k/n` (every n-th, because neighbours take equally long), and the others."""
    k, n = (int(number) for number in part.split("/"))
    if not 1 <= k <= n:
        raise pytest.UsageError(f"--part {part}: expected K/N with 1 <= K <= N")
    return items[k - 1 :: n], [item for at, item in enumerate(items) if at % n != k - 1]
