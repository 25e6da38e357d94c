"""Progress of a transfer: its text, its stream and its frequency."""

import json
import sys

import pytest

from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(console: Console, steps: int, seconds: float, size: int = 1_000_000) -> None:
    clock = Clock()
    with Progress(console, "fetch a model", steps * size, clock) as progress:
        for _ in range(steps):
            clock.now += seconds
            progress.sent(size)


def test_a_log_gets_a_line_every_few_seconds_with_share_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    run(Console(), steps=12, seconds=1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].strip() == "fetch a model: 41 % of 12.0 MB, 1.0 MB/s, 7 s left"


def test_what_is_over_at_once_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run(Console(), steps=100, seconds=0.001)
    assert capsys.readouterr() == ("", "")


def test_a_program_gets_lines_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    run(Console(json=True), steps=10, seconds=1)
    out, err = capsys.readouterr()
    assert out == ""
    first, second = map(json.loads, err.splitlines())
    assert first == {"done": 5_000_000, "total": 10_000_000, "bytes_per_second": 1_000_000, "seconds_left": 5.0}
    assert second["done"] == 10_000_000


@pytest.mark.parametrize("json_wanted", [False, True])
def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str], json_wanted: bool) -> None:
    run(Console(quiet=True, json=json_wanted), steps=100, seconds=1)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_one_line_that_is_gone_in_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    run(Console(), steps=4, seconds=1)
    err = capsys.readouterr().err
    assert "\n" not in err
    assert err.count("\r") == 5
    assert "[############            ]" in err
    assert err.endswith("\r\033[K")


@pytest.mark.parametrize("columns", [80, 60, 30, 10])
def test_the_line_never_wraps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Only one row of a terminal can be written over."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    run(Console(), steps=4, seconds=1)
    rows = capsys.readouterr().err.replace("\033[K", "").split("\r")
    assert 0 < max(map(len, rows)) < columns


def test_a_dumb_terminal_is_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    run(Console(), steps=12, seconds=1)
    assert "\r" not in capsys.readouterr().err


def test_what_came_to_nothing_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress(Console(json=True), "fetch", 100, clock) as progress:
        progress.sent(60)
        clock.now = 6
        progress.sent(-60)
        clock.now = 12
        progress.sent(100)
    done = [json.loads(line)["done"] for line in capsys.readouterr().err.splitlines()]
    assert done == [0, 100]


def test_a_calculation_is_counted_in_its_own_unit(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress(Console(), "fit constants", 40, clock, unit="fits") as progress:
        clock.now = 6
        progress.sent(20)
    assert capsys.readouterr().err.strip() == "fit constants: 50 % of 40 fits, 6 s left"
