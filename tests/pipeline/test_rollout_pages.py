"""What an operator sees of a rollout, at every width: golden pages, the watched screen, the lines of a log.

`GOLDEN=write pytest tests/pipeline/test_rollout_pages.py` writes the pages; read their differences before a commit.
"""

import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from typing import Final

import pytest

from nxpipe.pipeline.canary.judge import Decision
from nxpipe.pipeline.cli.rollout.simulate import SAMPLES
from nxpipe.pipeline.rollout.follow import HEARTBEAT, StatusLog
from nxpipe.pipeline.rollout.planner import Slowness
from nxpipe.pipeline.rollout.render import status_line, status_page, watch_frame
from nxpipe.pipeline.rollout.simulate import TrafficModel, record_rollout
from nxpipe.pipeline.rollout.status import RolloutEnd, Status
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import unstyled
from tests.canary.samples import plan_with
from tests.conftest import ROOT
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.rollout_statuses import refused, sample, status_at, undecided

__all__ = ["nxpipe"]

PAGES: Final = Path(__file__).parent / "pages" / "rollout"
WIDTHS: Final = (60, 80, 120, 200)
STATUSES: Final[dict[str, Callable[[], Status]]] = {
    "running": lambda: status_at(sample("promoted"), 6),
    "suspected": lambda: status_at(sample("rolled-back"), 7),
    "rolled-back": lambda: status_at(sample("rolled-back"), end=RolloutEnd.ROLLED_BACK),
    "slower": lambda: status_at(sample("slower"), end=RolloutEnd.ROLLED_BACK),
    "promoted": lambda: status_at(sample("promoted"), end=RolloutEnd.PROMOTED),
    "undecided": lambda: status_at(undecided()),
    "in-shadow": lambda: status_at(refused(), -1),
    "refused": lambda: status_at(refused(), end=RolloutEnd.ROLLED_BACK),
}
COMMANDS: Final = {
    "plan": ("rollout", "plan", "--rps", "5", "--base-error", "0.5%"),
    "plan-explained": ("rollout", "plan", "--rps", "50", "--base-error", "0.5%", "--explain"),
    "simulate": (
        "rollout",
        "simulate",
        "--rps",
        "5",
        "--base-error",
        "0.5%",
        "--canary-error",
        "5%",
        "--rollouts",
        "20",
    ),
    "replay": ("rollout", "replay", "--sample", "rolled-back"),
}
# Of the method, not of an operator's view; odds are in `rollout log`, --explain and --json.
JARGON: Final = re.compile(r"\b(tau|bets?|odds|frozen|e-values?|nats|roll_back)\b")


def compare(name: str, pages: dict[int, str]) -> None:
    text = "".join(f"--- {width} columns ---\n{page.rstrip()}\n" for width, page in pages.items())
    file = PAGES / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def words_of(page: str) -> list[str]:
    """Without bars, whose length follows the width, and without the rate of a defect, which a narrow table omits."""
    return [word.strip(",") for word in page.casefold().split() if not set(word) <= set("[]=#.█▒░")]


def check_layout(pages: dict[int, str]) -> None:
    """No line is wider than the screen, and every word is whole: it is in the widest page too."""
    whole = set(words_of(pages[200]))
    for width, page in pages.items():
        assert max(map(len, page.splitlines())) <= width
        broken = [word for word in words_of(page) if word not in whole]
        assert not broken, (width, broken)


@pytest.mark.parametrize("name", STATUSES)
def test_the_status_of_a_rollout_is_this_page_at_every_width(name: str) -> None:
    status = STATUSES[name]()
    pages = {width: unstyled(status_page(status, width)) for width in WIDTHS}
    check_layout(pages)
    assert not JARGON.search(pages[200])
    compare(f"status-{name}", pages)


@pytest.mark.parametrize("name", ["running", "suspected", "promoted", "undecided"])
def test_the_watched_screen_is_this_page_at_every_width_and_fits_the_terminal(name: str) -> None:
    status = STATUSES[name]()
    pages = {width: "\n".join(map(unstyled, watch_frame(status, width, 60))) for width in WIDTHS}
    check_layout(pages)
    compare(f"watch-{name}", pages)
    for height in (8, 12, 24):
        frame = [unstyled(line) for line in watch_frame(status, 80, height)]
        assert len(frame) <= height
        assert " ".join(frame).endswith("Abort it with: nxpipe rollout abort search")
        assert any("more lines; enlarge the terminal" in line for line in frame) == (
            len(pages[80].split("\n")) > height
        )


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", COMMANDS)
def test_the_statistics_of_rollouts_are_these_pages_at_every_width(
    name: str, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    pages = {}
    for width in WIDTHS if name != "simulate" else (60, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        answer = nxpipe(*COMMANDS[name])
        assert answer.code == 0, answer.err
        pages[width] = answer.out
    check_layout(pages)
    assert name == "plan-explained" or not JARGON.search(pages[200])
    compare(name, pages)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "rolled-back",
            "Rolled back at 5 % after 7 min: 6 of 282 requests failed against 15 of 5,750 of the stable version; "
            "confidence 100:1, threshold 100:1.",
        ),
        (
            "slower",
            "Rolled back at 5 % after 3 min: p50 1.4x slower: 62 of 75 requests took longer than 40 ms against 586 of "
            "1,162 of the stable version; confidence 140,000:1, threshold 100:1.",
        ),
    ],
)
def test_a_verdict_is_one_plain_sentence(name: str, sentence: str) -> None:
    assert status_at(sample(name), end=RolloutEnd.ROLLED_BACK).sentence == sentence
    assert status_line(status_at(sample(name), end=RolloutEnd.ROLLED_BACK)) == f"blue 100 %; {sentence}"


def test_the_counts_of_a_verdict_are_those_of_the_record() -> None:
    status = status_at(sample("rolled-back"), end=RolloutEnd.ROLLED_BACK)
    records = [json.loads(line) for line in sample("rolled-back")[1:]]
    batches = [batch for record in records for batch in record["batches"]]
    counts = [
        sum(batch[arm][what] for batch in batches) for arm in ("canary", "stable") for what in ("errors", "requests")
    ]
    assert status.sentence is not None
    assert [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", status.sentence)[2:6]] == counts


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("rolled-back", TrafficModel("steady", 20, 0.002, 0.025)),
        ("slower", TrafficModel("steady", 20, 0.002, 0.002, Slowness(1.3))),
        ("promoted", TrafficModel("steady", 20, 0.002, 0.002)),
    ],
)
def test_a_sample_is_what_the_simulator_records(name: str, model: TrafficModel) -> None:
    """The command is in docs/guides/rollout.md; write the samples again when the judge changes."""
    assert record_rollout(plan_with(), model, 1) == sample(name)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_replayed_bit_for_bit(name: str, nxpipe: InProcess) -> None:
    answer = nxpipe("rollout", "replay", "--sample", name)
    assert answer.code == 0, answer.err
    assert "all reproduced" in answer.err
    assert "simulated by nxpipe" in " ".join(answer.err.split())


def test_a_log_has_a_line_for_each_change_and_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", stream)
    log = StatusLog(Console(), lambda: now[0])
    record = sample("promoted")
    for evaluations in range(1, len(record), 2):
        now[0] += 120
        log.show(status_at(record, evaluations))
    lines = stream.getvalue().splitlines()
    changes = [line.partition(", minute")[0] for line in lines]
    steps = [f"step {number} of 4, at {weight} %" for number, weight in enumerate((5, 25, 50, 95), 1)]
    assert [any(step in line for line in changes) for step in steps] == [True] * 4
    assert len(lines) < len(record) / 2  # most minutes change nothing
    for _ in range(3):
        now[0] += HEARTBEAT / 2
        log.show(status_at(record, 6))
    assert len(stream.getvalue().splitlines()) == len(lines) + 2  # back at the first step, and one heartbeat


def test_a_step_on_hold_says_why() -> None:
    status = status_at(sample("promoted"), 6)
    course = status.course
    assert course is not None
    last = dict(course.evaluations[-1].record)
    last["verdict"] = dict(last["verdict"]) | {"decision": Decision.FROZEN}
    held = replace(course, evaluations=(*course.evaluations[:-1], replace(course.evaluations[-1], record=last)))
    page = unstyled(status_page(replace(status, course=held), 120))
    assert "on hold while the stable version itself fails too often" in " ".join(page.split())


# A terminal

_WATCH: Final = """
import sys
sys.argv = ["nxpipe"]
from nxpipe.pipeline.rollout.follow import follow
from nxpipe.pipeline.util.console import Console, guard_streams
from tests.pipeline.rollout_statuses import sample, status_at
guard_streams()
try:
    follow(Console(), "search", lambda: status_at(sample("promoted"), 6), option="--watch")
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.sample(4)
def test_ctrl_c_leaves_the_watched_screen_as_it_was_and_says_how_to_come_back() -> None:
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", _WATCH], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    seen = b""
    while b"Ctrl-C leaves" not in seen:
        seen += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    try:
        while True:
            seen += os.read(master, 65536)
    except OSError:  # the other side is closed
        pass
    finally:
        os.close(master)
    assert process.wait() == 130
    begin, _, rest = seen.partition(b"\x1b[?1049h\x1b[?25l")
    screen, _, after = rest.partition(b"\x1b[?25h\x1b[?1049l")
    assert (begin, b"to advance" in screen) == (b"", True)
    assert b"The rollout continues; follow it with: nxpipe rollout status search --watch" in after
