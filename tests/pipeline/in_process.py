"""The `nxpipe` command in this process, from its arguments to its exit code, for tables of many runs."""

import signal
import sys
from collections.abc import Iterator

import pytest

from nxpipe.pipeline.cli.main import main
from tests.pipeline.command import Answer


class InProcess:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Answer:
        self._monkeypatch.setattr(sys, "argv", ["nxpipe", *arguments])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Answer(ended.value.code, out, err)


@pytest.fixture
def nxpipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[InProcess]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield InProcess(monkeypatch, capsys)
    for number, handler in before.items():
        signal.signal(number, handler)
