"""Operations that stock moto reports as complete without doing them; the local AWS does them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.localaws.install import install
from tests.localaws.stock import CASES, run_case


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    """The results of stock moto, from a process of its own: the patches change moto permanently."""
    process = subprocess.run(
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
    document: dict[str, Any] = json.loads(process.stdout)
    return document


@pytest.mark.parametrize("case", CASES)
def test_what_stock_moto_calls_complete_and_has_not_done_is_done_here(
    case: str, stock: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    install()
    assert stock[case] == ["CREATE_COMPLETE", False]
    assert run_case(case) == ("CREATE_COMPLETE", True)
