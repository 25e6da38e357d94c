"""The report of a build: exact and anonymous as data; as a page it shows that data only."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.pipeline.build.jobs import (
    CellStatus,
    Event,
    Failure,
    FailureClass,
    JobFinished,
    JobLog,
    JobStarted,
    JobSubmitted,
)
from nxpipe.pipeline.build.report.document import ArtifactFigures, BuildHost, report_document
from nxpipe.pipeline.build.report.html import page
from nxpipe.pipeline.build.state import Results
from tests.build_report.world import (
    BEGAN,
    NO_SPACE,
    TOO_LARGE,
    after,
    artifact,
    cell,
    course,
    ends,
    matrix,
    over,
    plan,
    results,
    shape,
)

ABOUT = BuildHost(2, 8_000_000_000, "Linux x86_64", {"nxpipe": "0.1.0"})
HOME = Path("/home/somebody")


def report(of: Results, figures: Any = None) -> dict[str, Any]:
    return report_document(of, figures, ABOUT, HOME)


class Page(HTMLParser):
    """Every element with its attributes, and every text with its element."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._inside: list[str] = []
        self.feed(data.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._inside[-1] if self._inside else "", data))

    def said(self) -> str:
        return "".join(data for tag, data in self.texts if tag not in ("style", "script"))


# As data


def test_a_report_says_what_became_of_each_cell_and_what_it_took() -> None:
    one, two = cell("m", shape(64), why="weights: a before b", seconds=3.0), cell("m", shape(128), CellStatus.COMMITTED)
    of = plan(artifact("m", one, two))
    failure = JobFinished(one.key, 2.5, memory=5, failure=NO_SPACE)
    submitted = [JobSubmitted(one.key)] * 2
    events: list[Event] = [
        JobStarted(one.key, "host-17"),
        JobLog(one.key, "compile"),
        failure,
        JobStarted(one.key, "host-4"),
    ]
    state = after(of, [*events, *submitted])
    found = report(over(state, interrupted=True))
    assert {key: found[key] for key in ("format", "verdict", "exit_code", "began_at", "seconds", "counts")} == {
        "format": "nxpipe.build-report/1",
        "verdict": "interrupted",
        "exit_code": 130,
        "began_at": BEGAN,
        "seconds": 83.5,
        "counts": {"failed": 1, "waiting": 1},
    }
    (only,) = found["artifacts"]
    assert (only["title"], only["published"], only["asked"]["order"]["model_id"]) == ("m", False, "m")
    first = only["cells"][0]
    assert first["before"] == {"state": "to do", "why": "weights: a before b", "estimated_seconds": 3.0}
    assert (first["became"], first["attempts"], first["seconds"], first["memory_bytes"]) == ("failed", 2, 2.5, 5)
    assert first["missing"] == {
        "reason": "system", "message": NO_SPACE.message, "sort": "environmental", "kind": "OSError",
    }  # fmt: skip
    assert [
        (attempt["worker"], attempt["began"], attempt["over"], attempt["outcome"]) for attempt in found["attempts"]
    ] == [
        (1, 1.0, 3.0, "failed"),
        (2, 4.0, None, "cut short"),
    ]
    assert found["attempts"][0]["steps"] == [[2.0, "compile"]]
    assert json.loads(canonical_json(found)) == json.loads(json.dumps(found))


def test_a_report_names_neither_the_user_nor_a_machine() -> None:
    one = cell("m", shape())
    failure = Failure(
        FailureClass.DETERMINISTIC, "BuildRefused", "look at /home/somebody/x.py, not at /home/somebody-else", 11
    )
    events: list[Event] = [JobStarted(one.key, "ip-10-0-0-17.ec2.internal"), JobFinished(one.key, 1.0, failure=failure)]
    found = report(over(after(plan(artifact("/home/somebody/models/m", one)), events)))
    text = canonical_json(found).decode()
    assert "ec2.internal" not in text
    assert re.findall(r"/home/[\w-]*", text) == ["/home/somebody-else"] * text.count("/home/somebody-else")
    assert found["artifacts"][0]["title"] == "~/models/m"
    assert found["artifacts"][0]["asked"]["order"]["model_id"] == "~/models/m"


def test_what_a_program_is_predicted_to_take_stands_beside_what_its_build_took() -> None:
    figures = {"in_short": "1.50 ms predicted", "time": {"bound_by": "tensor", "latency_ns": 1.5e6, "busy_ns": {}}}
    of = matrix(1, [1], [64, 128])
    programs: dict[str, Any] = {
        "forward-b1-s64": figures,
        "forward-b1-s128": {"in_short": ["not", "as", "we", "write", "it"]},
    }
    known = {of.artifacts[0].key: ArtifactFigures(programs)}
    found = report(results(of, ends(course(of))), known)
    first, second = found["artifacts"][0]["cells"]
    assert first["predicted"] == {"in_short": "1.50 ms predicted", "latency_ns": 1.5e6, "bound_by": "tensor"}
    assert second["predicted"] is None
    assert "1.50 msbound by tensor" in Page(page(found)).said()
    times = {"ms": 5.75, "device_ms": 1.5, "collectives_ms": 4.0, "host_ms": 0.25}
    programs["forward-b1-s64"] = figures | {"this_program": times}
    found = report(results(of, ends(course(of))), known)
    assert found["artifacts"][0]["cells"][0]["predicted"]["this_program"] == times
    assert "5.75 mshost 0.25 ms, collectives 4.00 ms" in Page(page(found)).said()


def test_what_this_machine_is_said_to_be_holds() -> None:
    here = BuildHost.current()
    assert here.cores >= 1
    assert here.memory > 1_000_000
    assert {"nxpipe", "compiler", "python"} <= here.versions.keys()


def test_a_talkative_attempt_keeps_its_first_steps_only() -> None:
    one = cell("m", shape())
    events: list[Event] = [JobStarted(one.key, "w"), *(JobLog(one.key, f"line {number}") for number in range(1000))]
    (attempt,) = after(plan(artifact("m", one)), events).timeline
    assert [text for _, text in attempt.steps] == [f"line {number}" for number in range(50)]


# As a page


def hostile_report(text: str) -> dict[str, Any]:
    one = cell("m", shape(), why=text)
    failure = Failure(FailureClass.DETERMINISTIC, "BuildRefused", text, 11)
    events: list[Event] = [JobStarted(one.key, text), JobLog(one.key, text), JobFinished(one.key, 1.0, failure=failure)]
    return report(over(after(plan(artifact(text, one)), events)))


HOSTILE = (
    "</style></script><script>alert(1)</script>",
    "\" onload='x' <img src=http://evil.example>",
    "<!--",
    "&amp;lt;",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_strangers_words_are_text_on_the_page(text: str) -> None:
    _shows(text)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Cf"]), min_size=1))
def test_any_words_are_text_on_the_page(text: str) -> None:
    _shows(text)


def _shows(text: str) -> None:
    harmless, shown = Page(page(hostile_report("harmless"))), Page(page(hostile_report(text)))
    assert [tag for tag, _ in shown.elements] == [tag for tag, _ in harmless.elements]
    assert [set(said) for _, said in shown.elements] == [set(said) for _, said in harmless.elements]
    assert ("td", text) in shown.texts or text in shown.said()


def test_a_page_asks_nobody_for_anything_and_runs_nothing_but_its_own_script() -> None:
    of = matrix(2, [1, 4], [64, 128])
    data = page(report(over(after(of, course(of)))))
    shown = Page(data)
    for tag, said in shown.elements:
        assert not {"src", "style"} & set(said), (tag, said)
        assert (said.get("href") or "#").startswith("#"), (tag, said)
        assert not any(name.startswith("on") for name in said)
    policy = next(said["content"] for _, said in shown.elements if said.get("http-equiv") == "Content-Security-Policy")
    (script,), (style,) = ([data for tag, data in shown.texts if tag == name] for name in ("script", "style"))
    digests = [base64.b64encode(hashlib.sha256(entry.encode()).digest()).decode() for entry in (style, script)]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digests[1]}'"
    )
    assert b"@import" not in data
    assert b"url(" not in data


def test_failures_come_before_everything_else() -> None:
    of = matrix(2, [1], [64, 128, 256])
    failing, flaky = (entry.key for entry in of.artifacts[1].cells[1:])
    done = ends(course(of, failures={failing: TOO_LARGE, flaky: NO_SPACE}))
    result = Page(page(report(results(of, done, retrying={flaky})))).said()
    assert result.index(TOO_LARGE.message) < result.index(NO_SPACE.message) < result.index("Artifacts of the build")
    programs = result[result.index("Programs of the build") :]
    order = [programs.index(became) for became in ("failed", "not retried", "blocked", "built")]
    assert order == sorted(order)


def test_the_timeline_has_a_row_for_each_worker_and_a_bar_for_each_attempt() -> None:
    of = matrix(1, [1], [64, 128, 256])
    one, two, three = (value.key for _, value in of.cells())
    events: list[Event] = [
        JobStarted(one, "a"),
        JobStarted(two, "b"),
        JobFinished(one, 2.0),
        JobStarted(three, "a"),
        JobFinished(two, 3.0),
    ]
    shown = Page(page(report(over(after(of, events, 10.0)))))
    at = [number for number, (tag, said) in enumerate(shown.elements) if tag == "svg" and said.get("class") == "bar"]
    bars = [(shown.elements[number][1], shown.elements[number + 2][1]) for number in at]  # the second after: its shape
    whole = 83.5
    expected = [("good", 10, 0, 20), ("good", 20, 24, 30), ("warn", 40, 0, whole - 40)]
    assert [(shape["class"], bar["x"], bar["y"], bar["width"]) for bar, shape in bars] == [
        (f"k-{became}", f"{100 * x / whole:.3f}%", str(y), f"{100 * width / whole:.3f}%")
        for became, x, y, width in expected
    ]
    assert "worker 2" in shown.said()


def test_a_build_of_thousands_of_cells_is_a_page_that_a_browser_opens() -> None:
    of = matrix(10, range(1, 21), range(64, 64 * 17, 64))
    events = course(of)
    data = page(report(over(after(of, events, 0.1))))
    assert len(data) < 3_000_000
    assert "attempts not drawn" in Page(data).said()
