"""Progress of a build: on a terminal, in a log, for a program, and unwatched."""

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as Rich

from nxpipe.pipeline.build.jobs import CellStatus, Event, JobFinished, JobLog, JobStarted, from_document
from nxpipe.pipeline.build.plan import BuildPlan
from nxpipe.pipeline.build.report.live import JsonView, LineView, LiveView, live_view
from nxpipe.pipeline.build.report.live_table import screen
from nxpipe.pipeline.build.state import BuildState
from nxpipe.pipeline.util.console import Console
from tests.build_report.terminal import Screen, read_some
from tests.build_report.world import NO_SPACE, TOO_LARGE, Clock, artifact, cell, course, matrix, plan, shape
from tests.conftest import ROOT

Captured = pytest.CaptureFixture[str]


def standing(of: BuildPlan, clock: Clock | None = None) -> BuildState:
    return BuildState(of, clock or Clock())


def told(of: BuildState, *events: Event) -> BuildState:
    for event in events:
        of.apply(event)
    return of


def counts(of: BuildState) -> dict[str, int]:
    return {status.value: count for status, count in of.counts().items()}


def drawn(of: BuildState, width: int = 100, height: int = 24) -> list[str]:
    console = Rich(file=StringIO(), width=width, height=height, markup=False, emoji=False, highlight=False)
    console.print(screen(of, width, height))
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


# What stands


def test_every_cell_is_in_one_lot_from_the_first_to_the_last_event() -> None:
    title = "acme/tiny"
    to_do = [cell(title, shape(bucket)) for bucket in (128, 256, 512)]
    cells = [cell(title, shape(64), CellStatus.COMMITTED), *to_do]
    done = artifact("acme/done", cell("done", shape(), CellStatus.PUBLISHED))
    of = plan(artifact(title, *cells), done)
    one, two, three = (entry.key for entry in to_do)
    now = standing(of)
    assert counts(now) == {"cached": 2, "built": 0, "failed": 0, "running": 0, "queued": 3}
    told(now, JobStarted(one, "a"), JobLog(one, "compile"), JobStarted(two, "b"))
    assert counts(now) == {"cached": 2, "built": 0, "failed": 0, "running": 2, "queued": 1}
    told(
        now,
        JobFinished(one, 3.0),
        JobFinished(two, 1.0, failure=NO_SPACE),
        JobStarted(three, "a"),
        JobFinished(three, 0.1, cached=True),
    )
    assert counts(now) == {"cached": 3, "built": 1, "failed": 1, "running": 0, "queued": 0}
    told(now, JobStarted(two, "a"), JobFinished(two, 3.0))
    assert counts(now) == {"cached": 3, "built": 2, "failed": 0, "running": 0, "queued": 0}
    assert (now.published, now.done) == (1, 5)
    told(now, JobStarted(of.artifacts[0].key, "a"), JobFinished(of.artifacts[0].key, 0.2))
    assert (now.published, len(now.plan.artifacts)) == (2, 2)
    told(now, JobStarted(done.key, "a"), JobFinished(done.key, 0.2))  # once more, as --force has it
    assert (now.published, len(now.plan.artifacts)) == (2, 2)


def test_a_cell_of_two_artifacts_is_carried_out_once_and_counts_for_both() -> None:
    shared = cell("the same", shape())
    now = standing(plan(artifact("one", shared), artifact("two", shared)))
    assert counts(now)["queued"] == 2
    assert counts(told(now, JobStarted(shared.key, "a"), JobFinished(shared.key, 1.0)))["built"] == 2


EVENTS = st.sampled_from(
    [
        event
        for event in course(matrix(2, [1], [64, 128]))
        for event in (event, JobFinished(event.key, 1.0, failure=NO_SPACE))
    ]
)


@given(st.lists(EVENTS, max_size=40))
def test_whatever_comes_in_whatever_order_no_cell_is_lost(events: list[Event]) -> None:
    now = told(standing(matrix(2, [1], [64, 128])), *events)
    assert sum(now.counts().values()) == 4
    assert min(now.counts().values()) >= 0
    assert len([entry for entry in now.running() if entry.job.cell]) == counts(now)["running"]
    left = now.seconds_left()
    assert left is None or left >= 0


def test_the_time_left_is_the_plans_estimate_by_how_far_it_was_off_so_far() -> None:
    clock = Clock()
    cells = [cell("m", shape(bucket), seconds=10.0) for bucket in (64, 128, 256, 512)]
    now = standing(plan(artifact("m", *cells)), clock)
    assert now.seconds_left() == 40.0
    told(now, JobStarted(cells[0].key, "a"))
    clock.time += 4
    assert now.seconds_left() == 36.0
    told(now, JobFinished(cells[0].key, 20.0))
    assert now.seconds_left() == 60.0
    told(now, JobStarted(cells[1].key, "a"), JobStarted(cells[2].key, "b"))
    assert now.seconds_left() == 30.0  # two at once
    told(now, JobFinished(cells[1].key, 20.0), JobFinished(cells[2].key, 20.0), JobStarted(cells[3].key, "a"))
    clock.time += 5
    assert now.seconds_left() == 15.0  # the last one has nobody to share it with


def test_what_has_no_estimate_is_measured_by_its_size_and_until_then_not_known() -> None:
    cells = [cell("m", shape(bucket)) for bucket in (100, 300)]
    now = standing(plan(artifact("m", *cells)))
    assert now.seconds_left() is None
    told(now, JobStarted(cells[0].key, "a"))
    assert now.seconds_left() is None
    assert told(now, JobFinished(cells[0].key, 5.0)).seconds_left() == 15.0


# A log


def test_a_log_has_a_line_when_something_begins_and_one_when_it_ends(capsys: Captured) -> None:
    of = plan(
        artifact("acme/tiny", cell("t", shape(64)), cell("t", shape(128)), cell("t", shape(256), CellStatus.COMMITTED))
    )
    failing = of.artifacts[0].cells[1].key
    state = standing(of)
    with live_view(Console(), state):
        for event in course(of, failures={failing: TOO_LARGE}):
            state.apply(event)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "  [1/3] start   acme/tiny, forward-b1-s64 on local-1",
        "  [2/3] built   acme/tiny, forward-b1-s64 in 2.0 s, 3.0 MB",
        "  [2/3] start   acme/tiny, forward-b1-s128 on local-1",
        "  [3/3] failed  acme/tiny, forward-b1-s128 in 2.0 s: it needs 19.2 GB and a core holds 16 GB; pass --tp 4",
    ]


def test_a_log_has_one_line_for_an_artifact_and_the_steps_of_a_single_program(capsys: Captured) -> None:
    of = matrix(1, [1], [64])
    state = standing(of)
    with live_view(Console(), state):
        for event in course(of):
            state.apply(event)
    assert capsys.readouterr().err.splitlines() == [
        "  [0/1] start   acme/model-0, forward-b1-s64 on local-1",
        "  compile",
        "  [1/1] built   acme/model-0, forward-b1-s64 in 2.0 s, 3.0 MB",
        "  [1/1] publish acme/model-0 in 0.5 s",
    ]


def test_once_a_minute_a_log_names_what_runs(capsys: Captured) -> None:
    clock = Clock()
    of = matrix(1, [1], range(64, 64 * 8, 64))
    now = told(
        standing(of, clock), *(JobStarted(value.key, f"w{at}") for at, (_, value) in enumerate(of.cells()) if at < 6)
    )
    told(now, JobLog(next(of.cells())[1].key, "compile"))
    clock.time += 75
    LineView(Console()).beat(now)
    assert capsys.readouterr().err.splitlines() == [
        "  [0/7] running acme/model-0, forward-b1-s64 (compile, 1:15 min), acme/model-0, forward-b1-s128 (1:15 min), "
        "acme/model-0, forward-b1-s192 (1:15 min), acme/model-0, forward-b1-s256 (1:15 min), 2 more"
    ]
    LineView(Console()).beat(standing(of))
    assert capsys.readouterr().err == ""  # nothing runs


def test_the_sign_of_life_comes_without_any_event() -> None:
    heard = threading.Event()

    class Impatient(JsonView):
        every = 0.01

        def beat(self, state: BuildState) -> None:
            heard.set()

    of = matrix(1, [1], [64])
    state = standing(of)
    with LiveView(state, Impatient(Console())):
        state.apply(course(of)[0])
        assert heard.wait(30)
    assert not [thread for thread in threading.enumerate() if thread.name == "build-view"]


# A program, nobody


def test_a_program_gets_every_event_as_it_was_with_the_counts(capsys: Captured) -> None:
    of = matrix(1, [1], [64])
    events = course(of, failures={next(of.cells())[1].key: TOO_LARGE})
    state = standing(of)
    with live_view(Console(json=True), state):
        for event in events:
            state.apply(event)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    beside = ("title", "program", "counts", "seconds_left")
    assert [line["title"] for line in lines] == ["acme/model-0"] * 3
    assert [line["counts"]["running"] for line in lines] == [1, 1, 0]
    assert lines[-1]["counts"]["failed"] == 1
    plain_events = [{key: value for key, value in line.items() if key not in beside} for line in lines]
    assert list(map(from_document, plain_events)) == events


@pytest.mark.parametrize("json_too", [False, True])
def test_nothing_is_said_to_who_asked_for_quiet_or_has_nothing_to_build(json_too: bool, capsys: Captured) -> None:
    of = matrix(1, [1], [64])
    state = standing(of)
    with live_view(Console(quiet=True, json=json_too), state):
        for event in course(of):
            state.apply(event)
    with live_view(Console(json=json_too), standing(of)):
        pass
    assert capsys.readouterr().err == ""


# A terminal


def test_the_table_shows_who_works_on_what_and_what_failed_last() -> None:
    clock = Clock()
    cells = [cell("t", shape(bucket), seconds=60.0) for bucket in (64, 128, 256, 512)]
    now = standing(plan(artifact("acme/tiny for inf2", *cells)), clock)
    told(now, JobStarted(cells[0].key, "w1"), JobFinished(cells[0].key, 60.0), JobStarted(cells[1].key, "w1"))
    told(
        now,
        JobFinished(cells[1].key, 2.0, failure=TOO_LARGE),
        JobStarted(cells[2].key, "w1"),
        JobLog(cells[2].key, "compile forward-b1-s256"),
    )
    clock.time += 41
    lines = drawn(now)
    assert lines[0].split("  ")[0] == "0 of 1 artifact published"
    assert lines[0].endswith("0:41 elapsed, about 1:19 min left")
    assert lines[2] == "0 cached  1 built  1 failed  1 running  1 queued"
    assert lines[4].split() == ["PROGRAM", "OF", "WORKER", "STEP", "TIME"]
    assert lines[5].split() == ["forward-b1-s256", "acme/tiny", "for", "inf2", "w1", "compile", "0:41"]
    assert " ".join(lines[7].split()).startswith("failed forward-b1-s128 acme/tiny for inf2 it needs 19.2 GB")
    assert len(lines) == 8


def test_the_publishing_of_an_artifact_is_shown_as_such() -> None:
    of = matrix(1, [1], [64])
    now = told(standing(of), JobStarted(of.artifacts[0].key, "w1"))
    assert drawn(now)[5].split() == ["publish", "acme/model-0", "w1", "0:00"]


@pytest.mark.parametrize(("width", "height"), [(20, 7), (30, 10), (40, 12), (60, 20), (200, 50)])
def test_ten_thousand_cells_with_hundreds_at_work_fit_any_terminal(width: int, height: int) -> None:
    of = matrix(25, range(1, 21), range(64, 64 * 21, 64))
    cells = [value for _, value in of.cells()]
    assert len(cells) == 10_000
    now = told(standing(of), *(JobStarted(value.key, f"job/{at}") for at, value in enumerate(cells[:500])))
    told(now, *(JobFinished(entry.key, 1.0, failure=TOO_LARGE) for entry in cells[:100]))
    lines = drawn(now, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any(line.startswith("and ") and line.endswith("more") for line in lines)


def test_a_title_that_is_too_long_loses_its_middle() -> None:
    title = "somebody/a-model-with-a-very-long-name for inf2.48xlarge tp 8"
    one = cell(title, shape())
    line = drawn(told(standing(plan(artifact(title, one))), JobStarted(one.key, "w")), 60)[5]
    assert "somebody/" in line
    assert "tp 8" in line
    assert "…" in line


def test_markup_in_a_strangers_words_is_shown_as_it_is() -> None:
    one = cell("m", shape())
    now = told(
        standing(plan(artifact("[red]m[/red] :smile:", one))),
        JobStarted(one.key, "w"),
        JobLog(one.key, "[bold]\x1b[2J"),
    )
    line = drawn(now, 140)[5]
    assert "[red]m[/red] :smile:" in line
    assert r"[bold]\x1b[2J" in line


WATCHED = """
import signal, sys, time
from nxpipe.pipeline.build.report.live import live_view
from nxpipe.pipeline.build.jobs import CellStatus
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.build.state import BuildState
from tests.build_report.world import course, matrix
of = matrix(2, [1, 4], [64, 128])
state = BuildState(of)
with live_view(Console(), state):
    for number, event in enumerate(course(of)[:8]):
        state.apply(event)
    Console().say("a word in between")
    {then}
print("the end", file=sys.stderr)
"""


def on_a_terminal(then: str, act: Callable[[int], object]) -> tuple[Screen, bytes]:
    """The final screen. `act` is called with the process after the table has been visible for a while."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-c", WATCHED.format(then=then)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as child:
        os.close(theirs)
        said, acted, seen = b"", False, Screen()
        while some := read_some(ours):
            said += some
            seen.feed(some)
            if not acted and said.count(b"PROGRAM") > 3:  # it was drawn on the beat, too
                act(child.pid)
                acted = True
    os.close(ours)
    return seen, said


def test_a_build_that_is_over_leaves_nothing_of_its_table_on_the_terminal() -> None:
    seen, said = on_a_terminal("", lambda _: None)
    assert b"7 queued" in said
    assert seen.lines == ["a word in between", "the end"]
    assert seen.cursor_is_seen


def test_ctrl_c_leaves_nothing_of_the_table_on_the_terminal() -> None:
    seen, said = on_a_terminal("time.sleep(60)", lambda child: os.kill(child, 2))
    assert b"7 queued" in said
    assert seen.lines[0] == "a word in between"
    assert seen.lines[1].startswith("Traceback")
    assert seen.lines[-1] == "KeyboardInterrupt"
    assert seen.cursor_is_seen


def test_who_is_killed_has_not_taken_the_cursor_along() -> None:
    seen, _ = on_a_terminal("time.sleep(60)", lambda child: os.kill(child, 9))
    assert any("PROGRAM" in line for line in seen.lines)
    assert seen.cursor_is_seen


@pytest.mark.parametrize("setting", ["dumb", ""])
def test_a_terminal_that_cannot_draw_gets_lines(
    setting: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", setting)
    if not setting:
        monkeypatch.delenv("TERM")
    of = matrix(1, [1], [64])
    state = standing(of)
    with live_view(Console(), state):
        state.apply(course(of)[0])
    assert capsys.readouterr().err == "  [0/1] start   acme/model-0, forward-b1-s64 on local-1\n"


def test_rich_is_imported_only_for_a_terminal() -> None:
    code = (
        "import sys; from nxpipe.pipeline.build.report import live, plan_text, summary, github, document; "
        "from nxpipe.pipeline.build.state import BuildState; "
        "from nxpipe.pipeline.util.console import Console; from tests.build_report.world import matrix, course; "
        "of = matrix(1, [1], [64]); state = BuildState(of); "
        "watched = live.live_view(Console(), state); watched.handle(course(of)[0]); watched.close(); "
        "print(*(name for name in ('rich', 'torch', 'transformers', 'boto3', 'numpy') if name in sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == ""
