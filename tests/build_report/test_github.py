"""A build in GitHub Actions: its page shows the intended text for any name of a model and any error."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from nxpipe.pipeline.build.jobs import Failure, FailureClass, JobFinished
from nxpipe.pipeline.build.report.github import MOST, annotations, in_github, step_summary, write_summary
from nxpipe.pipeline.build.state import Results
from nxpipe.pipeline.util.text import plain
from tests.build_report.world import NO_SPACE, TOO_LARGE, artifact, cell, course, ends, matrix, plan, results, shape

HOSTILE = (
    "<script>alert(1)</script>|x|\n::error::no",
    "![a](http://evil.example/b.png) @octocat #12",
    "`a` **b** _c_ ~~d~~ [e](//evil.example) www.evil.example $x$",
    "100%0A::set-output name=a::b, c=d",
    "##[add-mask]a",
)


def of_one(title: str, message: str) -> Results:
    """A build of a hostile model that failed with a hostile error."""
    one = cell("m", shape())
    failure = Failure(FailureClass.DETERMINISTIC, "BuildRefused", message, 11)
    return results(plan(artifact(title, one)), [JobFinished(one.key, 1.0, failure=failure)])


def understood(line: str) -> tuple[str, dict[str, str], str]:
    """A line as the runner parses it: the command, its properties, its data."""
    about, data = re.fullmatch(r"::(.*?)::(.*)", line).groups()  # type: ignore[union-attr]
    name, _, properties = about.partition(" ")
    pairs = (part.split("=", 1) for part in properties.split(",") if part)
    return name, {key: _unescaped(value, {":": "%3A", ",": "%2C"}) for key, value in pairs}, _unescaped(data, {})


def _unescaped(text: str, more: dict[str, str]) -> str:
    for token, escaped in ({"\r": "%0D", "\n": "%0A"} | more | {"%": "%25"}).items():
        text = text.replace(escaped, token)
    return text


class Page(HTMLParser):
    """The page as a browser parses it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.cells += [""] if tag == "td" else []
        self.inside = self.inside or tag == "td"

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "td"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.cells[-1] += data


def rendered(markdown: str) -> Page:
    html = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown)
    return Page(html)


def test_only_the_runner_of_github_is_spoken_to() -> None:
    assert in_github({"GITHUB_ACTIONS": "true"})
    assert not in_github({"GITHUB_ACTIONS": "false"})
    assert not in_github({})


def test_the_summary_has_what_is_missing_before_what_is_there() -> None:
    of = matrix(2, [1], [64, 128])
    failing = of.artifacts[0].cells[1].key
    text = step_summary(results(of, ends(course(of, failures={failing: TOO_LARGE}))))
    assert text.startswith(
        "## ❌ nxpipe build\n\n4 programs: 2 built, 1 failed, 1 blocked; 1 of 2 artifacts published; "
    )
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["", "❌", "⏸️", "", "✅"]
    assert "| forward-b1-s{64,128} | acme&#47;model-1 | 4.0 s | 3.0 MB | built |" in rows[-1]
    assert step_summary(results(of, ends(course(of)))).startswith("## ✅ nxpipe build\n\n4 programs: 4 built; ")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_that_a_stranger_says_is_markup_on_the_page(hostile: str) -> None:
    _nothing_of_it_is_markup(hostile)


@given(st.text(min_size=1))
def test_no_text_at_all_is_markup_on_the_page(text: str) -> None:
    _nothing_of_it_is_markup(f"x{text}x")


def _nothing_of_it_is_markup(hostile: str) -> None:
    page = rendered(step_summary(of_one(hostile, hostile)))
    assert page.tags <= {"h2", "p", "table", "thead", "tbody", "tr", "th", "td", "br", "div"}
    assert len(page.cells) == 6
    title, message = (page.cells[at].replace("\u200b", "") for at in (2, 5))
    meant = plain(hostile).replace("\u200b", "")
    assert title == meant
    assert message.startswith(f"{meant} ")
    assert "@o" not in page.cells[2]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_an_annotation_is_one_command_with_the_text_that_was_meant(hostile: str) -> None:
    _is_one_command(hostile)


@given(st.text(min_size=1))
def test_no_text_at_all_is_a_command_to_the_runner(text: str) -> None:
    _is_one_command(f"x{text}x")


def _is_one_command(hostile: str) -> None:
    (line,) = annotations(of_one(hostile, hostile))
    assert len(line.splitlines()) == 1
    assert "##[" not in line
    name, properties, data = understood(line)
    assert (name, properties) == ("error", {"title": "nxpipe build: does-not-compile"})
    message, names, _ = data.split("\n")
    assert message == plain(hostile)
    assert names == f"{plain(hostile)}, forward-b1-s128"


def test_there_is_an_error_for_every_reason_and_one_warning_for_all_that_was_not_tried() -> None:
    of = matrix(3, [1], [64, 128])
    first, second = (entry.cells[0].key for entry in of.artifacts[:2])
    done = [JobFinished(first, 1.0, failure=TOO_LARGE), JobFinished(second, 1.0, failure=NO_SPACE)]
    names = [understood(line)[:2] for line in annotations(results(of, done))]
    assert names == [
        ("error", {"title": "nxpipe build: does-not-fit"}),
        ("error", {"title": "nxpipe build: system"}),
        ("warning", {"title": "nxpipe build: not tried"}),
    ]
    assert annotations(results(of, ends(course(of)))) == []


def test_more_reasons_than_github_shows_end_in_a_word_about_the_others() -> None:
    of = matrix(12, [1], [64])
    done = [
        JobFinished(value.key, 1.0, failure=Failure(FailureClass.DETERMINISTIC, "BuildRefused", f"reason {name}", 11))
        for name, (_, value) in zip("abcdefghijkl", of.cells(), strict=True)
    ]
    shown = annotations(results(of, done))
    assert len(shown) == 10
    assert understood(shown[-1])[2] == "3 more reasons: see the summary of the step"


def test_a_long_list_is_folded_and_one_that_has_no_room_ends_in_a_word_about_the_rest() -> None:
    of = matrix(200, [1], [64])
    everything = results(of, ends(course(of)))
    long = step_summary(everything)
    assert rendered(long).tags >= {"details", "summary", "table"}
    assert len(rendered(long).cells) == 200 * 6
    short = step_summary(everything, limit=4000)
    assert len(short.encode()) <= 4000
    shown = short.count("✅ |")
    assert 0 < shown < 200
    assert f"{200 - shown} rows did not fit; the build report has all." in short
    assert short.rstrip().endswith("</details>")


def test_the_summary_is_appended_and_never_makes_the_file_larger_than_github_takes(tmp_path: Path) -> None:
    of = matrix(2, [1], [64])
    path = tmp_path / "summary.md"
    path.write_text("# before\n")
    environment = {"GITHUB_STEP_SUMMARY": str(path)}
    done = results(of, ends(course(of)))
    assert write_summary(done, environment) == path
    assert path.read_text() == "# before\n" + step_summary(done)
    path.write_bytes(b"x" * (MOST - 20))
    assert write_summary(done, environment) is None
    assert path.stat().st_size == MOST - 20
    assert write_summary(done, {}) is None
