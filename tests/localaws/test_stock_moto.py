"""Stock moto reports success for what it has not done; the local AWS does it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.localaws.install import install
from tests.localaws.stock import CASES, asked


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    """In a process of its own: ours changes moto for good."""
    told = subprocess.run(
        [sys.executable, "-m", "tests.localaws.stock"],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-2",
            "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",
        },
        capture_output=True,
        check=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(told.stdout)
    return found


@pytest.mark.parametrize("what", CASES)
def test_what_stock_moto_calls_complete_and_has_not_done_is_done_here(
    what: str, stock: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    install()
    assert stock[what] == ["CREATE_COMPLETE", False]
    assert asked(what) == ("CREATE_COMPLETE", True)
