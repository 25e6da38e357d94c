"""docs/reference/building.md is a contract: its tables of statuses and of failure classes are those of the code."""

import re
from collections.abc import Iterator, Mapping

from nxpipe.pipeline.build.jobs import EVENT_WORDS, PLAN_WORDS, REPORT_WORDS, CellStatus, FailureClass
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reference" / "building.md").read_text()


def rows(header: str) -> Iterator[list[str]]:
    """The cells of each row of the table with this header, without backticks."""
    lines = iter(PAGE[PAGE.index(header) :].splitlines()[2:])
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def word(words: Mapping[CellStatus, str], status: CellStatus) -> str:
    return words.get(status, "")


def test_the_page_has_every_status_with_its_words_in_documents() -> None:
    expected = {
        status.value: [word(PLAN_WORDS, status), word(EVENT_WORDS, status.progress), word(REPORT_WORDS, status)]
        for status in CellStatus
    }
    for status in (CellStatus.SKIPPED, CellStatus.BLOCKED):
        expected[status.value][1] = ""  # only at the end of a build, when there are no more events
    found = {row[0]: row[1:4] for row in rows("| Status | Plan | Events | Report | Meaning |")}
    assert found == expected


def test_the_page_has_every_failure_class_with_its_word_in_documents() -> None:
    found = {row[0]: row[1] for row in rows("| Class | In documents | Examples | Scheduler |")}
    assert found == {entry.name.lower(): entry.value for entry in FailureClass}


def test_files_that_the_page_names_exist() -> None:
    names = re.findall(r"`(pipeline/[\w/]+\.py)`", PAGE)
    assert names
    assert [name for name in names if not (ROOT / name).is_file()] == []
